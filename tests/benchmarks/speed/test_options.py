"""Options that cannot be used are named before anything is run or written."""

import pytest
import torch

from benchmarks.harness.runner import Benchmark
from benchmarks.speed.beyond_memory import BeyondMemory
from benchmarks.speed.block_sizes import BlockSizes
from benchmarks.speed.decode import Decode
from benchmarks.speed.goals import Goals
from benchmarks.speed.gpu_check import GpuCheck
from benchmarks.speed.health import Health
from benchmarks.speed.model_scaling import ModelScaling
from benchmarks.speed.onnx import Onnx
from benchmarks.speed.scaling import Scaling
from benchmarks.speed.serving import Serving
from tests.benchmarks.commands import refusal


@pytest.mark.parametrize(
    ("benchmark", "args", "message"),
    [
        (BeyondMemory, "--lengths 0", "--lengths 0: must be above 0"),
        (BeyondMemory, "--segment_length -1", "--segment_length -1: must be above 0"),
        (BeyondMemory, "--heads 3 --d_model 16", "--heads 3: --d_model 16 must be a multiple of 4 times it"),
        (BeyondMemory, "--memory much", "'much' is no size"),
        (BeyondMemory, "--cost -1", "--cost -1: must be 0 or more"),
        (BlockSizes, "--length 0", "--length 0: must be above 0"),
        (Decode, "--contexts 10 0", "--contexts 0: must be above 0"),
        (Decode, "--batch -1", "--batch -1: must be above 0"),
        (Decode, "--steps 0", "--steps 0: must be above 0"),
        (Decode, "--head_dim 5", "--head_dim 5: must be even, because RoPE rotates pairs"),
        (Goals, "--only many-shor", "--only many-shor: unknown. Did you mean 'many-short'?"),
        (GpuCheck, "--seconds 0", "--seconds 0.0: must be above 0"),
        (GpuCheck, "--output new", "it needs CUDA, and PyTorch sees no such device here"),
        (Health, "--heads 3 --d_model 16", "n_heads=3 does not divide d_model=16"),
        (Health, "--steps 2", "--every 100: must be at most --steps 2, or nothing is measured"),
        (ModelScaling, "--lengths 100", "--lengths 100: does not divide --tokens 8192"),
        (ModelScaling, "--lengths 0", "--lengths 0: must be above 0"),
        (ModelScaling, "--attention linera", "--attention linera: unknown. Did you mean 'linear'?"),
        (ModelScaling, "--heads 3", "--heads 3: --d_model 256 must be a multiple of 2 times it"),
        (Onnx, "--segment 0", "--segment 0: must be above 0"),
        (Onnx, "--d_model 20 --heads 2", "--d_model 20 must be a multiple of 4 times it"),
        (Onnx, "--opsets 27 3", "opset=3 must be 23 … "),
        (Scaling, "--lengths 0", "--lengths 0: must be above 0"),
        (Scaling, "--methods softmax-rop", "--methods softmax-rop: unknown. Did you mean 'softmax-rope'?"),
        (Scaling, "--mode backward", "invalid choice: 'backward'"),
        (Scaling, "--repeats 0", "--repeats 0: must be above 0"),
        (Scaling, "--head_dim 7", "--head_dim 7: must be even, because RoPE rotates pairs"),
        (Scaling, "--memory lots", "'lots' is no size: give one such as 4GiB"),
        (Scaling, "--budget -1", "--budget -1.0: must be above 0"),
        (Scaling, "--output file/results", "cannot write there"),
        (Serving, "--models 0.85", "--models 0.85: unknown. Did you mean '0.85M'?"),
        (Serving, "--clients 0", "--clients 0: must be above 0"),
        (Scaling, "--device cuda", "--device cuda: PyTorch finds no CUDA device here"),
    ],
)
def test_bad_options_are_named_before_any_run(benchmark, args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchmark, "measure", Benchmark.measure)
    (tmp_path / "file").touch()
    assert message in refusal(benchmark, args.split(), capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
