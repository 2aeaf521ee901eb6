"""Snapshots on disk: found by prefix, also by the next server; bounded; damaged ones and another model's refused."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from linrope.layers.state import tensors_of
from linrope.serving import disk
from linrope.serving.disk import SnapshotFolder
from linrope.serving.prefix_cache import PrefixCache, Snapshot
from linrope.serving.scheduler import Limits, Scheduler
from tests.conftest import assert_input_errors
from tests.serving.conftest import SIZES, finish, prompt_of, request_for, writing
from tests.serving.test_scheduler import LONG, alone


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def opened(folder, model, told):
    """Opens the folder; all that were opened are closed at the end."""
    stores = []

    def open_(max_bytes: int = 10**8, of=model) -> SnapshotFolder:
        stores.append(SnapshotFolder(folder, max_bytes, of, told.append))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def snapshot_of(model, tokens: np.ndarray, logits: bool = True) -> Snapshot:
    with torch.inference_mode():
        out, state = model(torch.from_numpy(tokens.astype(np.int64))[None], return_state=True, logits_to_keep=1)
    return Snapshot(state, out[0, -1] if logits else None)


def test_prefixes_are_found_by_this_server_and_the_next(opened, model):
    text = prompt_of("hello world")
    first, store = {n: snapshot_of(model, text[:n], logits=n == 12) for n in (3, 7, 12)}, opened()
    for n, snapshot in first.items():
        store.put(text[:n], snapshot)
    for _ in range(2):
        cases = {(text.tobytes(), 0): 12, (text.tobytes(), 12): None, (text[:11].tobytes(), 0): 7}
        cases |= {(text[:7].tobytes(), 0): 3, (text[:3].tobytes(), 0): None, (prompt_of("hi").tobytes(), 0): None}
        for (tokens, beyond), length in cases.items():
            found = store.longest(np.frombuffer(tokens, np.int32), beyond)
            assert (None if found is None else found[0]) == length
            if found is not None:
                assert all(map(torch.equal, tensors_of(found[1].state), tensors_of(first[length].state)))
                assert found[1].state[0].past.length == length
                assert (found[1].logits is None) == (length != 12)
        store.close()
        store = opened()
    assert torch.equal(store.longest(text, 0)[1].logits, first[12].logits)
    store.put(text[:7], snapshot_of(model, text[:7]))  # now with logits
    assert store.longest(text[:7], 0)[0] == 7
    store.close()
    assert len(opened()) == 3


def test_the_folder_stays_within_its_bytes(opened, folder, model):
    texts = [prompt_of(f"{i} hello") for i in range(8)]
    store = opened()
    store.put(texts[0], snapshot_of(model, texts[0]))
    store.close()
    size = store.n_bytes
    assert size == sum(file.stat().st_size for file in folder.glob("*.state"))
    store = opened(3 * size)
    for text in texts[1:3]:
        store.put(text, snapshot_of(model, text), wait=True)
    assert store.longest(texts[0], 0) is not None  # and so is used last
    store.put(texts[3], snapshot_of(model, texts[3]), wait=True)
    store.put(texts[1], snapshot_of(model, texts[1]), wait=True)
    store.close()
    assert store.n_bytes == sum(file.stat().st_size for file in folder.glob("*.state")) <= 3 * size
    store = opened(2 * size)
    assert [store.longest(text, 0) is not None for text in texts[:4]] == [False, True, False, True]


def test_what_is_put_again_is_kept_by_the_next_server(opened, model):
    texts = [prompt_of(f"{i} hello") for i in range(3)]
    store = opened()
    for text in (*texts, texts[0]):
        store.put(text, snapshot_of(model, text))
    store.close()
    store = opened(store.n_bytes - 1)
    assert [store.longest(text, 0) is not None for text in texts] == [True, False, True]


@pytest.mark.parametrize("damage", ["cut", "changed", "renamed", "other", "missing"])
def test_a_damaged_file_is_removed_and_told(opened, folder, model, told, damage):
    text, other = prompt_of("hello"), prompt_of("world")
    store = opened()
    for tokens in (text, other):
        store.put(tokens, snapshot_of(model, tokens))
    store.close()
    one, two = sorted(folder.glob("*.state"))
    if damage == "cut":
        one.write_bytes(one.read_bytes()[:-100])
    elif damage == "changed":
        content = torch.load(one, weights_only=True)
        content["logits"][0] += 1
        torch.save(content, one)
    elif damage == "renamed":
        one.write_bytes(two.read_bytes())
    elif damage == "other":
        torch.save({"a": 1}, one)
    store = opened()
    if damage == "missing":
        one.unlink()
    found = [store.longest(tokens, 0) for tokens in (text, other)]
    assert sum(one is None for one in found) == len(told) == 1
    assert "It is removed, and its prompt is read again" in told[0]
    assert two.name not in told[0]
    assert not one.exists()
    assert len(store) == 1


def test_a_folder_of_another_model_or_of_something_else_is_refused(opened, folder, model, tmp_path):
    opened()
    other = writing(SIZES["hybrid"])
    again = writing(SIZES["recipe"])
    with torch.no_grad():
        again.output.weight[0, 0] += 1
    (tmp_path / "file").touch()
    assert_input_errors(
        (lambda: opened(of=other), "holds the states of another model, which mean nothing to this one"),
        (lambda: opened(of=again), "holds the states of another model"),
        (lambda: opened(), "is used by another server: give each its own"),
        (lambda: SnapshotFolder(tmp_path, 10, model), "holds something else: give a new or an empty folder"),
        (lambda: SnapshotFolder(tmp_path / "file", 10, model), "cannot write there"),
        (lambda: SnapshotFolder(Path("/proc/none"), 10, model), "cannot write there"),
    )
    (folder / "model.json").write_text("{")
    assert_input_errors((lambda: opened(), "its model.json is damaged"))


def test_a_full_disk_is_told(opened, folder, model, told, monkeypatch):
    store, text = opened(), prompt_of("hello")

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(torch, "save", fail)
        store.put(text, snapshot_of(model, text))
        assert store.longest(text, 0) is None  # which waits for the writer
    assert "could not write" in told[0]
    assert "No space left on device" in told[0]
    assert list(folder.glob("*.partial")) == []
    assert (store.longest(text, 0), len(store), store.n_bytes) == (None, 0, 0)
    store.put(text, snapshot_of(model, text))  # there is room again
    assert store.longest(text, 0)[0] == len(text)


def test_what_waits_to_be_written_is_bounded(opened, model, monkeypatch):
    store, texts = opened(), [prompt_of(f"hello {i}") for i in range(9)]
    snapshots = [snapshot_of(model, text) for text in texts]
    go_on, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *args: go_on.wait(10) and save(*args))
    monkeypatch.setattr(disk, "MOST_PENDING", 3 * snapshots[0].n_bytes)
    for text, snapshot in zip(texts, snapshots):
        store.put(text, snapshot)
    assert len(store) == 3
    go_on.set()
    store.put(texts[8], snapshots[8], wait=True)
    assert store.longest(texts[8], 0)[0] == len(texts[8])


@pytest.mark.parametrize("kind", list(SIZES))
def test_a_new_server_continues_where_the_last_one_ended(kind, opened):
    """Memory has room for little, so that snapshots go to disk and come back; results are those without a cache."""
    model = writing(SIZES[kind])
    prompts = [LONG(i % 3) * 2 for i in range(6)]
    for run in range(2):
        cache = PrefixCache(30_000, opened(of=model))
        scheduler = Scheduler(model, cache, Limits(segment_length=64, snapshot_every=16))
        for prompt in prompts:
            request = request_for(prompt, max_tokens=6)
            assert finish(scheduler, request) == alone(model, request)
            if run:
                assert request.cached_tokens == len(request.prompt)
        cache.close()
