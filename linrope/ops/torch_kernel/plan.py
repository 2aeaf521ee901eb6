"""How a call is computed: its blocks of tokens, their rotations, the dtype of products and the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from linrope.ops.call import Call
from linrope.ops.torch_kernel.memory import Pool
from linrope.rotary import unit_rotations
from linrope.utils.machine import has_fast_bfloat16

CHUNK = 64
"""Tokens whose pairs are all computed: near the head's size, pairs and state cost about the same."""
SUM_CHUNK = 16
"""The same for running sums of keys, which are small matrix products: with 16 tokens a quarter of the work of 64."""
BLOCK_ELEMENTS = 2**18
"""Size of one buffer of a block: 1 MiB in float32, so that a block's 15 to 20 buffers stay in a shared cache."""
BLOCK_TOKENS = 512
"""Tokens of a block if there are enough heads to fill it: with more, passing states between chunks costs more.

`python -m benchmarks.block_sizes` measures these: half or twice as much is within a tenth, but chunks of 128 tokens
cost a fifth more.
"""
MAX_BLOCK = 2048
"""The most tokens of a block."""


def sum_chunk(chunk: int) -> int:
    """Tokens of a chunk of a running sum, given those of a chunk: all of them at a ragged end."""
    return SUM_CHUNK if chunk % SUM_CHUNK == 0 else chunk


@dataclass(frozen=True)
class Block:
    """Block number `index`: the tokens of the sequence from `start` on, in chunks."""

    index: int
    start: int
    n_chunks: int
    chunk: int

    def of(self, x: Tensor) -> Tensor:
        """The block's tokens of x (B, H, T, ...)."""
        return x.narrow(2, self.start, self.n_chunks * self.chunk)


