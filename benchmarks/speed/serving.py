"""`linrope serve`: the time to the first token of a long prompt and of a second turn, the cache, tokens/s by clients.

Models with random weights, on which no time depends: one of the size of configs/quickstart.yaml, and one of 12 million
parameters. A server is a process of its own, and its clients are threads of this one, on the same machine.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.harness.options import check_names
from benchmarks.harness.pictures import COLORS, MARKERS, Figure, legend_by_end, new_axes
from benchmarks.harness.runner import AddOption, Benchmark
from linrope import LanguageModel, LanguageModelConfig
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.utils.formatting import bytes_text
from linrope.utils.terminal import new_table

SIZES = {
    "0.85M": {"d_model": 128, "n_layers": 4, "n_heads": 4},
    "12M": {"d_model": 384, "n_layers": 7, "n_heads": 6},
    "tiny": {"d_model": 16, "n_layers": 1, "n_heads": 2},
}
"""The models by name; tiny is for tests."""
FIRST, SECOND, DECODING = "first turn", "second turn", "decoding"
NEW_TEXT = " And then, what happened after that?"
"""What a second turn adds to the first one and its answer."""


@dataclass
class ServingPoint:
    """One result.

    Attributes:
        what: FIRST or SECOND, the time to the first token; or DECODING.
        tokens: of the prompt; or those that all clients got in a round.
        seconds, spread: median of the rounds, and the range from the lowest to the highest.
        cache_bytes: what the cache grew by, of a first turn.
    """

    model: str
    what: str
    clients: int
    tokens: int
    seconds: float
    spread: float
    cache_bytes: int | None = None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Address:
    """A server to be asked."""

    host: str
    port: int

    def connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=3600)

    def complete(self, connection: http.client.HTTPConnection, prompt: str, max_tokens: int, seed: int) -> int:
        """Ask for a text; the number of tokens that came."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "top_p": 0.95, "seed": seed}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return json.load(connection.getresponse())["usage"]["completion_tokens"]

    def stream(self, prompt: str, max_tokens: int) -> tuple[float, str]:
        """Seconds to the first token of a stream, and its text."""
        connection, texts = self.connected(), []
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        started, first = time.perf_counter(), None
        connection.request("POST", "/v1/completions", json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - started
                texts.append(json.loads(line[6:])["choices"][0]["text"])
        connection.close()
        return first, "".join(texts)

    def cache_bytes(self) -> int:
        """Bytes in the prefix cache, with all that was asked before."""
        self.stream("", 0)  # an answer may end before its last snapshot is kept, the next request only after it
        connection = self.connected()
        connection.request("GET", "/metrics")
        found = re.search(r"^linrope_cache_bytes (\S+)", connection.getresponse().read().decode(), re.M)
        connection.close()
        return int(float(found[1]))


@contextmanager
def served(folder: Path, options: list[str]) -> Iterator[Address]:
    """A server of the model in a folder, in a process of its own, on a free port."""
    command = [sys.executable, "-m", "linrope", "serve", f"--ckpt_path={folder}", "--port=0", "--device=cpu", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        if (found := re.search(r"http://([\d.]+):(\d+)", line)) is None:
            raise RuntimeError(f"{' '.join(command)}: {line}{process.stderr.read()}")
        yield Address(found[1], int(found[2]))
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


def text_of(n: int, seed: int) -> str:
    """n characters that begin like no other seed's."""
    rng = random.Random(seed)
    return "".join(rng.choices(string.ascii_lowercase + " ", k=n))


class Serving(Benchmark):
    name = "serving"
    point = ServingPoint

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--models", nargs="+", default=["0.85M", "12M"], help=f"of {', '.join(SIZES)} (default: 0.85M 12M)")
        add("--prompt", type=int, default=100_000, help="tokens of the long prompt (default: 100,000)")
        add("--clients", type=int, nargs="+", default=[1, 8, 32], help="clients at a time (default: 1 8 32)")
        add("--tokens", type=int, default=256, help="tokens that a client asks for at a time (default: 256)")
        add("--requests", type=int, default=4, help="requests of each client in a round (default: 4)")
        add("--repeats", type=int, default=5, help="rounds that count, after one for warm-up (default: 5)")
        add("--segment", type=int, default=512, help="--segment_length of the server (default: 512)")
        add("--snapshot", type=int, default=1024, help="--snapshot_every of the server (default: 1024)")

    @classmethod
    def check(cls, parser: ArgumentParser, options: Namespace) -> None:
        check_names(parser, "--models", options.models, SIZES)
        options.clients = sorted(set(options.clients))

    def measure(self) -> None:
        o = self.options
        server = [f"--segment_length={o.segment}", f"--snapshot_every={o.snapshot}", f"--max_rows={max(o.clients)}"]
        server += [f"--max_length={2 * o.prompt + 100_000}", "--cache_gb=4", "--time_limit=3600"]
        for name in o.models:
            torch.manual_seed(0)
            model = LanguageModel(LanguageModelConfig(**SIZES[name], short_conv=4, forget_gate=True))
            with torch.no_grad():
                model.embedding.weight[SEPARATOR] = 0  # its logit is 0, so that no greedy answer ends early
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                with served(Path(folder), server) as address:
                    self._measure_turns(name, address)
                    self._measure_clients(name, address)

    def _measure_turns(self, name: str, address: Address) -> None:
        """A long prompt that is new each time, and a second turn after its answer."""
        o = self.options
        tick = self.progress(f"{name}: a prompt of {o.prompt:,} tokens", o.repeats + 1)
        first, second, grown = [], [], []
        for turn in range(o.repeats + 1):
            prompt, before = text_of(o.prompt - 1, turn), address.cache_bytes()
            seconds, answer = address.stream(prompt, 32)
            grown.append(address.cache_bytes() - before)
            first.append(seconds)
            second.append(address.stream(prompt + answer + NEW_TEXT, 32)[0])
            tick(advance=1)
        for what, times in ((FIRST, first[1:]), (SECOND, second[1:])):
            size = statistics.median_low(grown) if what == FIRST else None
            self.points.append(
                ServingPoint(name, what, 1, o.prompt, statistics.median(times), max(times) - min(times), size)
            )

    def _measure_clients(self, name: str, address: Address) -> None:
        """All clients at work, each with short prompts of its own, one request after another."""
        o = self.options
        tick = self.progress(f"{name}: clients", len(o.clients) * (o.repeats + 1))
        rounds: dict[int, list[tuple[int, float]]] = {n: [] for n in o.clients}
        for turn in range(o.repeats + 1):
            for n in o.clients:
                rounds[n].append(self._round(address, n, turn))
                tick(advance=1)
        for n, found in rounds.items():
            per_token = [seconds / tokens for tokens, seconds in found[1:]]
            tokens = round(statistics.mean(tokens for tokens, _ in found[1:]))
            spread = max(per_token) - min(per_token)
            self.points.append(
                ServingPoint(name, DECODING, n, tokens, statistics.median(per_token) * tokens, spread * tokens)
            )

    def _round(self, address: Address, clients: int, turn: int) -> tuple[int, float]:
        """Tokens that came, and seconds."""
        o = self.options

        def work(client: int) -> int:
            connection, got = address.connected(), 0
            for request in range(o.requests):
                seed = (turn * 1000 + client) * 1000 + request
                got += address.complete(connection, text_of(32, seed), o.tokens, seed)
            connection.close()
            return got

        with ThreadPoolExecutor(clients) as pool:
            started = time.perf_counter()
            return sum(pool.map(work, range(clients))), time.perf_counter() - started

    def of(self, model: str, what: str) -> list[ServingPoint]:
        """The points of a model."""
        return [point for point in self.points if (point.model, point.what) == (model, what)]

    def table(self) -> Table:
        columns = ("clients", "tokens", "seconds", "±", "tokens/s")
        caption = "seconds: to the first token, or of a round of all clients; ±: lowest to highest"
        table = new_table(f"linrope serve\n{self.device}", *columns, text=["model, what"], caption=caption)
        for p in self.points:
            rate = f"{p.rate:,.0f}" if p.what == DECODING else ""
            cells = str(p.clients), f"{p.tokens:,}", f"{p.seconds:.3f}", f"{p.spread:.3f}", rate
            table.add_row(f"{p.model}, {p.what}", *cells)
        return table

    def remarks(self) -> list[str]:
        found = []
        for model in dict.fromkeys(point.model for point in self.points):
            for first, second in zip(self.of(model, FIRST), self.of(model, SECOND)):
                per_thousand = bytes_text(round(first.cache_bytes / first.tokens * 1000))
                found.append(
                    f"{model}: a second turn takes {second.seconds / first.seconds:.2%} of the first one's time to the "
                    f"first token (goal: 1 %); the cache grows by {per_thousand} for 1,000 tokens"
                )
            gained = (f"{n} clients get {ratio:.1f} times the tokens/s of" for n, ratio in self.gain(model))
            found += [f"{model}: {text} {self.fewest}" for text in gained]
        return found

    @property
    def fewest(self) -> str:
        """The first number of clients, with which the others are compared."""
        fewest = min(self.options.clients)
        return "one client" if fewest == 1 else f"{fewest} clients"

    def gain(self, model: str) -> list[tuple[int, float]]:
        """(clients, their tokens/s over those of the first number of clients)."""
        points = self.of(model, DECODING)
        return [(point.clients, point.rate / points[0].rate) for point in points[1:]]

    def figures(self) -> dict[str, Figure]:
        return {"": self._figure()}

    def _figure(self) -> Figure:
        models = dict.fromkeys(point.model for point in self.points)
        gains = ", ".join(f"{model} {self.gain(model)[-1][1]:.1f}×" for model in models if self.gain(model))
        compared = f": tokens/s at {max(self.options.clients)} over {self.fewest}: {gains}" if gains else ""
        axes = new_axes(f"Clients are decoded together{compared}")
        for number, model in enumerate(models):
            curve = [(point.clients, point.rate) for point in self.of(model, DECODING)]
            axes.plot(*zip(*curve), label=model, color=COLORS[number], marker=MARKERS[number])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(self.options.clients, [str(n) for n in self.options.clients])
        axes.set_xlabel("clients at a time")
        axes.set_ylabel("tokens per second, all clients")
        legend_by_end(axes)
        return axes.figure


if __name__ == "__main__":
    sys.exit(Serving.main())
