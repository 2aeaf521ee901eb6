"""Many clients at once, some of which go away: each answer is that of the model alone, and each place becomes free."""

from __future__ import annotations

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from linrope.serving.disk import SnapshotFolder
from tests.serving.conftest import SIZES, request_for, writing
from tests.serving.test_http import KEY, Live
from tests.serving.test_scheduler import alone, wait_for

TEXT = "once upon a time there was a number of things to say about each other, and none of them was ever said " * 6
DRAWN = {"temperature": 3.0, "top_k": 8}


def texts_in(answer: str, stream: bool, n: int) -> list[str]:
    """The continuations in the body of an answer."""
    parts = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    texts = [""] * n
    for part in parts if stream else [json.loads(answer)]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def go_away(live: Live, body: dict, draw: random.Random) -> None:
    """Ask, and hang up a little later."""
    content = json.dumps({**body, "max_tokens": 300}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(live.socket.getsockname()) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        threading.Event().wait(draw.random() / 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(SIZES))
def test_many_clients(kind, tmp_path):
    """With room in memory for a few snapshots only, and on disk for a few more."""
    model = writing(SIZES[kind])
    live = Live(model, rows=6, queue=100, segment_length=32, snapshot_every=16)
    snapshots = live.scheduler.cache
    snapshots.max_bytes, snapshots.store = 60_000, SnapshotFolder(tmp_path / "cache", 300_000, model)

    @cache
    def expected(length: int, **options) -> list[str]:
        return alone(model, request_for(TEXT[:length], **options, **DRAWN))

    def work(client: int) -> None:
        draw = random.Random(client)
        for _ in range(8):
            length, n, stream = draw.choice([1, 5, 60, 61, 200, 500]), draw.choice([1, 1, 2]), draw.random() < 0.5
            options = {"max_tokens": draw.choice([1, 5, 30]), "seed": draw.randrange(3), "n": n}
            body = {"prompt": TEXT[:length], "stream": stream, **options, **DRAWN}
            if draw.random() < 0.2:
                go_away(live, body, draw)
            else:
                assert texts_in(live.post(body).text, stream, n) == expected(length, **options)

    try:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        wait_for(lambda: live.scheduler.n_running == live.scheduler.n_waiting == 0)
        assert snapshots.n_bytes <= 60_000
        assert not live.service._waiters
    finally:
        live.close()
        snapshots.close()
    assert 0 < sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.state")) <= 300_000
