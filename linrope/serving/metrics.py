"""What the server counts, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from linrope.serving.prefix_cache import PrefixCache
from linrope.serving.requests import Request
from linrope.serving.scheduler import Events, Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Events):
    """Counters and histograms of requests; the gauges are read when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Prompts that were answered, by the status of HTTP.", ["status"])
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter("cached_tokens", "Tokens of prompts that the prefix cache had.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that were generated.")
        self.seconds_to_first_token = self._histogram("seconds_to_first_token", "From a request to its first token.")
        self.request_seconds = self._histogram("request_seconds", "From a request to its last token.")

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"linrope_{name}", text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"linrope_{name}", text, registry=self.registry, buckets=SECONDS)

    def watch(self, scheduler: Scheduler, cache: PrefixCache) -> None:
        """Show how much is under way, and how much the cache holds."""
        gauges = {
            "waiting_requests": ("Requests in the queue.", lambda: scheduler.n_waiting),
            "running_rows": ("Continuations that are decoded, or whose prompt is read.", lambda: scheduler.n_running),
            "cache_bytes": ("Bytes of the prefix cache in memory.", lambda: cache.n_bytes),
            "cache_snapshots": ("Prefixes that the cache has in memory.", lambda: len(cache)),
        }
        if (store := cache.store) is not None:
            gauges["cache_folder_bytes"] = ("Bytes of the prefix cache on disk.", lambda: store.n_bytes)
        for name, (text, read) in gauges.items():
            Gauge(f"linrope_{name}", text, registry=self.registry).set_function(read)

    def first_token(self, request: Request) -> None:
        self.seconds_to_first_token.observe(request.first_token_at - request.submitted_at)

    def ended(self, request: Request) -> None:
        self.requests.labels(200 if request.error is None else request.error.status).inc()
        self.request_seconds.observe(time.monotonic() - request.submitted_at)
        self.generated_tokens.inc(request.n_generated)
        if request.is_read:
            self.prompt_tokens.inc(len(request.prompt))
            self.cached_tokens.inc(request.cached_tokens)

    def text(self) -> bytes:
        """All of it, in the format of Prometheus."""
        return generate_latest(self.registry)
