"""onnxruntime and PyTorch read the same prompts and decode, and every pair is measured."""

import json

import pytest

from benchmarks.speed.onnx import Onnx

SMALL = ["--layers=1", "--d_model=16", "--heads=2", "--window=5", "--opsets=23", "--steps=2", "--repeats=2"]


def test_every_runtime_is_measured_on_both_models(tmp_path, capsys):
    assert Onnx.main([*SMALL, "--batch", "1", "3", "--prompt=11", "--segment=4", f"--output={tmp_path}"]) == 0
    points = json.loads((tmp_path / "onnx.json").read_text())["points"]
    assert [(point["method"], point["length"], point["batch"]) for point in points] == [
        (f"{model}, {what}: {runtime}", length, batch)
        for model in ("all-linear", "windowed hybrid")
        for what, length, batch in (("prompt", 11, 1), ("decoding", 1, 1), ("decoding", 1, 3))
        for runtime in ("PyTorch", "onnxruntime, opset 23")
    ]
    for point in points:
        assert point["status"] == "measured"
        assert point["tokens_per_second"] == pytest.approx(point["length"] * point["batch"] / point["seconds"])
    assert "prompt: 11 tokens in segments of 4" in capsys.readouterr().out
