"""What the second reading of a text costs, against a model that copies and one that does not; and the whole command."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.experiments import copying
from linrope import LanguageModel, LanguageModelConfig

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
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2}
    for folder in ("one", "two"):
        LanguageModel(LanguageModelConfig(**sizes)).save_pretrained(tmp_path / folder / "same.model")
    LanguageModel(LanguageModelConfig(**sizes)).save_pretrained(tmp_path / "other.model")
    models = [tmp_path / "one/same.model", tmp_path / "two/same.model", tmp_path / "other.model"]
    named = [text for path in models for text in ("--model", str(path))]
    assert copying.main([*named, "--lengths", "8", "31", "--pieces", "2", "--output", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "copying.json").read_text())["points"]
    names = [str(models[0]), str(models[1]), "other"]
    assert [(one["model"], one["length"]) for one in points] == [(name, length) for name in names for length in (8, 31)]
    for one in points:  # untrained: every byte costs about log2(257) bits, at both readings
        assert one["first"] == pytest.approx(8.0, abs=0.2)
        assert one["again"] == pytest.approx(8.0, abs=0.2)
    assert (tmp_path / "copying.png").stat().st_size > 10_000
    assert "Text that was just read" in capsys.readouterr().out
    args = ["--lengths", "8", "--gap", "23", "--pieces", "2", "--output", str(tmp_path / "gap")]
    assert copying.main([*named, *args]) == 0
    assert "Text that was read 23 tokens ago" in capsys.readouterr().out
    assert json.loads((tmp_path / "gap" / "copying.json").read_text())["gap"] == 23
