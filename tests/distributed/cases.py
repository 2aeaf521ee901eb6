"""Rows that one process reads as a whole and several ranks read in slices: outputs and gradients of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linrope import (
    CosineAttention,
    EncoderConfig,
    LanguageModel,
    LanguageModelConfig,
    LinearAttention,
    RotaryConfig,
    RotaryEmbedding,
    SoftmaxAttention,
    State,
    linear_attention,
)
from linrope.distributed.group import SequenceGroup
from linrope.distributed.segments import sequence_parallel_segmented_loss, tokens_of_rank
from linrope.distributed.sequence import (
    sequence_parallel_attention,
    sequence_parallel_loss,
    sequence_parallel_masked_loss,
    slice_of_encoder,
)
from linrope.distributed.slices import SequenceSlice
from linrope.layers.state import map_state
from linrope.positions.base import PositionsConfig

ROWS, HEADS, LENGTH, D, E, WIDTH = 2, 3, 41, 6, 5, 18
LENGTHS = {
    2: {"even": [21, 20], "ragged": [1, 40]},
    4: {"even": [10, 10, 10, 11], "ragged": [29, 1, 2, 9]},
}


@dataclass(frozen=True)
class Problem:
    """Tensors, a module, and a function of them.

    `sliced` tensors have the tokens in the dimension that `token_dim` says, `whole` ones are the same on every rank.
    `call(sliced, whole, group)` returns outputs whose tokens are in `output_dim`, and what is left after the last
    token; without a group it computes the expected ones.
    """

    sliced: dict[str, Tensor]
    whole: dict[str, Tensor]
    call: Callable[[dict[str, Tensor], dict[str, Tensor], SequenceGroup | None], tuple[Tensor, list[Tensor]]]
    module: nn.Module
    output_dim: int = 2
    token_dim: dict[str, int] = field(default_factory=lambda: {"q": 2, "k": 2, "v": 2, "log_decay": 2})

    def run(self, lengths: list[int] | None = None) -> dict[str, Tensor]:
        """Outputs, what is left, and all gradients, of this rank's slice; of the whole without lengths."""
        group = None if lengths is None else SequenceGroup()
        total = next(x.shape[self.token_dim.get(name, 1)] for name, x in self.sliced.items())
        start, length = (0, total) if group is None else (sum(lengths[: group.rank]), lengths[group.rank])
        sliced = {n: x.narrow(self.token_dim.get(n, 1), start, length).clone() for n, x in self.sliced.items()}
        whole = {name: x.detach().clone() for name, x in self.whole.items()}
        leaves = {n: x.requires_grad_() for n, x in (sliced | whole).items() if x.is_floating_point()}
        self.module.zero_grad()
        output, left = self.call(sliced, whole, group)
        shape = [*output.shape]
        shape[self.output_dim] = total
        loss = (output * weights_like(output.new_empty(shape)).narrow(self.output_dim, start, length)).sum()
        is_last = group is None or group.rank == group.size - 1
        if is_last:
            loss = loss + sum(0.1 * (x * weights_like(x)).sum() for x in left)
        loss.backward()
        leaves |= dict(self.module.named_parameters())
        grads = {f"d {n}": torch.zeros_like(x) if x.grad is None else x.grad.clone() for n, x in leaves.items()}
        kept = {f"left {i}": x.detach() for i, x in enumerate(left)} if is_last else {}
        return {"output": output.detach(), **grads, **kept}

    def joined(self, of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The whole from the ranks' results."""
        joined = dict(of_ranks[-1])
        for name in joined:
            parts = [one[name] for one in of_ranks if name in one]
            if name == "output":
                joined[name] = torch.cat(parts, dim=self.output_dim)
            elif name[2:] in self.sliced:
                joined[name] = torch.cat(parts, dim=self.token_dim.get(name[2:], 1))
            elif name.startswith("d "):
                joined[name] = sum(parts)
        return joined


def weights_like(x: Tensor) -> Tensor:
    """Fixed weights of a loss, of either sign."""
    return torch.arange(x.numel(), dtype=torch.float64).mul(0.7).cos().reshape(x.shape).to(x.dtype)


def packed(length: int = LENGTH) -> Tensor:
    """(B, T) ids of documents that end inside slices, go on over several, and begin where slices and segments do."""
    ids = torch.zeros(ROWS, length, dtype=torch.int64)
    for row, starts in enumerate(([1, 10, 14, 32], [16, 20, 21, 30, 38])):
        for start in starts:
            ids[row, start:] += 1
    return ids.remainder(3)  # ids come again


def operator(dtype: torch.dtype, options: dict[str, Any]) -> Problem:
    """`sequence_parallel_attention` against the definition."""
    options = dict(options)
    torch.manual_seed(1)
    sliced = {name: torch.randn(ROWS, HEADS, LENGTH, n, dtype=dtype) for name, n in (("q", D), ("k", D), ("v", E))}
    if options.pop("decay", False):
        sliced["log_decay"] = -torch.rand(ROWS, HEADS, LENGTH, dtype=dtype) / 4
    if options.pop("masked", False):
        sliced["key_mask"] = torch.rand(ROWS, LENGTH) > 0.3
    if options.pop("packed", False):
        sliced["segment_ids"] = packed()
    rope, start = RotaryEmbedding(D, **options.pop("rope", {})).double(), options.pop("state", None)
    whole = {} if start is None else {f"state.{name}": x.to(dtype) for name, x in _some_state(options).items()}

    def call(sliced, whole, group):
        of_state = {name.removeprefix("state."): x for name, x in whole.items()}
        state = None if start is None else State(length=start, **of_state)
        arguments = {"rope": rope, "state": state, "return_state": True, **options}
        if group is None:
            o, final = linear_attention(**sliced, **arguments, backend="reference")
        else:
            o, final = sequence_parallel_attention(**sliced, **arguments, group=group)
        left = [x.masked_fill(x.isinf(), 0) for x in final.tensors.values()] if options.get("causal", True) else []
        return o, left

    return Problem(sliced, whole, call, rope)


def _some_state(options: dict[str, Any]) -> dict[str, Tensor]:
    state = {"kv": torch.randn(ROWS, HEADS, D, E), "k_sum": 3 * torch.rand(ROWS, HEADS, D)}
    state["log_decay"] = -torch.rand(ROWS, HEADS)
    if options.get("normalize") == "rotary":
        state["k_rotated_sum"] = torch.rand(ROWS, HEADS, D)
    return state


OPERATOR = {
    "plain": {},
    "no positions": {"rope": {"base": [None] * HEADS}},
    "decay, masked": {"decay": True, "masked": True},
    "packed": {"packed": True},
    "packed, decay, state": {"packed": True, "decay": True, "state": 1000},
    "rotary, decay, state": {"normalize": "rotary", "decay": True, "state": 7},
    "none, packed, masked": {"normalize": "none", "packed": True, "masked": True, "feature_map": "identity"},
    "by head, trained": {"rope": {"base": [9.0, 1e4, 5.0], "trainable": True, "interleaved": False}, "state": 10**6},
    "trained, packed": {"rope": {"trainable": True}, "packed": True, "decay": True},
    "signed": {"rope": {"rotary_dim": 2, "signed": True}, "decay": True},
    "sees all": {"causal": False, "masked": True},
    "sees all, packed": {"causal": False, "packed": True, "masked": True, "rope": {"trainable": True}},
    "sees all, packed, rotary, state": {"causal": False, "packed": True, "normalize": "rotary", "state": 5},
    "sees all, rotary": {"causal": False, "normalize": "rotary", "rope": {"trainable": True}},
}


def layer(make: Callable[[], nn.Module], options: dict[str, Any]) -> Problem:
    """A layer in slices, against the layer."""
    torch.manual_seed(2)
    module = make().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    sliced = {"x": torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)}
    if options.get("packed"):
        sliced["segment_ids"] = packed()
    if options.get("masked"):
        sliced["key_mask"] = torch.rand(ROWS, LENGTH) > 0.2
    initial, whole = None, {}
    if options.get("state"):
        with torch.no_grad():
            earlier = torch.randn(ROWS, options["state"], WIDTH, dtype=torch.float64)
            ids = torch.tensor([[0], [1]]).expand(-1, options["state"]).clone() if options.get("packed") else None
            if ids is not None:
                ids[:, -2:] = 5
            initial = module.advance(earlier, None, ids)
        whole = {f"state {i}": x for i, x in enumerate(_floating(initial))}

    def call(sliced, whole, group):
        state = initial
        if state is not None:
            given = iter(whole.values())
            state = map_state(lambda _, x: next(given) if x.is_floating_point() else x, state)
        before = state
        if group is not None:
            shape = tuple(sliced["x"].shape[:2])
            first = SequenceSlice.of(group, shape, torch.device("cpu"), sliced.get("segment_ids"), state)
            before = first.state_before(state)
        y, after = module(state=before, return_state=True, **sliced)
        left = [] if not module.causal else [x.masked_fill(x.isinf(), 0) for x in _floating(after)]
        return y, left

    return Problem(sliced, whole, call, module, output_dim=1)


