"""What is measured of trained models: decay, reach, copying and pass keys, on models whose results are known."""

import cmath
import json
import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from benchmarks.experiments import copying, decay, reach
from benchmarks.experiments.convergence import Convergence
from benchmarks.experiments.copying import TextReadTwice
from benchmarks.experiments.decay import Decay
from benchmarks.experiments.passkey import Passkey
from benchmarks.experiments.reach import HeadReach
from linrope import LanguageModel, LanguageModelConfig, RotaryEmbedding
from linrope.positions.base import PositionsConfig
from tests.benchmarks.commands import refusal


def saved(path, tokenizer=None, **options) -> list[str]:
    """The options of a command for a small model, which is written there."""
    model = LanguageModel(LanguageModelConfig(**{"d_model": 16, "n_layers": 1, "n_heads": 2, **options}))
    model.tokenizer = tokenizer or model.tokenizer
    model.save_pretrained(path)
    return ["--model", str(path)]


GATED = {"forget_gate": True}
NO_BYTES = "its tokens must be bytes, with a vocabulary of 257 or more"
MISTAKES = [
    (TextReadTwice, {}, "--lengths 3", "--lengths 3: must be 4 or more, because half a piece is judged"),
    (TextReadTwice, {}, "--lengths 9000000", "--lengths 9000000: 64 pieces need more than the text's"),
    (TextReadTwice, {}, "--lengths 8 --gap 9000000", "--lengths 8 with --gap 9000000: 64 pieces need more than"),
    (TextReadTwice, {}, "--gap -1", "--gap -1: must be 0 or more"),
    (TextReadTwice, {}, "--pieces 0", "--pieces 0: must be above 0"),
    (TextReadTwice, {}, "--model nowhere", "--model: checkpoint 'nowhere' does not exist"),
    (TextReadTwice, {"vocab_size": 100}, "", NO_BYTES),
    (TextReadTwice, {"vocab_size": 300, "tokenizer": {"kind": "unknown"}}, "", NO_BYTES),
    (Decay, {}, "--model nowhere", "--model: checkpoint 'nowhere' does not exist"),
    (Decay, {"attention": "softmax"}, "", "none of its layers is linear"),
    (HeadReach, {}, "", "linear layers with a forget gate"),
    (HeadReach, GATED, "--context 65536", "--rows 16 of --context 65536: the text has"),
    (HeadReach, GATED, "--context 1", "--context 1: must be 2 or more"),
    (Passkey, None, "--lengths 10", "length=10 is too short"),
    (Passkey, None, "--depths 101", "depth=101"),
    (Passkey, None, "--heads 3", "n_heads=3 does not divide d_model=64"),
    (Passkey, None, "--seed -1", "--seed -1: must be 0 or more"),
    (Convergence, None, "--runs nowhere", "holds no finished run"),
]


@pytest.mark.parametrize(("command", "model", "args", "message"), MISTAKES)
def test_bad_input_is_named(command, model, args, message, tmp_path, capsys):
    model = [] if model is None else saved(tmp_path / "model", **model)
    args = [*model, *args.split(), "--output", str(tmp_path / "out")]
    assert message in refusal(command, args, capsys)
    assert not (tmp_path / "out").exists()


