import pytest

from benchmarks.harness import timing


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own rates are of no interest here: measure them on little."""
    monkeypatch.setattr(timing, "GEMM_SIZE", 64)
    monkeypatch.setattr(timing, "COPY_ELEMENTS", 2**12)


@pytest.fixture(autouse=True)
def one_call_a_turn(monkeypatch):
    """So that tests can count calls; what a turn is has a test of its own."""
    monkeypatch.setattr(timing, "TURN_CALLS", 1)
