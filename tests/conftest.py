from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors this small only lose by more threads, and lose much beside other work on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
    yield
    torch.set_num_threads(threads)
