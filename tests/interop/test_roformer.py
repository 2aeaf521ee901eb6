"""RoFormer encoders of transformers: the same logits here, and back."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from linrope import InputError
from linrope.cli.main import main
from linrope.interop import export_roformer, load_roformer
from linrope.models.base import ModelConfig, load_model
from linrope.models.encoder import EncoderConfig
from linrope.models.encoder_decoder import EncoderDecoderConfig
from linrope.positions.base import PositionsConfig
from linrope.training.checkpoint import start_from
from tests.conftest import assert_input_errors, covering

transformers = pytest.importorskip("transformers")

HEADS = {
    "Model": "last_hidden_state",
    "ForMaskedLM": "logits",
    "ForSequenceClassification": "logits",
    "ForTokenClassification": "logits",
    "ForQuestionAnswering": "both",
    "ForMultipleChoice": "logits",
}
SIZES = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 29}
SIZES |= {"max_position_embeddings": 64, "type_vocab_size": 3, "num_labels": 5}
OPTIONS = [{}, {"rotary_value": True, "embedding_size": 10}, {"hidden_act": "relu"}]
COVERING = [*product(HEADS, OPTIONS[:1]), ("ForMaskedLM", OPTIONS[1]), ("Model", OPTIONS[2])]


def saved(folder: Path, head: str, safe: bool = True, **options):
    """A model of transformers with random weights, in evaluation mode, and its folder."""
    torch.manual_seed(0)
    config = transformers.RoFormerConfig(**{**SIZES, **options})
    model = getattr(transformers, f"RoFormer{head}")(config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # biases and norms too
            torch.nn.init.normal_(parameter, std=0.2)
    if safe:
        model.save_pretrained(folder)
    else:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


def inputs(head: str, length: int = 13):
    """Tokens, a mask with padding at either end, and token types."""
    shape = (2, 3, length) if head == "ForMultipleChoice" else (2, length)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[0, ..., -4:] = False
    mask[1, ..., :2] = False
    return torch.randint(37, shape), mask, torch.randint(3, shape)


def outputs_of(model, head: str, tokens, mask, types):
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=mask.long(), token_type_ids=types)
    if HEADS[head] == "both":
        return torch.stack((found.start_logits, found.end_logits), -1)
    return found[HEADS[head]]


@pytest.mark.parametrize(("head", "options"), covering([*product(HEADS, OPTIONS)], COVERING))
def test_the_outputs_are_those_of_transformers_and_the_export_gives_them_again(head, options, tmp_path):
    there = saved(tmp_path / "there", head, **options)
    here, arguments = load_roformer(tmp_path / "there"), inputs(head)
    expected = outputs_of(there, head, *arguments)
    with torch.no_grad():
        torch.testing.assert_close(here(*arguments), expected, rtol=1e-5, atol=1e-5)  # at padding too
        plain = here(arguments[0])
    ones, zeros = torch.ones_like(arguments[0]), torch.zeros_like(arguments[0])
    torch.testing.assert_close(plain, outputs_of(there, head, arguments[0], ones, zeros), rtol=1e-5, atol=1e-5)
    export_roformer(here, tmp_path / "back")
    back = type(there).from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(outputs_of(back, head, *arguments), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(load_roformer(tmp_path / "back")(*arguments), here(*arguments))


@pytest.mark.parametrize("tied", [True, False])
def test_pickled_weights_and_an_untied_decoder_are_read(tied, tmp_path):
    tmp_path = tmp_path / "model"
    there = saved(tmp_path, "ForMaskedLM", safe=False, tie_word_embeddings=tied)
    arguments = inputs("ForMaskedLM")
    expected = outputs_of(there, "ForMaskedLM", *arguments)
    for path in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "config.json"):
        torch.testing.assert_close(load_roformer(path)(*arguments), expected, rtol=1e-5, atol=1e-5)


def test_rows_longer_than_the_table_of_sinusoids_are_read(tmp_path):
    there = saved(tmp_path, "Model", safe=False)
    arguments = inputs("Model", length=41)
    expected = outputs_of(there, "Model", *arguments)
    weights = there.state_dict()
    table = next(name for name in weights if "embed_positions" in name)
    torch.save({**weights, table: torch.zeros(8, 8)}, tmp_path / "pytorch_model.bin")  # shorter, and spoiled
    torch.testing.assert_close(load_roformer(tmp_path)(*arguments), expected, rtol=1e-5, atol=1e-5)


def test_a_softmax_model_can_start_a_linear_one(tmp_path):
    saved(tmp_path, "ForMaskedLM")
    linear = load_roformer(tmp_path, attention="linear", dropout=0.0)
    assert linear.config.attention == "linear"
    softmax = load_roformer(tmp_path)
    assert torch.equal(linear.encoder.blocks[1].attention.qkv.weight, softmax.encoder.blocks[1].attention.qkv.weight)
    tokens, mask, types = inputs("ForMaskedLM")
    assert not torch.allclose(linear(tokens, mask, types), softmax(tokens, mask, types), atol=1e-2)
    with pytest.raises(InputError, match="has no attention='linear'"):
        export_roformer(linear, tmp_path / "back")


MODELS = {
    "softmax": EncoderConfig(d_model=8, n_layers=1, n_heads=2, attention="softmax", head="classification"),
    "linear": EncoderConfig(d_model=8, n_layers=1, n_heads=2, head="masked_lm"),
    "other positions": EncoderConfig(
        d_model=8, n_layers=1, n_heads=2, attention="softmax", positions=PositionsConfig("learned"), head="masked_lm"
    ),
    "encoder-decoder": EncoderDecoderConfig(vocab_size=9, d_model=8, n_encoder_layers=1, n_decoder_layers=1, n_heads=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_linrope_export_writes_what_transformers_reads_or_else_what_linrope_reads(name, tmp_path, capsys):
    model = MODELS[name].build()
    model.save_pretrained(tmp_path / "model")
    args = [f"--ckpt_path={tmp_path / 'model'}", f"--output={tmp_path / 'out'}"]
    assert main(["export", *args]) == 0
    assert ("transformers has no model" in capsys.readouterr().err) == (name != "softmax")
    again = load_roformer(tmp_path / "out") if name == "softmax" else load_model(tmp_path / "out", ModelConfig)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert main(["export", *args]) == 2  # there is a model in the folder
    other = MODELS["softmax" if name != "softmax" else "linear"].build()  # which is exported in the other format
    other.save_pretrained(tmp_path / "model")
    assert main(["export", *args, "--overwrite"]) == 0
    again = load_roformer(tmp_path / "out") if name != "softmax" else load_model(tmp_path / "out", ModelConfig)
    torch.testing.assert_close(again.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert len(list((tmp_path / "out").iterdir())) == 3


WORDS = {"kind": "tokenizers", "json": "{}"}


@pytest.mark.parametrize("tokenizer", [WORDS, {"kind": "bytes"}, None], ids=["words", "bytes", "unknown"])
def test_an_export_keeps_the_tokenizer(tokenizer, tmp_path):
    model = MODELS["softmax"].build()
    model.tokenizer = tokenizer
    export_roformer(model, tmp_path / "first")
    again = load_roformer(tmp_path / "first")
    assert again.tokenizer == tokenizer
    export_roformer(again, tmp_path / "second")
    assert load_roformer(tmp_path / "second").tokenizer == tokenizer
    if tokenizer == WORDS:  # what transformers saves again lacks the file
        there = transformers.RoFormerForSequenceClassification.from_pretrained(tmp_path / "first")
        there.save_pretrained(tmp_path / "third")
        assert load_roformer(tmp_path / "third").tokenizer is None
        (tmp_path / "first" / "linrope_tokenizer.json").write_text("[]")
        with pytest.raises(InputError, match=r"linrope_tokenizer\.json"):
            load_roformer(tmp_path / "first")


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering", "Model"])
def test_a_head_that_config_json_does_not_name_is_known_by_its_weights(head, tmp_path):
    there, arguments = saved(tmp_path, head), inputs(head)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = outputs_of(there, head, *arguments)
    torch.testing.assert_close(load_roformer(tmp_path)(*arguments), expected, rtol=1e-5, atol=1e-5)


def test_a_run_starts_from_a_folder_of_transformers(tmp_path):
    saved(tmp_path, "ForMaskedLM")
    source = load_roformer(tmp_path)
    model = replace(source.config, attention="linear", head="classification", n_labels=3).build()
    notes = start_from(model, str(tmp_path), None)
    assert notes == [
        "model.attention: 'softmax' in the checkpoint, 'linear' here",
        "model.head: 'classification' is new",
    ]
    torch.testing.assert_close(model.encoder.state_dict(), source.encoder.state_dict())


def test_what_is_no_roformer_is_named(tmp_path):
    folder = tmp_path / "model"
    saved(folder, "ForMaskedLM", safe=False)
    config, weights = folder / "config.json", folder / "pytorch_model.bin"
    values, tensors = json.loads(config.read_text()), torch.load(weights, weights_only=True)

    def with_config(**changed):
        def load():
            config.write_text(json.dumps({**values, **changed}))
            load_roformer(folder)

        return load

    def with_weights(*missing: str, **added):
        def load():
            config.write_text(json.dumps(values))
            torch.save({name: x for name, x in {**tensors, **added}.items() if name not in missing}, weights)
            load_roformer(folder)

        return load

    first, second = "roformer.embeddings.LayerNorm.bias", "roformer.encoder.layer.1.attention.self.key.weight"
    assert_input_errors(
        (lambda: load_roformer(tmp_path / "nowhere"), "has no model.safetensors and no pytorch_model.bin"),
        (lambda: load_roformer(folder, head="masked_lm"), "the option='head' is unknown"),
        (with_config(model_type="bert"), "model_type='bert'"),
        (with_config(is_decoder=True), "is_decoder=true"),
        (with_config(hidden_act="mish"), "hidden_act='mish'"),
        (with_config(intermediate_size=30), "mlp_in.weight"),
        (with_weights(first, second), f"missing: {first}, {second}"),
        (with_weights(more=torch.ones(1)), "unexpected: more"),
    )


def test_multiple_choice_by_another_position_than_the_last_is_refused(tmp_path):
    there, arguments = saved(tmp_path, "ForMultipleChoice", summary_type="cls_index"), inputs("ForMultipleChoice")
    with torch.no_grad():
        found = load_roformer(tmp_path)(*arguments)
    torch.testing.assert_close(found, outputs_of(there, "ForMultipleChoice", *arguments), rtol=1e-5, atol=1e-5)
    for option, value in (("summary_type", "first"), ("summary_type", "mean"), ("summary_activation", "tanh")):
        saved(tmp_path / value, "ForMultipleChoice", **{option: value})
        with pytest.raises(InputError, match=rf"config\.json has {option}='{value}': only models "):
            load_roformer(tmp_path / value)
    saved(tmp_path / "other", "ForMaskedLM", summary_type="first")  # which only multiple choice reads
    load_roformer(tmp_path / "other")


def test_what_is_no_roformer_is_refused(tmp_path):
    saved(tmp_path / "good", "ForMaskedLM", safe=False)
    values = json.loads((tmp_path / "good" / "config.json").read_text())
    weights = torch.load(tmp_path / "good" / "pytorch_model.bin")

    def folder(name: str, content: object = weights, **changes: object) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values | changes))
        torch.save(content, tmp_path / name / "pytorch_model.bin")
        return tmp_path / name

    damaged = folder("damaged")
    file = damaged / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:1000])
    assert_input_errors(
        (lambda: load_roformer(damaged), "pytorch_model.bin"),
        (
            lambda: load_roformer(folder("unsafe", {"x": Path("x")})),
            "pytorch_model.bin. is damaged or no checkpoint: it cannot be read safely",
        ),
        (lambda: load_roformer(folder("list", [1, 2])), "is no dictionary of tensors"),
        (lambda: load_roformer(folder("cross", add_cross_attention=True)), "add_cross_attention=true: only bidirect"),
        (lambda: load_roformer(folder("odd", hidden_act="mish")), "hidden_act='mish': known are gelu"),
        (lambda: load_roformer(folder("fewer", {k: v for k, v in weights.items() if "LayerNorm" not in k})), "missing"),
        (lambda: load_roformer(folder("wide", vocab_size=41)), r"embedding.weight: .*\[37, 24\]"),
    )
    swish = load_roformer(folder("swish", hidden_act="swish"))
    assert swish.config.activation == "silu"
