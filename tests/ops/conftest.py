import pytest

from tests.interpreter import interpret_kernels


@pytest.fixture(autouse=True)
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_kernels(monkeypatch)
