"""Sums of gradients of many backward passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def trained_elsewhere(outputs: Iterable[Tensor], sources: Iterable[Tensor]) -> Tensor | None:
    """A leaf that the outputs have a gradient for, and do not reach through `sources` alone; None if there is none."""
    sources = list(sources)
    leaves = {id(x) for x in sources}
    ends = {(x.grad_fn, x.output_nr) for x in sources if x.grad_fn is not None}
    seen, pending = set(), [(x.grad_fn, x.output_nr) for x in outputs]
    while pending:
        node, number = pending.pop()
        if node is None or node in seen or (node, number) in ends:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of the nodes that add to a leaf's gradient
        if leaf is not None and id(leaf) not in leaves:
            return leaf
        pending += node.next_functions
    return None


class GradientSums:
    """Gradients of parameters, summed in float32 at least: there may be hundreds of terms."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._dtypes = [p.dtype for p in parameters]
        self._sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        self._used = [False] * len(self._sums)

    def add(self, gradients: Iterable[Tensor | None]) -> None:
        """Add a gradient for each parameter; None adds nothing."""
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._used[i] = True
                self._sums[i] += gradient

    def rounded(self) -> list[Tensor | None]:
        """The sums in the parameters' dtypes; None for a parameter that got no gradient."""
        rows = zip(self._sums, self._dtypes, self._used, strict=True)
        return [summed.to(dtype) if used else None for summed, dtype, used in rows]
