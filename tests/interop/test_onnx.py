"""Language models as ONNX graphs: onnxruntime gives the model's own logits, token by token and prompt by prompt."""

from dataclasses import replace

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig, register_feature_map
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.interop.onnx.export import export_onnx, language_model_graph
from linrope.interop.onnx.graph import Graph
from linrope.interop.onnx.runtime import OnnxLanguageModel
from linrope.interop.onnx.tokens import Tokens
from linrope.models.encoder import EncoderConfig
from linrope.positions.base import PositionsConfig
from linrope.rotary import RotaryScaling, unit_rotations
from tests.conftest import assert_input_errors, covering
from tests.models.test_language_model import awake

SIZES = {"vocab_size": 41, "d_model": 18, "n_layers": 2, "n_heads": 3}
HYBRID = {**SIZES, "attention": ["linear", "softmax"]}
WINDOWED = {**HYBRID, "window": 9, "forget_gate": True, "short_conv": 4, "output_norm": True, "output_gate": True}
CONFIGS = {
    "plain": LanguageModelConfig(**SIZES),
    "windowed": LanguageModelConfig(**WINDOWED, conv_silu="v", tie_embeddings=False),
    "signed": LanguageModelConfig(
        **SIZES,
        rope=RotaryConfig(placement="signed", rotary_dim=4),
        short_conv=3,
        forget_gate=True,
        gate_normalizer=16.0,
    ),
    "signed throughout": LanguageModelConfig(
        **SIZES, rope=RotaryConfig(placement="signed", rotary_dim=6), normalize="none"
    ),
    "half-split": LanguageModelConfig(
        **SIZES, rope=RotaryConfig(base=500.0, rotary_dim=4, interleaved=False), feature_map="relu", temperature=True
    ),
    "bases": LanguageModelConfig(**HYBRID, rope=RotaryConfig(base=[10.0, None, 7.0], trainable=True)),
    "yarn": LanguageModelConfig(**HYBRID, rope=RotaryConfig(scaling=RotaryScaling("yarn", 2.0, 32))),
    "both": LanguageModelConfig(**SIZES, rope=RotaryConfig(placement="both")),
    "before map": LanguageModelConfig(**HYBRID, rope=RotaryConfig(placement="before_map"), feature_map="exp"),
    "no rope": LanguageModelConfig(**HYBRID, rope=None, feature_map="softmax", rope_layers=[]),
    "window of one": LanguageModelConfig(**HYBRID, window=1, feature_map="identity", normalize="none"),
    "cosine": LanguageModelConfig(**SIZES, attention=["cosine", "linear"], rope_layers=[0]),
    "cosine without rope": LanguageModelConfig(**SIZES, attention="cosine", rope=None),
    "sinusoidal": LanguageModelConfig(**HYBRID, positions=PositionsConfig("sinusoidal"), window=5),
    "learned": LanguageModelConfig(**SIZES, positions=PositionsConfig("learned", length=64)),
    "favor": LanguageModelConfig(**SIZES, feature_map="favor"),
    "hedgehog": LanguageModelConfig(**SIZES, feature_map="hedgehog", forget_gate=True),
    "taylor": LanguageModelConfig(**SIZES, feature_map="taylor"),
}
STANDARD = 27
"""The first opset with LinearAttention and CausalConvWithState, which onnxruntime runs from 1.32 on."""
NEWEST = STANDARD if [int(n) for n in onnxruntime.__version__.split(".")[:2]] >= [1, 32] else 23
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}  # float32, logits around 1


def model_of(config: LanguageModelConfig) -> LanguageModel:
    """A model whose logits are around 1, and depend on all of its weights."""
    torch.manual_seed(0)
    model = awake(LanguageModel(config)).eval()
    torch.nn.init.normal_(model.output.weight, std=config.d_model**-0.5)
    for layer in model.blocks:
        torch.nn.init.normal_(layer.attention.out.weight, std=0.5)
    return model


def exported(model: LanguageModel, folder, opset: int = NEWEST) -> OnnxLanguageModel:
    assert export_onnx(model, folder, opset=opset) < 1e-5
    return OnnxLanguageModel(folder, threads=1)


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 41, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def ours(model: LanguageModel, tokens: torch.Tensor) -> np.ndarray:
    return model(tokens).numpy()


OPSETS = [(name, opset) for name in CONFIGS for opset in {23, NEWEST}]


@pytest.mark.parametrize(("name", "opset"), covering(OPSETS, [*((name, NEWEST) for name in CONFIGS), ("windowed", 23)]))
def test_prompts_in_parts_and_single_tokens_give_the_logits_of_the_whole_row(name, opset, tmp_path):
    model, tokens = model_of(CONFIGS[name]), random_tokens(2, 43)
    expected, graph = ours(model, tokens), exported(model, tmp_path, opset)
    state, found = None, []
    for part in tokens.split([1, 1, 7, 20, *[1] * 14], dim=1):
        logits, state = graph(part.numpy(), state)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, **ROUNDING)
    np.testing.assert_array_equal(state["past.position"], [43, 43])
    last, _ = graph(tokens.numpy(), logits_to_keep=3)
    np.testing.assert_allclose(last, expected[:, -3:], **ROUNDING)


