"""The prefix cache: a radix tree over tokens, with snapshots of the model's state at some prefixes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from linrope.layers.state import ModelState
from linrope.serving.rows import bytes_of

TOKEN = np.int32
"""Tokens are kept and compared in this type."""


@dataclass(frozen=True)
class Snapshot:
    """What a model knows after a prefix."""

    state: ModelState
    """Of one row."""
    logits: Tensor | None = None
    """(vocab_size,), of the token after the prefix; None where it is not the end of a prompt."""

    @property
    def n_bytes(self) -> int:
        return bytes_of(self.state) + (0 if self.logits is None else self.logits.nbytes)


@dataclass(eq=False)
class Node:
    """A prefix at which others branch off, or with a snapshot. `edge` are its tokens after those of its parent."""

    edge: np.ndarray
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    n_bytes: int = 0
    """Of the snapshot."""

    @property
    def tokens(self) -> np.ndarray:
        """All tokens of the prefix."""
        edges, node = [], self
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1]) if edges else self.edge


class Store(Protocol):
    """Where evicted snapshots go, and come from again."""

    n_bytes: int

    def longest(self, tokens: np.ndarray, beyond: int) -> tuple[int, Snapshot] | None:
        """The longest prefix of more than `beyond` tokens with a snapshot."""

    def put(self, tokens: np.ndarray, snapshot: Snapshot, wait: bool = False) -> None:
        """Keep a snapshot, if that takes no time now, or with `wait` whatever time it takes."""

    def close(self) -> None:
        """Nothing more will come."""


class PrefixCache:
    """Snapshots by their prefix, at most `max_bytes` of states and tokens; the least recently used go first.

    They go into the `store`, if there is one. Not for several threads at a time.
    """

    def __init__(self, max_bytes: int, store: Store | None = None) -> None:
        self.max_bytes, self.store = max_bytes, store
        self.root = Node(np.empty(0, TOKEN), None)
        self.n_bytes = 0
        self._by_use: OrderedDict[Node, None] = OrderedDict()  # those with a snapshot, the last used at the end

    def __len__(self) -> int:
        """Number of snapshots."""
        return len(self._by_use)

    def longest(self, tokens: np.ndarray) -> tuple[int, Snapshot | None]:
        """The longest prefix of `tokens` with a snapshot, as its length, and the snapshot; (0, None) without one.

        That of all tokens counts only if it has the logits, with which the text goes on.
        """
        depth, node, best = 0, self.root, (0, None)
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None or not _starts_with(tokens, child.edge, depth):
                break
            node, depth = child, depth + len(child.edge)
            if node.snapshot is not None and (depth < len(tokens) or node.snapshot.logits is not None):
                best = depth, node
        depth, found = best
        if found is None:
            return 0, None
        self._by_use.move_to_end(found)
        return depth, found.snapshot

    def recall(self, tokens: np.ndarray) -> None:
        """Bring the longest prefix of `tokens` back from the store, if it is longer than any here."""
        if self.store is None:
            return
        found = self.store.longest(tokens, self.longest(tokens)[0])
        if found is not None:
            length, snapshot = found
            self.put(tokens[:length], snapshot)

    def put(self, tokens: np.ndarray, snapshot: Snapshot) -> None:
        """Keep a snapshot, if it is not larger than the cache. One of the same prefix is replaced, unless it has logits
        and the new one has not."""
        n_bytes = snapshot.n_bytes
        if n_bytes + tokens.nbytes > self.max_bytes or not len(tokens):
            return
        node = self._node_at(tokens.astype(TOKEN, copy=False))
        if node.snapshot is None or node.snapshot.logits is None:
            self.n_bytes += n_bytes - node.n_bytes
            node.snapshot, node.n_bytes = snapshot, n_bytes
        self._by_use[node] = None
        self._by_use.move_to_end(node)
        while self.n_bytes > self.max_bytes and len(self._by_use) > 1:
            self._evict(next(iter(self._by_use)))

    def _node_at(self, tokens: np.ndarray) -> Node:
        """The node of a prefix, which is made if there is none."""
        depth, node = 0, self.root
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                new = Node(tokens[depth:].copy(), node)
                node.children[int(tokens[depth])] = new
                self.n_bytes += new.edge.nbytes
                return new
            common = _common(tokens[depth:], child.edge)
            node = child if common == len(child.edge) else self._split(child, common)
            depth += common
        return node

    def _split(self, node: Node, n: int) -> Node:
        """A node in front of this one, with the first n tokens of its edge."""
        first = Node(node.edge[:n].copy(), node.parent)
        node.parent.children[int(node.edge[0])] = first
        node.edge, node.parent = node.edge[n:].copy(), first
        first.children[int(node.edge[0])] = node
        return first

    def _evict(self, node: Node, wait: bool = False) -> None:
        """Forget the snapshot of a node, and the nodes that are needed no longer. `wait`: see `Store.put`."""
        del self._by_use[node]
        if self.store is not None:
            self.store.put(node.tokens, node.snapshot, wait)
        self.n_bytes -= node.n_bytes
        node.snapshot, node.n_bytes = None, 0
        while node.parent is not None and node.snapshot is None and not node.children:
            self.n_bytes -= node.edge.nbytes
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.parent is not None and node.snapshot is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = np.concatenate((node.edge, child.edge)), node.parent
            node.parent.children[int(child.edge[0])] = child

    def close(self) -> None:
        """Evict all snapshots, the least recently used first, and close the store."""
        while self._by_use:
            self._evict(next(iter(self._by_use)), wait=True)
        if self.store is not None:
            self.store.close()


def _starts_with(tokens: np.ndarray, edge: np.ndarray, depth: int) -> bool:
    """Whether the tokens from `depth` on start with an edge."""
    return len(tokens) - depth >= len(edge) and np.array_equal(tokens[depth : depth + len(edge)], edge)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Number of first tokens that are equal."""
    n = min(len(left), len(right))
    differing = np.flatnonzero(left[:n] != right[:n])
    return int(differing[0]) if len(differing) else n
