"""`trainer.precision: auto`: what it stands for on each device."""

import re

import pytest

from linrope.training.precision import automatic_precision, why_slow


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("native", "precision", "why"),
    [
        (True, "bf16-mixed", "the processor multiplies bfloat16 fast"),
        (False, "32-true", "the processor does not multiply bfloat16 fast"),
    ],
)
def test_on_a_cpu_the_processor_decides(accelerator, native, precision, why, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("linrope.training.precision.has_fast_bfloat16", lambda: native)
    assert automatic_precision(accelerator) == (precision, why)


@pytest.mark.parametrize(
    ("there", "native", "precision"), [(True, True, "bf16-mixed"), (True, False, "32-true"), (False, True, "32-true")]
)
def test_on_a_gpu_the_gpu_decides_and_emulation_does_not_count(there, native, precision, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert automatic_precision("gpu")[0] == precision


@pytest.mark.parametrize("accelerator", ["mps", "tpu", "auto"])
def test_other_devices_train_in_float32(accelerator, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    why = f"whether bfloat16 is fast on {accelerator} is unknown"
    assert automatic_precision(accelerator) == ("32-true", why)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("device", "name"), [("cpu", "processor"), ("cuda", "GPU")])
def test_bfloat16_without_instructions_for_it_is_said_to_be_slow(precision, device, name, monkeypatch):
    monkeypatch.setattr("linrope.training.precision.has_bfloat16", lambda device: False)
    expected = f"trainer.precision={precision} is slow here: this {name} has no fast instructions .*: set 32-true"
    assert re.match(expected, why_slow(precision, device))
    assert why_slow(precision, "mps") is None
    assert why_slow("32-true", device) is None
    monkeypatch.setattr("linrope.training.precision.has_bfloat16", lambda device: True)
    assert why_slow(precision, device) is None