def test_the_bound_by_its_formula():
    d, distance = 8, 3
    theta = [10000 ** (-2 * m / d) for m in range(d // 2)]
    sums = [abs(sum(cmath.exp(1j * distance * t) for t in theta[: i + 1])) for i in range(d // 2)]
    assert decay.bound(torch.tensor([distance]), head_dim=d).item() == pytest.approx(sum(sums) / (d / 2), abs=1e-12)
    assert decay.bound(torch.tensor([0])).item() == pytest.approx((64 + 1) / 2)


def test_mean_weights_against_all_pairs():
    torch.manual_seed(0)
    q, k = torch.rand(2, 1, 2, 12, 4, dtype=torch.float64).unbind()
    log_decay = -torch.rand(1, 2, 12, dtype=torch.float64)
    rope, longest = RotaryEmbedding(4), 5
    found = decay.mean_weights(q, k, rope, log_decay, longest)
    rotated = rope.rotate(q) @ rope.rotate(k).mT
    total = log_decay.cumsum(-1)
    kept = (total[..., :, None] - total[..., None, :]).exp()
    plain = q @ k.mT

    def mean(weights, distance):
        return sum(weights[..., i, i - distance].mean().item() for i in range(longest, 12)) / (12 - longest)

    for distance in range(longest + 1):
        for name, weights in {"plain": plain, "rotated": rotated, "rotated × decay": rotated * kept}.items():
            expected = mean(weights, distance) / mean(plain, 0)
            assert found[name][distance].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.exhaustive
def test_decay_of_each_layer(tmp_path, capsys):
    torch.manual_seed(0)
    model = saved(tmp_path / "model", n_layers=2, short_conv=4, forget_gate=True)
    assert Decay.main([*model, "--longest", "8", "--output", str(tmp_path / "out")]) == 0
    points = json.loads((tmp_path / "out" / "decay.json").read_text())["points"]
    curves = {(p["curve"], p["layer"]) for p in points if p["layer"] >= 0}
    assert curves == set(product(("plain", "rotated", "|rotated|", "rotated × decay"), (0, 1)))
    assert [p["value"] for p in points if p["curve"] == "plain" and p["distance"] == 0] == [1.0, 1.0]
    assert "bound: Σ |S_i| / (d/2)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.exhaustive
def test_reach_is_that_of_the_gates(tmp_path, capsys):
    args = saved(tmp_path / "some.model", n_layers=2, forget_gate=True)
    model = LanguageModel.from_pretrained(tmp_path / "some.model")
    for block, biases in zip(model.blocks, ([4.0, 0.0], [2.0, -3.0])):
        # the gate's matrix is 0 at the start: it forgets the same at each token
        block.attention.forget.linear.bias.data = torch.tensor(biases)
    model.save_pretrained(tmp_path / "some.model")
    assert HeadReach.main([*args, "--context", "128", "--rows", "2", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "reach.json").read_text())["points"]
    assert [(head["layer"], head["head"]) for head in found] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for head, bias in zip(found, (4.0, 0.0, 2.0, -3.0)):
        expected = math.ceil(1 / math.log1p(math.exp(-bias)))  # -1 / logsigmoid, in whole tokens
        assert head["tokens"] == head["low"] == head["high"] == expected
    assert (tmp_path / "reach.png").stat().st_size > 10_000


def test_a_gate_that_clears_at_times_has_the_lifetimes_of_what_it_cleared():
    log_decay = torch.zeros(3, 100)
    log_decay[0, 30] = -5.0  # what was written before is gone at token 30, what was written since stays
    log_decay[1] = -1 / 7.5
    log_decay[2, 90] = -0.5
    expected = [[30 - t if t < 30 else 100 for t in range(50)], [8] * 50, [100] * 50]
    assert reach.lifetimes(log_decay).tolist() == expected


def test_a_model_learns_and_is_asked(tmp_path, capsys):
    sizes = ["--steps", "2", "--d_model", "16", "--layers", "1", "--heads", "2"]
    asked = ["--lengths", "128", "1024", "--depths", "0", "100", "--rows", "2"]
    assert Passkey.main([*sizes, *asked, "--output", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "recall.json").read_text())
    assert [(case["length"], case["depth"]) for case in contents["cases"]] == list(product((128, 1024), (0, 100)))
    assert contents["trained_to"] == 512
    assert len(contents["train_losses"]) == 2
    assert contents["command"].startswith("python -m benchmarks.passkey --steps 2")
    assert LanguageModel.from_pretrained(tmp_path / "passkey.model").config.d_model == 16
    assert (tmp_path / "recall.png").stat().st_size > 10_000


LENGTH, WORDS = 21, 50


def copier(distance: int):
    """Sure of the token that stood `distance` before the one asked for; at a loss where there is none."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        known = 1000.0 * F.one_hot(tokens, WORDS)  # the logits at t are of token t + 1
        return F.pad(known, (0, 0, distance - 1, 0))[:, : tokens.shape[1]]

    return logits


@pytest.mark.parametrize("length", [LENGTH, 9], ids=["no gap", "nine tokens stand twice, twelve others between"])
def test_a_copier_that_reaches_far_enough_pays_for_the_first_reading_only(length):
    texts = torch.stack([torch.randperm(WORDS)[:LENGTH] for _ in range(3)])
    assert copying.measure(copier(LENGTH), texts, length) == (pytest.approx(math.log2(WORDS)), 0)
    if length < LENGTH:
        _, short_of_it = copying.measure(copier(length), texts, length)
        assert short_of_it > 100  # sure of another token


def test_a_model_that_knows_no_more_pays_the_same_again():
    pieces = torch.randint(WORDS, (3, LENGTH))
    table = torch.randn(WORDS, WORDS)  # the next token by the present one: what stands further back changes nothing
    first, again = copying.measure(lambda tokens: table[tokens], pieces, LENGTH)
    bits = -table.log_softmax(-1)[pieces[:, :-1], pieces[:, 1:]] / math.log(2)
    assert first == pytest.approx(bits[:, LENGTH // 2 - 1 :].mean().item(), rel=1e-5)  # float32 sums
    assert again == pytest.approx(first, rel=1e-5)


def test_models_are_shown_side_by_side(tmp_path, capsys):
    models = [tmp_path / "one/same.model", tmp_path / "two/same.model", tmp_path / "other.model"]
    named = [arg for path in models for arg in saved(path)]
    assert TextReadTwice.main([*named, "--lengths", "8", "31", "--pieces", "2", "--output", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "copying.json").read_text())["points"]
    names = [str(models[0]), str(models[1]), "other"]
    assert [(one["model"], one["length"]) for one in points] == [(name, length) for name in names for length in (8, 31)]
    for one in points:  # untrained: every byte costs about log2(257) bits, at both readings
        assert one["first"] == pytest.approx(8.0, abs=0.2)
        assert one["again"] == pytest.approx(8.0, abs=0.2)
    assert (tmp_path / "copying.png").stat().st_size > 10_000
    assert "Text that was just read" in capsys.readouterr().out
    args = ["--lengths", "8", "--gap", "23", "--pieces", "2", "--output", str(tmp_path / "gap")]
    assert TextReadTwice.main([*named, *args]) == 0
    assert "Text that was read 23 tokens ago" in capsys.readouterr().out
    assert json.loads((tmp_path / "gap" / "copying.json").read_text())["gap"] == 23


def test_rows_beyond_a_models_positions_are_refused_first(tmp_path, capsys):
    positions = PositionsConfig("learned", length=64)
    model = saved(tmp_path / "learned.model", attention="softmax", rope=None, positions=positions)
    said = refusal(TextReadTwice, [*model, "--lengths", "8", "40"], capsys)
    assert "--lengths 40: reads rows of 80 tokens, and --model" in said
    assert "has positions for 64" in said
