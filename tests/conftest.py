import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Triton decides when it is imported, and when a kernel is defined, whether its interpreter runs it: here, always.
# tests/ops says where the kernels may be asked for on CPU tensors; elsewhere they need a GPU, as for a user.
os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is not None:
    importlib.import_module("linrope.ops.triton_kernels")
del os.environ["TRITON_INTERPRET"]

import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors this small only lose by more threads, and lose much beside other work on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
    yield
    torch.set_num_threads(threads)
