"""`trainer.precision: auto`: what it stands for on each device."""

import pytest

from linrope.training.precision import automatic_precision


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("native", "precision", "why"),
    [
        (True, "bf16-mixed", "the processor multiplies bfloat16"),
        (False, "32-true", "the processor does not multiply bfloat16 natively"),
    ],
)
def test_on_a_cpu_the_processor_decides(accelerator, native, precision, why, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("linrope.training.precision.multiplies_bfloat16", lambda: native)
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
