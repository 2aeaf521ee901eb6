"""A model of the time of a training step in which P GPUs share one row of T tokens: FLOPs, bytes, latencies.

    computation = (6·N·T + attention FLOPs) / (P · peak · utilisation)
    step        between max(computation, communication) and computation + communication

The first bound hides all communication behind computation, the second none. The papers of ring attention and LASP-2
overlap a part, Ulysses exchanges before and after attention. So each method lies in between, and both bounds are given.
Every GPU also takes part in one all-reduce of all gradients, whichever the method. The volumes are those of `volumes`.

Not modelled: memory, the optimizer, load balance (causal softmax is taken as balanced), contention of the network,
recomputation, kernels that reach less of the peak than others, the few bytes of short convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.speed.scaleout.volumes import FLOAT32, lasp2_bytes, ring_bytes, state_bytes, ulysses_bytes

LINROPE, LASP2, RING, ULYSSES = "linrope", "LASP-2", "ring attention", "Ulysses"
LINEAR = (LINROPE, LASP2)
PEAK = 989.4e12
"""FLOP/s of an H100 SXM in dense products of bfloat16 (NVIDIA's data sheet: 1,979 with sparsity)."""
UTILISATION = 0.4
"""An assumption: the share of the peak that training reaches."""
NODE = 8
"""GPUs that NVLink connects (DGX H100)."""
NVLINK = 450e9
"""Bytes/s of a GPU in one direction (data sheet: 900 GB/s in both)."""
NETWORK = 50e9
"""Bytes/s of a GPU in one direction: InfiniBand NDR, 400 Gbit/s, one adapter for each GPU (DGX H100)."""
START, NVLINK_STEP, NETWORK_STEP = 8.4e-6, 3.4e-6, 9.6e-6
"""Seconds: start of a collective, one step of a ring by NVLink, one by the network. NCCL's own estimates (`baseLat` and
`hwLat` of src/graph/tuning.cc, ring, protocol Simple)."""
Bounds = tuple[float, float]
"""Seconds, at best and at worst."""


@dataclass(frozen=True)
class Machine:
    """Rates of the GPUs and of what connects them. Rates are per second, latencies seconds."""

    peak: float = PEAK
    utilisation: float = UTILISATION
    node: int = NODE
    nvlink: float = NVLINK
    network: float = NETWORK
    start: float = START
    nvlink_step: float = NVLINK_STEP
    network_step: float = NETWORK_STEP

    def nodes(self, gpus: int) -> int:
        return math.ceil(gpus / self.node)

    def ring_rate(self, gpus: int) -> float:
        """Bytes/s at which each GPU receives in a ring: between nodes all adapters of a node share what comes in."""
        return self.nvlink if gpus <= self.node else min(self.nvlink, self.node * self.network)

    def latency(self, gpus: int) -> Bounds:
        """Of a collective: the steps of a tree, log₂ of the nodes and of a node's GPUs; those of a ring, P - 1."""
        nodes, inside = self.nodes(gpus), min(gpus, self.node)
        tree = math.log2(inside) * self.nvlink_step + math.log2(nodes) * self.network_step
        ring = (gpus - nodes) * self.nvlink_step + (nodes - 1) * self.network_step
        return self.start + tree, self.start + ring

    def gather(self, gpus: int, nbytes: float) -> Bounds:
        """An all-gather of `nbytes` from each GPU, or a reduce-scatter that leaves as many on each."""
        moved = (gpus - 1) * nbytes / self.ring_rate(gpus)
        low, high = self.latency(gpus)
        return moved + low, moved + high

    def all_reduce(self, gpus: int, nbytes: float) -> Bounds:
        """The sum of `nbytes` over the GPUs: a reduce-scatter and an all-gather of a P-th."""
        low, high = self.gather(gpus, nbytes / gpus)
        return 2 * low, 2 * high

    def pass_on(self, gpus: int, nbytes: float) -> Bounds:
        """P - 1 steps in which each GPU sends a P-1-th of `nbytes` to its neighbour.

        Between nodes at best with all adapters of the node, at worst with the GPU's own and a new start each time.
        """
        steps = gpus - 1
        step = self.nvlink_step if gpus <= self.node else self.network_step
        slowest = self.nvlink if gpus <= self.node else self.network
        return nbytes / self.ring_rate(gpus) + steps * step, nbytes / slowest + steps * (step + self.start)

    def all_to_all(self, gpus: int, nbytes: float) -> Bounds:
        """Each GPU shares `nbytes` among all: at best NVLink and the network work at once, at worst in turn."""
        inside = min(gpus, self.node)
        near = nbytes * (inside - 1) / gpus / self.nvlink
        far = nbytes * (gpus - inside) / gpus / self.network
        low, high = self.latency(gpus)
        return max(near, far) + low, near + far + high


@dataclass(frozen=True)
class Transformer:
    """Sizes of a model. Its weights: 12·d² a layer, and the embedding, which is also the output."""

    layers: int = 24
    d_model: int = 2048
    heads: int = 16
    vocab: int = 50_304
    chunk: int = 128

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.d_model**2 + self.vocab * self.d_model

    def flops(self, tokens: float, is_linear: bool) -> float:
        """FLOPs of forward and backward, three times those of the forward.

        Causal softmax takes 2·T²·d a layer in the forward, half of all pairs. Linear attention takes
        T·d·(4·D + 2·C): sums and outputs of chunks, and pairs in chunks of C tokens.
        """
        d = self.d_model
        attention = tokens * d * (4 * self.head_dim + 2 * self.chunk) if is_linear else 2 * tokens**2 * d
        return 6 * self.parameters * tokens + 3 * self.layers * attention


@dataclass
class Step:
    """A row of the table: the time of a step and what makes it up. Bytes are those that one GPU sends for attention."""

    method: str
    gpus: int
    tokens: int
    computation: float
    communication_low: float
    communication_high: float
    seconds_low: float
    seconds_high: float
    bytes_sent: float


def communication(method: str, model: Transformer, machine: Machine, gpus: int, tokens: int) -> tuple[float, Bounds]:
    """Bytes that a GPU sends in one layer, forward and backward, and the seconds they take."""
    shape = (1, model.heads, model.head_dim, model.head_dim)
    if method in LINEAR:
        nbytes = (state_bytes if method == LINROPE else lasp2_bytes)(*shape)
        directions = [machine.gather(gpus, nbytes)] * 2
        sent = 2.0 * (gpus - 1) * nbytes
    else:
        volumes = (ring_bytes if method == RING else ulysses_bytes)(tokens, gpus, model.d_model)
        move: Callable[[int, float], Bounds] = machine.pass_on if method == RING else machine.all_to_all
        directions = [move(gpus, nbytes) for nbytes in volumes]
        # of what Ulysses shares a P-th stays; its latency is that of two exchanges, for q, k and v and for outputs
        sent = sum(volumes) * (1 if method == RING else (gpus - 1) / gpus)
        if method == ULYSSES:
            directions += [machine.latency(gpus)] * 2
    low, high = (sum(times) for times in zip(*directions))
    return sent, (low, high)


def is_possible(method: str, model: Transformer, gpus: int) -> bool:
    """Whether that many GPUs can share a row: Ulysses needs a head for each."""
    return method != ULYSSES or model.heads % gpus == 0


def step(method: str, model: Transformer, machine: Machine, gpus: int, tokens: int) -> Step:
    """A training step of one method."""
    computation = model.flops(tokens, method in LINEAR) / (gpus * machine.peak * machine.utilisation)
    sent, of_layer = communication(method, model, machine, gpus, tokens)
    gradients = machine.all_reduce(gpus, FLOAT32 * model.parameters)
    low, high = (model.layers * layer + shared for layer, shared in zip(of_layer, gradients))
    bounds = (max(computation, low), computation + high)
    return Step(method, gpus, tokens, computation, low, high, *bounds, model.layers * sent)
