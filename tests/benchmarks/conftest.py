import pytest

from benchmarks.harness import timing


@pytest.fixture(autouse=True)
def short_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own rates are of no interest here, and tests count calls: one a turn."""
    monkeypatch.setattr(timing, "GEMM_SIZE", 64)
    monkeypatch.setattr(timing, "COPY_ELEMENTS", 2**12)
    monkeypatch.setattr(timing, "TURN_CALLS", 1)
