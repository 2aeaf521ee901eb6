"""Memory of training steps on fake tensors, against processes that really take them."""

import sys
from collections.abc import Callable

import pytest
import torch

from benchmarks.harness import memory
from benchmarks.harness.processes import in_new_process
from linrope import LanguageModel, LanguageModelConfig
from linrope.profiling.fake_tensors import shapes_only
from linrope.profiling.memory_estimate import estimate_training_memory, step_loss

SIZES = {"d_model": 64, "n_layers": 3, "n_heads": 4, "short_conv": 4}
MODELS = {
    "linear": LanguageModelConfig(**SIZES, forget_gate=True),
    "softmax": LanguageModelConfig(**SIZES, attention="softmax"),
}


def peak_of_two_steps(config: LanguageModelConfig, batch_size: int, length: int, segment_length: int | None) -> int:
    """In this process: the second step has AdamW's moments from the start."""

    def prepare() -> Callable[[], object]:
        model = LanguageModel(config)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(256, (batch_size, length + 1))

        def step() -> None:
            optimizer.zero_grad()
            (step_loss(model, tokens, segment_length) / (batch_size * length)).backward()
            optimizer.step()

        return lambda: (step(), step())

    return memory.peak_of(prepare, "cpu").extra


@pytest.mark.skipif(sys.platform != "linux", reason="sizes of processes, and an allocator, as Linux has them")
@pytest.mark.parametrize(
    ("name", "batch_size", "length", "segment_length"),
    [
        ("linear", 2, 2048, None),
        pytest.param("linear", 1, 8192, None, marks=pytest.mark.exhaustive),
        pytest.param("softmax", 2, 2048, None, marks=pytest.mark.exhaustive),
        pytest.param("softmax", 1, 4096, None, marks=pytest.mark.exhaustive),
        pytest.param("linear", 1, 10240, 2048, marks=pytest.mark.exhaustive),
        pytest.param("linear", 1, 16384, 4096, marks=pytest.mark.exhaustive),
    ],
)
def test_the_estimate_is_within_15_percent_of_what_a_process_takes(name, batch_size, length, segment_length):
    """Of three processes at most: how much memory one takes depends on the other work of the machine too."""
    step = MODELS[name], batch_size, length, segment_length
    estimated = estimate_training_memory(*step).total
    measured = (in_new_process(peak_of_two_steps, *step) for _ in range(3))
    assert any(estimated == pytest.approx(peak, rel=0.15) for peak in measured)


def test_weights_are_parameters_gradients_and_two_moments_and_nothing_is_allocated():
    config = LanguageModelConfig(d_model=4096, n_layers=32, n_heads=32)  # 26 GB in float32
    model = shapes_only(config)
    assert model.n_parameters == 32 * (4 * 4096**2 + 3 * 4096 * 10944 + 2 * 4096) + 257 * 4096 + 4096
    n_parameters = LanguageModel(MODELS["linear"]).n_parameters
    before = torch.get_rng_state()
    assert estimate_training_memory(MODELS["linear"], 1, 64).weights == 16 * n_parameters
    assert estimate_training_memory(MODELS["linear"], 1, 64, averaged=True).weights == 20 * n_parameters
    muon = estimate_training_memory(MODELS["linear"], 1, 64, optimizer="muon").weights
    of_muon = 3 * (64 * 192 + 64 * 64 + 64 * 4 + 64 * 2 * 192 + 192 * 64)  # one moment, not two
    assert muon == 16 * n_parameters - 4 * of_muon
    assert torch.equal(torch.get_rng_state(), before)  # random numbers go on as if nothing had been


@pytest.mark.exhaustive
def test_further_segments_add_their_states_and_tokens_alone():
    config = LanguageModelConfig(d_model=64, n_layers=1, n_heads=4, forget_gate=True)
    few, many = (estimate_training_memory(config, 1, n * 1024, 1024).activations for n in (8, 108))
    state = LanguageModel(config).state_bytes(1)
    assert 100 * state < many - few < 3 * 100 * (state + 8 * 1024)  # the gaps, and random states of 5 kB


@pytest.mark.exhaustive
def test_a_document_mask_costs_softmax_memory_and_mixed_precision_costs_less():
    def activations(name: str, **options) -> int:
        return estimate_training_memory(MODELS[name], 1, 4096, **options).activations

    mask = 4096**2  # one byte a pair
    assert activations("softmax", document_mask=True) > activations("softmax") + mask
    assert activations("linear", autocast=torch.bfloat16) < activations("linear")
