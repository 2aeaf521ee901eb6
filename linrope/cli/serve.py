"""`linrope serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linrope.cli.checkpoint import ModelOptions
from linrope.cli.output import say
from linrope.cli.parser import parse_command
from linrope.errors import InputError, require_package
from linrope.generation.text import require_tokenizer
from linrope.models.language_model import LanguageModel
from linrope.serving.disk import SnapshotFolder
from linrope.serving.prefix_cache import PrefixCache
from linrope.serving.scheduler import Limits, Scheduler
from linrope.utils.options import check_types

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "LINROPE_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeConfig(ModelOptions):
    """The model, where it is served, and how much is done at a time."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send; null for the variable LINROPE_API_KEY, and for no key where that is not set."""
    model_name: str | None = None
    """Name of the model for clients; null for the name of its file or folder."""
    max_length: int = 2**20
    """Tokens of a prompt and its continuation, at most."""
    max_rows: int = 32
    """Continuations that are decoded together, at most."""
    max_queue: int = 256
    """Requests that may wait; the next one is refused (429)."""
    time_limit: float = 600.0
    """Seconds that a request may take, the time in the queue included (504)."""
    segment_length: int = 512
    """Tokens of prompts that are read between two steps of decoding."""
    cache_gb: float = 1.0
    """GB of memory for the prefix cache; 0 for none."""
    cache_folder: str | None = None
    """Folder for what has no room in memory, and for all of the cache when the server ends; null for none."""
    cache_folder_gb: float = 10.0
    """GB of files in that folder, at most."""
    snapshot_every: int = 1024
    """Tokens of a prompt between two snapshots in the cache, a power of two. It ends with a snapshot anyway."""

    def __post_init__(self) -> None:
        check_types(self, section="--")
        for name in ("max_length", "max_rows", "max_queue", "segment_length", "snapshot_every"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"--{name}={value} must be at least 1.")
        if not 0 < self.time_limit < float("inf"):
            raise InputError(f"--time_limit={self.time_limit} must be a number of seconds above 0.")
        for name in ("cache_gb", "cache_folder_gb"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise InputError(f"--{name}={value} must be a number, at least 0.")
        if self.cache_folder is not None and not (self.cache_gb and self.cache_folder_gb):
            raise InputError("--cache_folder needs --cache_gb and --cache_folder_gb above 0: files go through memory.")
        if self.snapshot_every & (self.snapshot_every - 1):
            raise InputError(f"--snapshot_every={self.snapshot_every} must be a power of two, 1024 for example.")

    @property
    def key(self) -> str | None:
        """The key that clients must send, without spaces around it, which HTTP strips; None for none."""
        option, key = "--api_key", self.api_key
        if key is None:
            option, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE) or None
        if key is not None and not key.strip():
            raise InputError(f"{option}={key!r} is empty: give a key, or remove it for none.")
        return None if key is None else key.strip()

    @property
    def limits(self) -> Limits:
        """How much the scheduler does at a time."""
        return Limits(
            rows=self.max_rows,
            queue=self.max_queue,
            seconds=self.time_limit,
            segment_length=self.segment_length,
            snapshot_every=self.snapshot_every,
        )

    def open_folder(self, model: LanguageModel) -> SnapshotFolder | None:
        """The folder of the cache, if there is one."""
        if self.cache_folder is None:
            return None
        return SnapshotFolder(Path(self.cache_folder), round(self.cache_folder_gb * 1e9), model, say)


def run(args: Sequence[str]) -> None:
    """Run `linrope serve` with the command line `args`."""
    config = parse_command("serve", ServeConfig, args, "--ckpt_path FILE [--port 8000] [options]")
    for package in PACKAGES:
        require_package(package, "linrope serve", "serve")
    serve(config)


def serve(config: ServeConfig) -> None:
    """Serve until a signal ends it; what is under way is finished."""
    from linrope.serving import http, metrics, server  # optional packages

    key = config.key
    with server.listening_socket(config.host, config.port) as listening:  # before the model is read
        model = config.load()
        tokenizer = require_tokenizer(model, "linrope serve")
        cache = PrefixCache(round(config.cache_gb * 1e9), config.open_folder(model))
        counted = metrics.Metrics()
        scheduler = Scheduler(model, cache, config.limits, events=counted)
        counted.watch(scheduler, cache)
        longest = min(config.max_length, model.config.positions.longest_row or config.max_length)
        name = config.model_name or Path(config.checkpoint).resolve().name
        service = http.Service(scheduler, tokenizer, counted, name, longest, key)
        scheduler.start()
        host, port = listening.getsockname()[:2]
        at = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def tell() -> None:
            say(f"{name} is served at {at}/v1 ({'with' if key else 'without'} an API key)")

        try:
            server.Server(http.application(service), ready=tell, cut=service.cut).run(sockets=[listening])
        finally:
            scheduler.close(answer=False)
            cache.close()