STEPS = [(name, steps) for name in ("signed", "windowed", "plain") for steps in (300, 10_000)]


@pytest.mark.parametrize(("name", "steps"), covering(STEPS, [("signed", 300)]))
@torch.no_grad()
def test_decoding_stays_within_1e_4(name, steps, tmp_path):
    """Each step on from a state of its own, both in float32, so that their rounding may add up."""
    model = model_of(CONFIGS[name])
    graph, ours_state, state, largest = exported(model, tmp_path), None, None, 0.0
    for token in random_tokens(1, steps).split(1, dim=1):
        expected, ours_state = model(token, ours_state, return_state=True)
        logits, state = graph(token.numpy(), state)
        largest = max(largest, np.abs(logits - expected.numpy()).max())
    assert 0 < largest < 1e-4


def test_rows_of_different_lengths_decode_together(tmp_path):
    model, (long, short) = model_of(CONFIGS["windowed"]), random_tokens(2, 30)
    short = short[:4]  # less than the window
    graph = exported(model, tmp_path)
    states = [graph(row[None, :-1].numpy())[1] for row in (long, short)]
    joined = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
    logits, after = graph(torch.stack((long[-1:], short[-1:])).numpy(), joined)
    for number, row in enumerate((long, short)):
        np.testing.assert_allclose(logits[number, 0], ours(model, row[None])[0, -1], **ROUNDING)
    np.testing.assert_array_equal(after["past.position"], [30, 4])


@pytest.mark.parametrize("name", ["plain", "before map", "windowed", "sinusoidal"])
@torch.no_grad()
def test_angles_are_exact_far_out(name, tmp_path):
    """Where float32 positions are off by up to 32, and float32 angles mean nothing."""
    model, tokens, far = model_of(CONFIGS[name]), random_tokens(1, 12), 10**9 + 7
    graph = exported(model, tmp_path)
    _, state = graph(tokens.numpy())
    _, expected = model(tokens, return_state=True)
    expected = tuple(replace(layer, past=replace(layer.past, length=far)) for layer in expected)
    logits, _ = graph(tokens.numpy(), {**state, "past.position": np.array([far])})
    np.testing.assert_allclose(logits, model(tokens, expected).numpy(), **ROUNDING)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("first", [0, 2**26 - 1, 10**9 + 7, 2**53 - 5])
def test_rotations_are_those_of_the_operator(shape, first):
    numbers = [1.0, 0.3, 1e-4, 1e-9, 0.0, 5.5]
    theta = torch.tensor(numbers[: np.prod(shape)], dtype=torch.float64).reshape(shape)
    g = Graph(23)
    tokens = Tokens(g)
    rotation = tokens.rotation(theta.numpy())
    for name in ("cos", "sin"):
        g.output(name, getattr(rotation, name), np.float32, ("batch", "rows", 3))
    feeds = {"tokens": np.zeros((1, 5), np.int64), "past.position": np.array([first])}
    session = onnxruntime.InferenceSession(g.model("rotation", {}).SerializeToString())
    cos, sin = session.run(["cos", "sin"], feeds)
    expected = unit_rotations(torch.arange(first, first + 5), theta)  # (T, R/2) or (H, T, R/2)
    expected = expected if len(shape) == 1 else expected.transpose(0, 1).reshape(-1, 3)
    np.testing.assert_allclose(cos[0] + 1j * sin[0], expected.numpy(), rtol=0, atol=1.2e-7)  # of float32


@pytest.mark.parametrize("opset", [23, STANDARD])
@pytest.mark.parametrize("name", ["windowed", "signed"])
def test_the_graph_means_the_same_to_the_reference_implementation_of_onnx(name, opset):
    model, tokens = model_of(CONFIGS[name]), random_tokens(2, 7)
    proto = language_model_graph(model, opset)
    operators = {node.op_type for node in proto.graph.node}
    assert ("LinearAttention" in operators) == ("CausalConvWithState" in operators) == (opset == STANDARD)
    feeds = {"tokens": tokens.numpy(), "logits_to_keep": np.array([7])}
    for x in proto.graph.input[1:]:
        if x.name.startswith("past."):
            sizes = [axis.dim_value or 2 for axis in x.type.tensor_type.shape.dim]
            feeds[x.name] = np.zeros(sizes, onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type))
    logits, *_ = onnx.reference.ReferenceEvaluator(proto).run(["logits"], feeds)
    np.testing.assert_allclose(logits, ours(model, tokens), **ROUNDING)


