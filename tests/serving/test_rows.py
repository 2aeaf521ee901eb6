"""Texts of different lengths decoded together, against each of them alone."""

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.layers.state import tensors_of
from linrope.positions.base import PositionsConfig
from linrope.serving.rows import Rows, bytes_of
from tests.conftest import covering
from tests.models.test_language_model import CONFIGS, HYBRID, SMALL, awake

GROUPED = {**HYBRID, "n_heads": 4, "n_kv_heads": 2}
ALL = {
    **CONFIGS,
    "grouped": LanguageModelConfig(**GROUPED, rope_layers=[0]),
    "grouped window": LanguageModelConfig(**GROUPED, window=9, short_conv=3),
    "both": LanguageModelConfig(**SMALL, rope=RotaryConfig(placement="both")),
    "signed": LanguageModelConfig(**SMALL, rope=RotaryConfig(placement="signed")),
    "cosine": LanguageModelConfig(**SMALL, attention="cosine"),
    **{
        name: LanguageModelConfig(**SMALL, attention="softmax", positions=PositionsConfig(name))
        for name in ("t5", "tupe", "deberta", "shaw", "transformer_xl", "alibi")
    },
}
BY_DEFAULT = ("recipe", "before map", "window", "sinusoidal", "trainable rope", "grouped", "cosine", "t5", "tupe")
EXACT = {"rtol": 1e-8, "atol": 1e-10}  # float64, sums in another order, and keys that are rotated twice
LENGTHS = (5, 1, 33, 12)


@pytest.fixture(params=covering(ALL, BY_DEFAULT))
def model(request):
    torch.manual_seed(0)
    return awake(LanguageModel(ALL[request.param])).double().eval()


def read(model, tokens):
    with torch.inference_mode():
        return model(tokens[None], return_state=True)[1]


def test_each_row_is_stepped_as_if_alone(model):
    """Rows come, go and change places; their logits and states are those of the whole text, read alone."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 40, (length + 20,), generator=generator) for length in LENGTHS]
    rows, places, read_so_far = Rows(model), [], list(LENGTHS)

    def change(kept, added):
        states = [read(model, texts[text][: read_so_far[text]]) for text in added]
        rows.replace(kept, states)
        places[:] = [*(places[row] for row in kept), *added]

    def step(n):
        for _ in range(n):
            tokens = [texts[text][read_so_far[text]].item() for text in places]
            logits = rows.step(tokens)
            for row, text in enumerate(places):
                read_so_far[text] += 1
                alone = model(texts[text][None, : read_so_far[text]])[0, -1]
                torch.testing.assert_close(logits[row], alone, **EXACT)

    change([], [0])
    step(2)
    change([0], [1, 2])
    step(3)
    change([2, 1], [3])  # without the first, in another order
    step(2)
    change([1, 2], [0])
    step(2)
    for row, text in enumerate(places):
        alone = read(model, texts[text][: read_so_far[text]])
        of_row = rows.state_of(row)
        assert rows.lengths[row] == read_so_far[text] == of_row[0].past.length
        torch.testing.assert_close(tensors_of(of_row), tensors_of(alone), **EXACT)
        assert bytes_of(of_row) == bytes_of(alone)
    change([], [])
    assert len(rows) == 0


def test_a_row_alone_is_stepped_bit_by_bit_as_without_a_batch():
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS["recipe"]).eval()
    state = read(model, torch.arange(30))
    rows = Rows(model)
    rows.replace([], [state])
    logits = rows.step([3])
    with torch.inference_mode():
        expected, after = model(torch.tensor([[3]]), state, return_state=True)
    assert torch.equal(logits, expected[:, -1])
    assert all(map(torch.equal, tensors_of(rows.state_of(0)), tensors_of(after)))


def test_a_batch_may_stand_anywhere():
    """A billion tokens further than the text itself: angles are exact there too."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS["recipe"]).double().eval()
    rows, text = Rows(model), read(model, torch.arange(30))
    rows.replace([], [text])
    expected = rows.step([1])[0]
    rows.position = 10**9
    rows.replace([0], [text])
    torch.testing.assert_close(rows.step([0, 1])[1], expected, **EXACT)
