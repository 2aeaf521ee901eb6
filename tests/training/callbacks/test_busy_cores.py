"""The warning where other programs hold the cores."""

import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from linrope.training.callbacks.busy_cores import BusyCores
from linrope.utils import busy_cores


@pytest.fixture
def step(monkeypatch):
    """The end of a batch, five seconds after the last, where a small operation takes two threads so many seconds."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    now, callback = 0.0, BusyCores()
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def step(seconds: float, after: float = 5.0, device: str = "cpu") -> None:
        nonlocal now
        trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
        monkeypatch.setattr(busy_cores, "seconds_of_small_operation", lambda threads: seconds)
        if now == 0:
            callback.on_train_start(trainer, None)
        now += after
        callback.on_train_batch_end(trainer, None, None, None, 0)

    return step


def test_a_warning_once_after_two_slow_looks_in_a_row(step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seconds in (8e-3, 5e-6, 8e-3, 5e-6, 8e-3):
            step(seconds)
        step(8e-3, after=4)
    with pytest.warns(UserWarning, match=r"slow: the smallest operation of PyTorch's 2 threads takes 8 ms.*SPINCOUNT"):
        step(8e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(8e-3)


def test_gpus_are_not_looked_at(step):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(8e-3, device="cuda")


def test_one_thread_waits_for_nobody(step, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(8e-3)


def test_a_small_operation_is_timed_by_its_median(monkeypatch):
    ticks = iter([0, 5, 10, 12, 20, 21, 30, 33, 40, 44, 50, 52, 60, 62, 70, 72, 80, 89])
    monkeypatch.setattr(busy_cores.time, "perf_counter", lambda: next(ticks))
    assert busy_cores.seconds_of_small_operation(1) == 2
