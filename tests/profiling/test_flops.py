"""The formula against PyTorch's own counter, forward and backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig, segmented_loss
from linrope.losses import summed_cross_entropy
from linrope.profiling.flops import forward_flops, step_flops

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 2}
FORMS = [
    {},
    {"forget_gate": True, "output_gate": True, "rope": RotaryConfig(placement="signed")},
    {"rope": RotaryConfig(placement="selective")},
    {"rope": RotaryConfig(placement="both")},
    {"normalize": "none"},
    {"feature_map": "taylor"},
    {"feature_map": "favor"},
    {"feature_map": "hedgehog"},
    {"attention": "softmax"},
    {"attention": "softmax", "window": 64},
    {"attention": ["linear", "softmax"], "window": 64},
]


def counted(model: LanguageModel, rows: int, length: int, segment_length: int | None) -> int:
    tokens = torch.randint(257, (rows, length + 1))
    # softmax as matrix products: PyTorch's counter does not know its fused kernel on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        if segment_length is None:
            loss = summed_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        else:
            loss, _ = segmented_loss(model, tokens[:, :-1], tokens[:, 1:], segment_length)
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "length", "segment_length"), [(2, 300, None), (1, 1000, None), (1, 300, 128)])
def test_the_formula_is_what_the_counter_counts(form, rows, length, segment_length):
    model = LanguageModel(LanguageModelConfig(**SIZES, **form))
    if segment_length is not None and form.get("attention") == "softmax" and "window" not in form:
        pytest.skip("its state grows: no segments")
    assert step_flops(model, rows, length, segment_length) == counted(model, rows, length, segment_length)


def test_a_convolution_takes_two_operations_a_weight_and_token_and_twice_that_back():
    """By hand: of grouped convolutions PyTorch's counter counts the way back as if they were not grouped."""
    model, plain = (LanguageModel(LanguageModelConfig(**SIZES, short_conv=n)) for n in (4, 0))
    extra = step_flops(model, 1, 300) - step_flops(plain, 1, 300)
    assert extra == 3 * 2 * 300 * (2 * 3 * 32 * 4)


def test_reading_is_the_forward_alone():
    model = LanguageModel(LanguageModelConfig(**SIZES))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(257, (2, 300)))
    assert forward_flops(model, 2, 300) == counter.get_total_flops()