@dataclass(frozen=True)
class Partition:
    """How a call is cut into blocks: the rows, heads and tokens of each."""

    batch: int
    heads: int
    tokens: int

    @classmethod
    def of(cls, batch: int, heads: int, length: int, width: int) -> Partition:
        """Blocks of about `BLOCK_ELEMENTS`: few heads have long blocks, many heads are computed in groups."""
        rows, group = cls._rows(batch, heads, min(length, BLOCK_TOKENS), width)
        return cls(rows, group, cls.tokens_of(batch, heads, width))

    @classmethod
    def tokens_of(cls, batch: int, heads: int, width: int) -> int:
        """Tokens of a block. It does not depend on the length, so that graphs can leave the length open."""
        rows, group = cls._rows(batch, heads, BLOCK_TOKENS, width)
        tokens = max(BLOCK_ELEMENTS // width, CHUNK) // (rows * group) // CHUNK * CHUNK
        return torch.sym_min(torch.sym_max(tokens, CHUNK), MAX_BLOCK)

    @staticmethod
    def _rows(batch: int, heads: int, tokens: int, width: int) -> tuple[int, int]:
        """Rows of the batch and heads whose blocks of `tokens` fit; groups of heads have about one size.

        Several rows form a block only with all of their heads, so that the states of a group are contiguous.
        """
        rows = max(BLOCK_ELEMENTS // width // max(tokens, CHUNK), 1)
        n_groups = -(-heads // rows)
        group = -(-heads // n_groups)
        return torch.sym_max(torch.sym_min(batch, rows // group), 1), group

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        """The rows and the heads that are computed together."""
        for b in range(0, batch, self.batch):
            for h in range(0, heads, self.heads):
                yield slice(b, b + self.batch), slice(h, h + self.heads)

    def blocks(self, length: int, causal: bool) -> list[Block]:
        """Blocks that cover the length: of one chunk each, or of whole chunks and of one shorter chunk for the rest."""
        if not causal:
            cuts = [(start, 1, min(self.tokens, length - start)) for start in range(0, length, self.tokens)]
        else:
            whole = length - length % CHUNK
            cuts = [(start, min(self.tokens, whole - start) // CHUNK, CHUNK) for start in range(0, whole, self.tokens)]
            cuts += [(whole, 1, length - whole)] if length > whole else []
        return [Block(index, *cut) for index, cut in enumerate(cuts)]


@dataclass(frozen=True)
class Rotations:
    """Rotations of a token within its block, and of a block within the sequence. With one θ for each head the heads are
    the first axis."""

    local: Tensor  # (block, R/2) or (H, block, R/2), exp(i·p·θ): one table for every block
    frames: Tensor  # (number of blocks, R/2) or (H, ...), exp(i·t·θ), t the position of the block's first token
    interleaved: bool

    @classmethod
    def make(cls, theta: Tensor, interleaved: bool, starts: Tensor, longest: int, dtype: torch.dtype) -> Rotations:
        """For blocks of up to `longest` tokens that begin at the positions `starts`."""
        # By the addition of angles: a few exact rotations, and one product for each token.
        coarse = torch.arange(0, longest, 64, device=theta.device)
        fine = torch.arange(min(longest, 64), device=theta.device)
        positions = torch.cat((coarse, fine, starts))
        coarse, fine, frames = unit_rotations(positions, theta).split([len(coarse), len(fine), len(starts)], dim=-2)
        local = (coarse.unsqueeze(-2) * fine.unsqueeze(-3)).flatten(-3, -2)[..., :longest, :]
        complex_dtype = torch.promote_types(dtype, torch.complex64)
        return cls(local.to(complex_dtype), frames.to(complex_dtype), interleaved)

    def of_block(self, index: int, length: int) -> Tensor:
        """(length, R/2) or (H, length, R/2): the rotations of one block's tokens. `conj_physical` inverts them."""
        return self.local[..., :length, :] * self.frames[..., index, None, :]

    def of_heads(self, heads: slice) -> Rotations:
        """Those of some heads."""
        if self.local.ndim == 2:
            return self
        return Rotations(self.local[heads], self.frames[heads], self.interleaved)


@dataclass(frozen=True)
class Plan:
    """How a call, or some heads of it, is computed."""

    partition: Partition
    blocks: list[Block]
    """Of the queries or the keys, whichever are more."""
    rotations: Rotations | None
    product_dtype: torch.dtype
    """The dtype of the factors of matrix products."""
    pool: Pool

    @classmethod
    def of(cls, call: Call, exact: bool = False) -> Plan:
        """`exact`: no bfloat16 in the products, whatever the inputs' dtype."""
        batch, heads, length, features = call.q.shape
        keys, width = call.v.shape[2:]
        partition = Partition.of(batch, heads, max(length, keys), max(features, width))
        bfloat16 = (
            call.q.dtype == call.v.dtype == torch.bfloat16 and not exact and _is_bfloat16_fast(call.q.device.type)
        )
        blocks = partition.blocks(max(length, keys), call.causal)
        rotations = None if call.theta is None else _rotations(call, partition, max(length, keys), blocks)
        return cls(partition, blocks, rotations, torch.bfloat16 if bfloat16 else call.dtype, Pool.on(call.q.device))

    def of_heads(self, heads: slice) -> Plan:
        return self if self.rotations is None else replace(self, rotations=self.rotations.of_heads(heads))


def _rotations(call: Call, partition: Partition, length: int, blocks: list[Block]) -> Rotations:
    """The rotations of a call's tokens. Those of a sequence's start are kept: training needs them at each step."""
    theta = call.theta

    def make() -> Rotations:
        starts = call.start + torch.tensor([block.start for block in blocks], device=theta.device)
        return Rotations.make(theta.detach(), call.interleaved, starts, min(partition.tokens, length), call.dtype)

    if call.start != 0 or theta.requires_grad or theta.device.type != "cpu":
        return make()
    key = (theta.numpy().tobytes(), theta.shape, call.interleaved, length, partition.tokens, call.causal, call.dtype)
    return Pool.on(theta.device).keep("rotations", key, make, most=8)


@lru_cache
def _is_bfloat16_fast(device: str) -> bool:
    return device != "cpu" or has_fast_bfloat16()
