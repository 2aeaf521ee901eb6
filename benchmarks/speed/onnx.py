"""Decoding and reading of prompts by onnxruntime, beside PyTorch, on a CPU.

Two models of the size of configs/quickstart.yaml, with random weights, on which no time depends: all layers linear, and
a windowed hybrid. All runtimes take turns, round after round in one process, with the same number of threads.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.harness.options import check_heads
from benchmarks.harness.runner import AddOption, Benchmark
from benchmarks.harness.sweep import INTERRUPTED, Point
from benchmarks.harness.timing import Call, Several
from linrope import LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.interop.onnx.export import export_onnx, require_exportable
from linrope.interop.onnx.runtime import OnnxLanguageModel
from linrope.profiling.fake_tensors import shapes_only
from linrope.utils.terminal import new_table

HYBRID = {"attention": ["linear", "linear", "linear", "softmax"], "rope": RotaryConfig(placement="signed")}
VOCAB_SIZE = 257
Step = Callable[[Tensor, Any], tuple[Any, Any]]
"""(tokens (B, T), state) -> (logits of the last token, state)."""


@dataclass
class Decoding:
    """One token a call, each after those before it."""

    step: Step
    state: Any
    token: Tensor

    def __call__(self) -> None:
        _, self.state = self.step(self.token, self.state)


@dataclass(frozen=True)
class Reading:
    """A prompt in segments, from an empty state on."""

    step: Step
    segments: tuple[Tensor, ...]

    def __call__(self) -> None:
        state = None
        for segment in self.segments:
            _, state = self.step(segment, state)


def steps_of(model: LanguageModel, threads: int, opsets: list[int], folder: Path) -> dict[str, Step]:
    """The step of a model by runtime: PyTorch, and onnxruntime with the graph of each opset."""
    steps: dict[str, Step] = {"PyTorch": partial(_by_pytorch, model)}
    for opset in opsets:
        export_onnx(model, folder / str(opset), opset=opset)
        steps[f"onnxruntime, opset {opset}"] = partial(_by_onnxruntime, OnnxLanguageModel(folder / str(opset), threads))
    return steps


@torch.inference_mode()
def _by_pytorch(model: LanguageModel, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    return model(tokens, state, return_state=True, logits_to_keep=1)


def _by_onnxruntime(graph: OnnxLanguageModel, tokens: Tensor, state: Any) -> tuple[np.ndarray, Any]:
    return graph(tokens.numpy(), state, logits_to_keep=1)


class Onnx(Benchmark):
    name = "onnx"

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--layers", type=int, default=4)
        add("--d_model", type=int, default=128)
        add("--heads", type=int, default=4)
        add("--window", type=int, default=512, help="of the softmax layers of the hybrid (default: 512)")
        add("--opsets", type=int, nargs="+", default=[27, 23], help="graphs to run (default: 27 23)")
        add("--batch", type=int, nargs="+", default=[1, 8], help="rows that decode together (default: 1 8)")
        add("--prompt", type=int, default=4096, help="tokens of the prompt (default: 4096)")
        add("--segment", type=int, default=256, help="tokens of the prompt read at once (default: 256)")
        add("--steps", type=int, default=100, help="decoded tokens in a sample (default: 100)")
        add("--repeats", type=int, default=7, help="samples that count, after one for warm-up (default: 7)")

    @classmethod
    def check(cls, parser: ArgumentParser, options: Namespace) -> None:
        options.device = "cpu"
        check_heads(parser, options, multiple=4)
        for opset in options.opsets:
            require_exportable(shapes_only(LanguageModelConfig()), opset)

    def measure(self) -> None:
        o = self.options
        sizes = {"vocab_size": VOCAB_SIZE, "d_model": o.d_model, "n_layers": o.layers, "n_heads": o.heads}
        shared = {**sizes, "short_conv": 4, "forget_gate": True}
        hybrid = {**HYBRID, "attention": HYBRID["attention"][-o.layers :], "window": o.window}
        for name, options in {"all-linear": {}, "windowed hybrid": hybrid}.items():
            torch.manual_seed(0)
            model = LanguageModel(LanguageModelConfig(**shared, **options)).eval()
            with tempfile.TemporaryDirectory() as folder:
                steps = steps_of(model, torch.get_num_threads(), o.opsets, Path(folder))
                self._measure_model(name, steps)

    def _measure_model(self, name: str, steps: dict[str, Step]) -> None:
        o = self.options
        prompt = torch.randint(VOCAB_SIZE, (1, o.prompt))
        reading = {runtime: Reading(step, prompt.split(o.segment, dim=1)) for runtime, step in steps.items()}
        self._time(f"{name}, prompt", reading, o.prompt, 1, o.prompt)
        for batch in o.batch:
            token = torch.zeros(batch, 1, dtype=torch.int64)
            read = torch.zeros(batch, o.window, dtype=torch.int64)  # before it, so that windows are full
            starts = {runtime: Decoding(step, step(read, None)[1], token) for runtime, step in steps.items()}
            decoding = {runtime: Several(start, o.steps) for runtime, start in starts.items()}
            self._time(f"{name}, decoding", decoding, 1, batch, batch)

    def _time(self, what: str, calls: dict[str, Call], length: int, batch: int, tokens: int) -> None:
        points = {runtime: Point(f"{what}: {runtime}", length, batch, INTERRUPTED) for runtime in calls}
        self.points += points.values()
        tick = self.progress(f"{what}, batch {batch}", len(calls) * (self.options.repeats + 1))
        self.time_in_turn(calls, points, tokens, tick, count=False, description=f"{what}: {{}}")

    def table(self) -> Table:
        o = self.options
        caption = f"prompt: {o.prompt:,} tokens in segments of {o.segment:,}\nms: median; ±: interquartile range"
        title = f"{o.layers} layers of {o.d_model}, {o.heads} heads, window {o.window:,}\n{self.device}"
        table = new_table(title, "batch", "ms", "±", "tokens/s", text=["model, what, runtime"], caption=caption)
        for point in self.points:
            table.add_row(point.method, str(point.batch), *point.cells()[:3])
        return table


if __name__ == "__main__":
    sys.exit(Onnx.main())