def _floating(state) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(lambda _, x: found.append(x) or x if x.is_floating_point() else x, state)
    return found


LEARNED = PositionsConfig("learned", length=64)


def _linear(**options) -> Callable[[], nn.Module]:
    return lambda: LinearAttention(WIDTH, HEADS, **options)


def _softmax(**options) -> Callable[[], nn.Module]:
    return lambda: SoftmaxAttention(WIDTH, HEADS, **options)


LAYER = {
    "gate, conv": (_linear(forget_gate=True, short_conv=4), {}),
    "gate, conv, packed, state": (_linear(forget_gate=True, short_conv=4), {"packed": True, "state": 5}),
    "conv, masked, state": (_linear(short_conv=3, conv_silu="v"), {"masked": True, "state": 1}),
    "before map, packed": (
        _linear(rope=RotaryConfig(placement="before_map"), feature_map="hedgehog"),
        {"packed": True, "state": 6},
    ),
    "rotated values": (_linear(rotate_values=True, short_conv=2, output_norm=True, output_gate=True), {"packed": True}),
    "trained rotation": (_linear(rope=RotaryConfig(placement="both", trainable=True)), {"state": 9}),
    "sees all": (_linear(causal=False), {"masked": True}),
    "sees all, packed": (_linear(causal=False, rotate_values=True), {"packed": True, "masked": True}),
    "sees all, packed, before map": (
        _linear(causal=False, rope=RotaryConfig(placement="before_map")),
        {"packed": True},
    ),
    "sees all, packed, cosine": (lambda: CosineAttention(WIDTH, HEADS, causal=False), {"packed": True}),
    "cosine": (lambda: CosineAttention(WIDTH, HEADS, short_conv=4), {"packed": True, "state": 3}),
    "window": (_softmax(window=7, short_conv=3), {}),
    "window, state": (_softmax(window=30), {"state": 40}),
    "window, packed, state": (_softmax(window=12, short_conv=3), {"packed": True, "state": 5}),
    "window, masked": (_softmax(window=5), {"masked": True, "state": 2}),
    "window of 1": (_softmax(window=1), {"state": 2}),
    "window, grouped": (_softmax(window=9, short_conv=3, n_kv_heads=1, qk_norm=1e-6), {"packed": True, "state": 5}),
    "grouped": (_linear(short_conv=3, n_kv_heads=1, qk_norm=1e-6, qkv_bias=True), {"packed": True, "state": 5}),
}


