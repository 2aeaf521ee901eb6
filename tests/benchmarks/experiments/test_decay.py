"""The bound of RoFormer's section 3.4.3, and the weights of a model by distance."""

import cmath
import json

import pytest
import torch

from benchmarks.experiments import decay
from linrope import LanguageModel, LanguageModelConfig, RotaryEmbedding


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


def test_the_command(tmp_path, capsys):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=2, n_heads=2, short_conv=4, forget_gate=True))
    model.save_pretrained(tmp_path / "model")
    args = ["--model", str(tmp_path / "model"), "--longest", "8", "--output", str(tmp_path / "out")]
    assert decay.main(args) == 0
    points = json.loads((tmp_path / "out" / "decay.json").read_text())["points"]
    assert {(p["curve"], p["layer"]) for p in points if p["layer"] >= 0} == {
        (curve, layer) for curve in ("plain", "rotated", "|rotated|", "rotated × decay") for layer in (0, 1)
    }
    assert [p["value"] for p in points if p["curve"] == "plain" and p["distance"] == 0] == [1.0, 1.0]
    assert "bound" in capsys.readouterr().out
