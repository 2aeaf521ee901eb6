"""FLOPs counted on fake tensors against those of a real training step."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.profiling.flops import step_flops
from linrope.profiling.memory_estimate import step_loss
from tests.conftest import covering

SIZES = {"d_model": 32, "n_layers": 2, "n_heads": 2}
FORMS = [
    {"forget_gate": True, "output_gate": True, "rope": RotaryConfig(placement="signed")},
    {"rope": RotaryConfig(placement="both")},
    {"feature_map": "favor"},
    {"attention": ["linear", "softmax"], "window": 64},
]
MORE_FORMS = [{}, {"normalize": "none"}, {"feature_map": "taylor"}, {"feature_map": "hedgehog"}]
MORE_FORMS += [{"attention": "softmax"}, {"attention": "softmax", "window": 64}]


# rows, their length and that of segments; none for softmax without a window, whose state grows
ROWS = (2, 300, None), (1, 1000, None), (1, 300, 128)
CASES = [(form, size) for form in [*FORMS, *MORE_FORMS] for size in ROWS]
CASES.remove(({"attention": "softmax"}, (1, 300, 128)))
BY_DEFAULT = [(FORMS[0], (2, 300, None))]


@pytest.mark.parametrize(("form", "size"), covering(CASES, BY_DEFAULT))
def test_a_fake_step_counts_as_a_real_one(form, size):
    rows, length, segment_length = size
    model = LanguageModel(LanguageModelConfig(**SIZES, **form))
    tokens = torch.randint(257, (rows, length + 1))
    # softmax as matrix products: PyTorch's counter does not know its fused kernel on a CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step_loss(model, tokens, segment_length).backward()
    assert step_flops(model, rows, length, segment_length) == counter.get_total_flops()


def test_softmax_attention_by_hand():
    """Every weight takes a multiplication and an addition a token, every pair of tokens two products of the width."""
    model = LanguageModel(LanguageModelConfig(**SIZES, attention="softmax"))
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert step_flops(model, 3, 40) == 3 * 2 * (3 * 40 * weights + 2 * 3 * 2 * 40**2 * 32)


def test_a_convolution_takes_two_operations_a_weight_and_token_and_twice_that_back():
    """By hand: of grouped convolutions PyTorch's counter counts the way back as if they were not grouped."""
    model, plain = (LanguageModel(LanguageModelConfig(**SIZES, short_conv=n)) for n in (4, 0))
    extra = step_flops(model, 1, 300) - step_flops(plain, 1, 300)
    assert extra == 3 * 2 * 300 * (2 * 3 * 32 * 4)