def model(dtype: torch.dtype, is_packed: bool, state_of: int = 0, is_recomputed: bool = False, **options) -> Problem:
    """The loss of each target of a hybrid language model."""
    torch.manual_seed(3)
    config = LanguageModelConfig(
        vocab_size=13, d_model=12, n_layers=3, n_heads=2, attention=["linear", "softmax", "linear"], window=6, **options
    )
    lm = LanguageModel(config).to(dtype)
    for block in lm.blocks if is_recomputed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    sliced = {name: torch.randint(13, (ROWS, LENGTH)) for name in ("tokens", "targets")}
    sliced["targets"][:, :11] = -100  # a rank without targets
    if is_packed:
        sliced["segment_ids"] = packed()
    initial = lm(torch.randint(13, (ROWS, state_of)), return_state=True)[1].detach() if state_of else None

    def call(sliced, whole, group):
        arguments = {**sliced, "state": initial, "reduction": "none"}
        if group is None:
            loss, after = lm(return_state=True, **arguments)
        else:
            loss, after = sequence_parallel_loss(lm, group=group, **arguments)
        left = [x.masked_fill(x.isinf(), 0) for part in after for x in _floating(part)]
        return loss, left

    return Problem(sliced, {}, call, lm, output_dim=1)


MODEL = {
    "hybrid": {"is_packed": False, "forget_gate": True, "short_conv": 3},
    "hybrid, packed, state": {"is_packed": True, "state_of": 9, "short_conv": 4},
    "recomputed": {"is_packed": True, "is_recomputed": True, "forget_gate": True, "output_gate": True},
    "learned positions, packed": {"is_packed": True, "positions": LEARNED, "state_of": 4},
}


