"""The encoder–decoder: decoding step by step, padding, the loss, saved folders."""

import pytest
import torch
import torch.nn.functional as F

from linrope import RotaryConfig
from linrope.errors import InputError
from linrope.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from linrope.positions.base import PositionsConfig

SIZES = {"vocab_size": 11, "d_model": 12, "n_encoder_layers": 2, "n_decoder_layers": 2, "n_heads": 2, "dropout": 0.0}


LEARNED = {"positions": PositionsConfig(name="learned", length=9)}


def model_of(**options):
    torch.manual_seed(0)
    model = EncoderDecoderConfig(**SIZES, **options).build().double()
    for parameter in model.parameters():  # larger than at the start, so that every part counts
        parameter.data.mul_(3)
    return model.eval()


def rows(*shape):
    return torch.randint(11, shape)


@pytest.mark.parametrize("positions", ["rope", "sinusoidal", "learned"])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_steps_give_the_logits_of_the_whole_row_and_selected_rows_go_on(attention, positions):
    model = model_of(attention=attention, positions=PositionsConfig(positions))
    source, target, mask = rows(3, 7), rows(3, 5), torch.arange(7) < torch.tensor([[7], [3], [5]])
    expected = model(source, target, mask)
    memory, state, found = model.encode(source, mask), None, []
    for t in range(3):
        logits, state = model.step(target[:, t : t + 1], memory, state)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), expected[:, :3], rtol=1e-9, atol=1e-9)
    order = torch.tensor([2, 0, 2, 1])
    logits, _ = model.step(target[order, 3:], memory.select_rows(order), state.select_rows(order))
    torch.testing.assert_close(logits, expected[order, 3:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_padding_changes_nothing_and_the_source_matters(attention):
    model = model_of(attention=attention)
    source, target = rows(2, 7), rows(2, 5)
    mask = torch.arange(7) < torch.tensor([[4], [0]])
    logits = model(source, target, mask)
    torch.testing.assert_close(logits[:1], model(source[:1, :4], target[:1]), rtol=1e-9, atol=1e-9)
    assert logits.isfinite().all()
    assert not torch.allclose(logits[:1], model(source[:1], target[:1]))


def test_the_loss_is_the_smoothed_cross_entropy_and_ignores_padding():
    model, source, target, targets = model_of(), rows(3, 7), rows(3, 5), rows(3, 5)
    targets[1, 3:] = -100
    loss = model(source, target, targets=targets, label_smoothing=0.1)
    logits = model(source, target).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(expected, list(model.parameters())))


def test_the_bound_of_its_size_is_close_from_below():
    config = EncoderDecoderConfig(**SIZES)
    least, size = config.least_weight_bytes(), 4 * config.build().n_parameters
    assert 0.9 * size < least <= size


def test_the_linear_state_does_not_grow():
    model, source = model_of(), rows(2, 6)
    _, short = model.step(rows(2, 3), model.encode(source))
    _, long = model.step(rows(2, 40), model.encode(source))
    assert [layer.past.kv.shape for layer in short] == [layer.past.kv.shape for layer in long]


def test_a_saved_model_is_the_same(tmp_path):
    model = model_of(rope=RotaryConfig(base=500.0))
    model.save_pretrained(tmp_path)
    again = EncoderDecoder.from_pretrained(tmp_path)
    assert again.config == model.config
    source, target = rows(2, 6), rows(2, 4)
    assert again(source, target).equal(model(source, target))
    assert again.output.weight is again.embedding.weight


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_embeddings": False, "attention": "softmax"}, {"feature_map": "favor"}, {"rope": None}, LEARNED],
    ids=["tied", "untied", "favor", "no rope", "learned"],
)
def test_a_model_is_initialised_anew_as_its_constructor_does(options):
    config = EncoderDecoderConfig(**SIZES, **options)
    torch.manual_seed(0)
    expected, drawn = config.build().state_dict(), torch.rand(1)
    with torch.device("meta"):
        model = config.build()
    for _ in range(2):  # from nothing, and once more
        model.to("meta").to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        torch.manual_seed(0)
        model.reset_parameters()
        assert torch.rand(1).equal(drawn)
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
        assert (model.output.weight is model.embedding.weight) == config.tie_embeddings


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_are_tied_again(assign):
    model, other = model_of(), model_of().to("meta")
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(model.state_dict(), assign=assign)
    assert other.output.weight is other.embedding.weight
    source, target = rows(2, 6), rows(2, 4)
    assert other(source, target).equal(model(source, target))


def test_an_adapter_around_the_output_is_left_as_it_is():
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

    model = model_of()
    model.output = Adapter(model.output)
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(saved)
    assert model.state_dict().keys() == saved.keys()


def test_translations_end_with_the_table_of_positions():
    model = EncoderDecoderConfig(**{**SIZES, "vocab_size": 257}, **LEARNED).build().eval()
    step, steps = model.step, []

    def without_end(*args):
        logits, state = step(*args)
        steps.append(len(logits))
        return logits.index_fill(-1, torch.tensor(256), -torch.inf), state

    model.step = without_end
    model.translate(iter(["abcd", "a"]), n_beams=2)
    assert steps == [4] * 9  # 2 beams of each, at all positions
    assert (model.longest_row, model_of().longest_row) == (9, None)
    with pytest.raises(InputError, match="9"):
        model.translate(["abcdefghi"])


def test_errors():
    with pytest.raises(InputError, match="'t5' changes the attention weight of each pair"):
        EncoderDecoderConfig(**SIZES, positions=PositionsConfig("t5"))
    with pytest.raises(InputError, match="n_decoder_layers"):
        EncoderDecoderConfig(n_decoder_layers=0)
    model = model_of()
    assert model.translate([]) == []
    with pytest.raises(InputError, match="memory is a NoneType: pass what encode returned"):
        model.step(rows(1, 2), None)
    with pytest.raises(InputError, match="texts='a' is one text"):
        model.translate("a")
    with pytest.raises(InputError, match="extra_tokens=-1 must be 0 or more"):
        model.translate(["a"], extra_tokens=-1)
    with pytest.raises(InputError, match="extra_tokens='x' must be 0 or more"):
        model.translate(["a"], extra_tokens="x")
    with pytest.raises(InputError, match=r"source lies in \[97, 256\], vocab_size is 11"):  # bytes
        model.translate(["a"])
    model.tokenizer = {"kind": "unknown"}
    with pytest.raises(InputError, match="tokenizer is unknown"):
        model.translate(["a"])
    with pytest.raises(InputError, match="source lies"):
        model(torch.tensor([[11]]), rows(1, 2))
    with pytest.raises(InputError, match="source_mask"):
        model.encode(rows(2, 6), torch.ones(2, 5, dtype=torch.bool))


def test_a_model_starts_from_one_that_differs_in_no_weight(tmp_path):
    source = model_of()
    source.save_pretrained(tmp_path)
    other = EncoderDecoderConfig(**{**SIZES, "dropout": 0.3}, rope=RotaryConfig(base=500.0)).build().double()
    assert other.start_from(tmp_path) == [
        "model.dropout: 0.0 in the checkpoint, 0.3 here",
        "model.rope.base: 10000.0 in the checkpoint, 500.0 here",
    ]
    torch.testing.assert_close(other.state_dict(), source.state_dict(), rtol=0, atol=0)
    with pytest.raises(InputError, match=r"equal:\n  model.n_heads: 2 in the checkpoint, 3 here"):
        EncoderDecoderConfig(**{**SIZES, "n_heads": 3}).build().start_from(tmp_path)
