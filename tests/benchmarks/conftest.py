import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own rates are of no interest here: measure them on little."""
    monkeypatch.setattr(timing, "GEMM_SIZE", 64)
    monkeypatch.setattr(timing, "COPY_ELEMENTS", 2**12)