def test_what_has_no_graph_is_refused_by_name_before_anything_is_written(tmp_path):
    folder = tmp_path / "out"
    register_feature_map("squares", torch.square)

    def export(opset: int = 23, **options):
        export_onnx(LanguageModel(LanguageModelConfig(**SIZES, **options)), folder, opset=opset)

    encoder = EncoderConfig(vocab_size=41, d_model=18, n_layers=1, n_heads=3).build()
    wrapped = LanguageModel(CONFIGS["plain"])
    wrapped.blocks[1].mlp.out = type("Adapter", (torch.nn.Linear,), {"__module__": "peft.tuners"})(18, 18)
    assert_input_errors(
        (lambda: export(opset=22), "opset=22 must be 23 … "),
        (lambda: export(opset=99), "opset=99 must be 23 … "),
        (lambda: export(feature_map="squares"), "feature_map='squares' is a map of your own"),
        (
            lambda: export(attention="softmax", positions=PositionsConfig("alibi")),
            "positions.name='alibi' changes the attention weights",
        ),
        (lambda: export_onnx(encoder, folder), "a RoFormerEncoder has no ONNX graph"),
        (lambda: export_onnx(wrapped, folder), r"blocks\.1\.mlp\.out is a Adapter"),
    )
    assert not folder.exists()


@pytest.mark.parametrize("length", [1, 2, 8])
def test_a_few_learned_positions_are_exported_and_no_more_are_read(length, tmp_path):
    config = LanguageModelConfig(**SIZES, rope=None, positions=PositionsConfig("learned", length=length))
    model = model_of(config)
    graph, tokens = exported(model, tmp_path / "model"), np.ones((1, length), np.int64)
    logits, state = graph(tokens)
    torch.testing.assert_close(torch.from_numpy(logits), model(torch.from_numpy(tokens)), rtol=1e-4, atol=1e-5)
    message = f"a row has {length + 1} tokens with these, and the positions of this model end at {length}"
    assert_input_errors((lambda: graph(tokens[:, :1], state), message))


def test_what_is_no_graph_or_no_token_is_refused(tmp_path):
    graph = exported(model_of(CONFIGS["plain"]), tmp_path / "good")
    (tmp_path / "text.onnx").write_text("no graph")
    g = Graph(23)
    g.output("y", g.op("Neg", g.input("x", np.float32, (1,))), np.float32, (1,))
    onnx.save_model(g.model("foreign", {}), tmp_path / "foreign.onnx")
    tokens = np.zeros((1, 3), np.int64)
    assert_input_errors(
        (lambda: OnnxLanguageModel(tmp_path / "none"), "is not a file"),
        (lambda: OnnxLanguageModel(tmp_path / "text.onnx"), "onnxruntime .* cannot run"),
        (lambda: OnnxLanguageModel(tmp_path / "foreign.onnx"), "no graph of linrope"),
        (lambda: graph(tokens[0]), r"tokens is \(3,\) int64"),
        (lambda: graph(tokens[:, :0]), r"tokens is \(1, 0\) int64"),
        (lambda: graph(tokens[:0]), r"tokens is \(0, 3\) int64"),
        (lambda: graph([[0.5]]), r"tokens is \(1, 1\) float64"),
        (lambda: graph(tokens + 41), r"tokens lie in \[41, 41\], vocab_size is 41"),
        (lambda: graph(tokens, logits_to_keep=0), "logits_to_keep=0 must be at least 1"),
        (lambda: graph(tokens, {}), r"state\['past.position'\] is None, this call needs \(1,\)"),
        (lambda: graph(tokens, graph.initial_state(2)), r"state\['past.position'\] is \(2,\), this call needs \(1,\)"),
    )


def test_the_command_writes_a_graph_with_its_configuration_and_tokenizer(tmp_path, capsys):
    model = model_of(LanguageModelConfig(**{**WINDOWED, "vocab_size": 257}))
    model.half().save_pretrained(tmp_path / "trained")
    command = ["export", f"--ckpt_path={tmp_path / 'trained'}", "--format=onnx", f"--opset={NEWEST}"]
    assert main([*command, f"--output={tmp_path / 'onnx'}"]) == 0
    assert "logits differ from PyTorch's by at most" in capsys.readouterr().err
    graph = OnnxLanguageModel(tmp_path / "onnx")
    assert graph.config == model.config
    prompt = graph.tokenizer.encode_prompt("abc")[None]
    np.testing.assert_allclose(graph(prompt.numpy())[0], ours(model.float(), prompt), **ROUNDING)
    assert main([*command, f"--output={tmp_path / 'onnx'}"]) == 2  # without --overwrite
    assert main([*command, f"--output={tmp_path / 'onnx'}", "--overwrite"]) == 0
    assert main([*command[:2], f"--output={tmp_path / 'other'}", "--opset=23"]) == 2
    assert "--opset=23 is an option of --format onnx" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_runtime_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("linrope.interop.onnx.export.TOLERANCE", -1.0)
    with pytest.raises(InputError, match=r"onnxruntime \S+ computes other logits than PyTorch"):
        export_onnx(model_of(CONFIGS["plain"]), tmp_path, opset=NEWEST)
    assert list(tmp_path.iterdir()) == []