ENCODER = {
    "rope": {"rotate_values": True, "embedding_size": 5, "rope": RotaryConfig(trainable=True)},
    "sinusoidal": {"positions": PositionsConfig("sinusoidal")},
    "learned": {"positions": LEARNED, "tie_embeddings": False},
}


def encoder(**options) -> Problem:
    """The logits of masked language modeling, in rows with padding on either side."""
    torch.manual_seed(4)
    config = EncoderConfig(vocab_size=13, d_model=12, n_layers=2, n_heads=2, dropout=0.0, head="masked_lm", **options)
    mlm = config.build().double()
    for parameter in mlm.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    sliced = {"tokens": torch.randint(13, (ROWS, LENGTH)), "token_types": torch.randint(2, (ROWS, LENGTH))}
    sliced["key_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    sliced["key_mask"][0, :25] = sliced["key_mask"][1, 37:] = False
    sliced["targets"] = torch.randint(13, (ROWS, LENGTH)).where(torch.rand(ROWS, LENGTH) < 0.3, -100)
    sliced["targets"][:, :11] = -100  # a rank without targets

    def call(sliced, whole, group):
        arguments, state = {name: x for name, x in sliced.items() if name != "targets"}, None
        if group is not None:
            state = slice_of_encoder(mlm, **sliced, group=group).states_before(config.n_layers)
        return mlm(**arguments, state=state), []

    return Problem(sliced, {}, call, mlm, output_dim=1)


def masked_loss(options: dict[str, Any], lengths: list[int] | None) -> tuple[Tensor, list[Tensor]]:
    """A rank's part of the loss of masked tokens and of its gradients; without lengths the whole."""
    problem = encoder(**options)
    if lengths is None:
        loss = problem.module(**problem.sliced)
    else:
        group = SequenceGroup()
        sliced = {name: x.split(lengths, dim=1)[group.rank] for name, x in problem.sliced.items()}
        loss = sequence_parallel_masked_loss(problem.module, **sliced, group=group)
    loss.backward()
    return loss.detach(), [weight.grad for weight in problem.module.parameters()]


SEGMENTED = {
    "hybrid": {"is_packed": False, "forget_gate": True, "short_conv": 3},
    "packed": {"is_packed": True, "short_conv": 4},
    "trained rotation": {"is_packed": True, "rope": RotaryConfig(trainable=True)},
}


def in_segments(options: dict[str, Any], segment_length: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A rank's part of the loss of rows read in segments, and of the gradients; and the state after the rows."""
    group, problem = SequenceGroup(), model(torch.float64, **options)
    mine = tokens_of_rank(LENGTH, segment_length, group)
    sliced = {name: x[:, mine] for name, x in problem.sliced.items()}
    lm = problem.module
    loss, after = sequence_parallel_segmented_loss(lm, segment_length=segment_length, group=group, **sliced)
    loss.backward()
    return loss.detach(), [weight.grad for weight in lm.parameters()], [x for part in after for x in _floating(part)]


def at_once(options: dict[str, Any]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What `in_segments` must add up to: by the model itself."""
    problem = model(torch.float64, **options)
    loss, after = problem.module(return_state=True, **problem.sliced)
    loss.backward()
    grads = [weight.grad for weight in problem.module.parameters()]
    return loss.detach(), grads, [x.detach() for part in after for x in _floating(part)]
