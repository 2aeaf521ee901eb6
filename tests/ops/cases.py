"""The one list of cases to which every form of the operator is held, and how one is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from linrope import RotaryEmbedding, State, linear_attention


@dataclass(frozen=True)
class Case:
    """One call: sizes, options, and which of the optional tensors it has."""

    name: str
    length: int = 130
    keys: int | None = None
    head_dim: int = 6
    value_dim: int = 5
    rope: dict[str, Any] | None = field(default_factory=lambda: {"trainable": True})
    decay: float = 0.0  # the strongest log decay; 0 for no forgetting
    masked: bool = False
    packed: bool | float = False  # how often a document begins; True: at three tokens of a hundred
    past: int | None = None  # the length of the incoming state
    batch: int = 2
    heads: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        return self.options.get("causal", True)


def doubled(x: Tensor) -> Tensor:
    """A feature map that is no key of the table, and that changes the number of features."""
    return torch.cat((x.exp(), (-x).exp()), dim=-1)


PER_HEAD = {"trainable": True, "base": (100.0, None, 7.0)}
"""A base for each of the heads, one of which starts without turning."""
CAUSAL = [
    *[Case(f"T={length}", length) for length in (1, 2, 63, 64, 65, 127, 130, 321, 1000)],
    Case("no positions", rope=None),
    Case("half-split pairing", rope={"trainable": True, "interleaved": False}),
    Case("part of the head", rope={"trainable": True, "rotary_dim": 4}),
    Case("part of the head, half-split", rope={"trainable": True, "rotary_dim": 4, "interleaved": False}),
    Case("odd head", head_dim=7, rope={"trainable": True, "rotary_dim": 6}),
    Case("wide values", value_dim=9),
    Case("one value", value_dim=1, past=7),
    Case("one feature", head_dim=1, rope=None, past=7),
    Case("forgetting", decay=0.1),
    Case("forgetting at once", decay=30.0),
    Case("forgetting slowly", decay=1e-6),
    Case("forgetting without positions", decay=0.1, rope=None),
    Case("masked", masked=True),
    Case("packed", packed=True),
    Case("packed, long", 321, packed=True),
    Case("continued", past=77),
    Case("continued far away", past=10**9),
    Case("continued, one token", 1, past=10**6),
    Case("continued, forgetting", past=1000, decay=0.1),
    Case("everything at once", 321, decay=0.1, masked=True, packed=True, past=77),
    Case("everything at once, unpacked", 321, decay=0.1, masked=True, past=77),
    # eps: rotated features can cancel, and a denominator near 0 would magnify the rounding of both sides
    *[
        Case(f"normalize={normalize}{name}", options={"normalize": normalize, "eps": 0.1}, **extra)
        for normalize in ("none", "rotary")
        for name, extra in {
            "": {},
            ", continued": {"past": 77, "decay": 0.1, "masked": True},
            ", packed": {"packed": True},
        }.items()
    ],
    *[Case(f"phi={name}", options={"feature_map": name}) for name in ("relu", "exp", "softmax")],
    Case("phi=identity", options={"feature_map": "identity", "normalize": "none"}),
    Case("phi=callable", rope={"trainable": True}, options={"feature_map": doubled}),
    Case("large eps", options={"eps": 3.0}),
    Case("a base for each head", rope=PER_HEAD),
    Case("a base for each head, part, half-split", rope=PER_HEAD | {"rotary_dim": 4, "interleaved": False}),
    Case("a base for each head, continued far away", rope=PER_HEAD, past=10**9),
    Case("a base for each head, continued, one token", 1, rope=PER_HEAD, past=10**6),
    Case("a base for each head, everything", 321, rope=PER_HEAD, decay=0.1, masked=True, packed=True, past=77),
    *[
        Case(f"signed{name}", rope={"trainable": True, "rotary_dim": 4, "signed": True, **rope}, **extra)
        for name, rope, extra in (
            ("", {}, {}),
            (", half-split, softmax features", {"interleaved": False}, {"options": {"feature_map": "softmax"}}),
            (", callable", {}, {"options": {"feature_map": doubled}}),
            (", one token", {}, {"length": 1, "past": 10**6, "decay": 0.1}),
            (", everything", {}, {"length": 321, "decay": 0.1, "masked": True, "packed": True, "past": 77}),
            (", no denominator", {"rotary_dim": 6}, {"options": {"normalize": "none"}, "past": 77, "decay": 0.1}),
        )
    ],
    Case("a base for each head, rotary", rope=PER_HEAD, past=77, options={"normalize": "rotary", "eps": 0.1}),
]
NONCAUSAL = [
    Case(f"noncausal {name}", options={"causal": False, **options}, **extra)
    for name, options, extra in (
        ("plain", {}, {}),
        ("one value", {}, {"value_dim": 1, "past": 7}),
        ("fewer keys", {}, {"length": 65, "keys": 30}),
        ("more keys", {}, {"length": 3, "keys": 130}),
        ("no positions", {}, {"rope": None}),
        ("masked", {}, {"masked": True}),
        ("packed", {}, {"packed": True}),
        ("packed, masked, continued", {}, {"packed": True, "masked": True, "past": 77}),
        ("packed, short", {}, {"length": 60, "packed": True, "masked": True, "past": 77}),
        ("packed, long", {}, {"length": 700, "packed": 0.006, "masked": True, "past": 77}),
        ("continued", {}, {"past": 10**9}),
        ("rotary", {"normalize": "rotary", "eps": 0.1}, {"past": 77, "packed": True}),
        ("none", {"normalize": "none"}, {}),
        ("softmax features", {"feature_map": "softmax"}, {}),
        ("signed", {}, {"rope": {"trainable": True, "rotary_dim": 4, "signed": True}, "past": 77, "masked": True}),
        ("a base for each head", {}, {"rope": PER_HEAD, "past": 77}),
        ("a base for each head, packed", {}, {"rope": PER_HEAD, "packed": True, "masked": True, "past": 77}),
    )
]
CASES = CAUSAL + NONCAUSAL
COVERING = {
    "T=1", "T=64", "one feature", "forgetting at once", "forgetting without positions", "continued far away",
    "normalize=rotary, packed", "normalize=rotary, continued", "phi=relu", "phi=exp", "phi=identity",
    "a base for each head", "signed, half-split, softmax features", "signed, everything", "signed, no denominator",
    "noncausal fewer keys", "noncausal more keys", "noncausal no positions", "noncausal none", "noncausal rotary",
    "noncausal signed",
}  # fmt: skip
"""The cases that slow tests run by default. `test_triton_kernel.py` asserts that they reach every branch of the Triton
kernels, and every pair of options that interact, which all cases together reach."""


def named(cases: list[Case], default: Container[str] | None = None) -> list:
    """The cases as parameters. Those not in `default`, if given, run only with `-m exhaustive`."""

    def marks(case: Case) -> tuple:
        return () if default is None or case.name in default else (pytest.mark.exhaustive,)

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


def by_name(name: str, backend: str = "chunked") -> Case:
    """A case by its name: with "triton" the smaller one."""
    case = next(case for case in CASES if case.name == name)
    return smaller(case) if backend == "triton" else case


def run(case: Case, operator: Callable = linear_attention, backend: str = "reference", seed: int = 0):
    """Outputs, final state and gradients of one case in float64: {name: tensor}.

    `operator` takes what `linear_attention` takes. The loss is a fixed random combination of all outputs.
    """
    inputs, call = make(case, seed)
    o, final = operator(*call.pop("args"), **call, return_state=True, backend=backend)
    outputs = {"o": o, "kv": final.kv, "k_sum": final.k_sum, "k_rotated_sum": final.k_rotated_sum}
    if final.log_decay.requires_grad and not case.packed:
        outputs["log_decay"] = final.log_decay
    outputs = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    draw = torch.Generator().manual_seed(seed + 1)
    weights = [torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) for tensor in outputs.values()]
    loss = sum((weight * tensor).sum() for weight, tensor in zip(weights, outputs.values()))
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for name, gradient in zip(inputs, gradients):
        outputs["grad " + name] = torch.zeros(1) if gradient is None else gradient
    assert final.length == (case.past or 0) + (case.length if case.keys is None else case.keys)
    return {name: tensor.detach() for name, tensor in outputs.items()}


def on_tokens(tokens: slice, q: Tensor, k: Tensor, v: Tensor, rope: RotaryEmbedding | None, **options: Any):
    """`linear_attention` run on some tokens of a longer call."""
    for name in ("log_decay", "key_mask", "segment_ids"):
        if options.get(name) is not None:
            options[name] = options[name][..., tokens]
    return linear_attention(*(x[:, :, tokens] for x in (q, k, v)), rope, **options)


def in_pieces(*cuts: int) -> Callable:
    """`linear_attention` run on pieces of the sequence, the state handed from each to the next."""

    def operator(q, k, v, rope, *, state=None, **options):
        length, outputs = q.shape[2], []
        inside = sorted(cut % length for cut in cuts if -length < cut < length and cut != 0)
        for start, stop in itertools.pairwise([0, *inside, length]):
            o, state = on_tokens(slice(start, stop), q, k, v, rope, state=state, **options)
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    return operator


def smaller(case: Case) -> Case:
    """Fewer rows and heads, and shorter where neither blocks nor stretches are the point: the interpreter's time grows
    with each."""
    rows_differ = case.masked or case.packed
    longest = case.length if case.causal and not rows_differ else 150 if case.causal else 70
    changes: dict[str, Any] = {"length": min(case.length, 65 if "feature_map" in case.options else longest)}
    changes |= {"batch": 2 if rows_differ else 1, "heads": 2 if case.decay and case.packed else 1}
    if "base" in (case.rope or {}):
        changes |= {"heads": 2, "rope": case.rope | {"base": case.rope["base"][:2]}}
    return replace(case, **changes)


def make(case: Case, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The case's differentiable inputs by name, and the arguments of the call."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    keys = case.length if case.keys is None else case.keys
    shape = (case.batch, case.heads, case.length)
    inputs = {
        "q": random(*shape, case.head_dim),
        "k": random(case.batch, case.heads, keys, case.head_dim),
        # as a projection leaves them: heads inside, strides that are not those of (B, H, T, E)
        "v": random(case.batch, keys, case.heads, case.value_dim).transpose(1, 2),
    }
    features = case.head_dim
    if case.options.get("feature_map") is doubled:
        features += case.head_dim - (case.rope["rotary_dim"] if case.rope and case.rope.get("signed") else 0)
    call: dict[str, Any] = dict(case.options)
    if case.decay:
        inputs["log_decay"] = call["log_decay"] = -case.decay * torch.rand(shape, generator=draw, dtype=torch.float64)
    if case.masked:
        call["key_mask"] = torch.rand(case.batch, keys, generator=draw) > 0.3
    if case.packed:
        often = 0.03 if case.packed is True else case.packed
        starts = torch.rand(case.batch, case.length, generator=draw) < often
        call["segment_ids"] = starts.cumsum(1) % 2  # numbers come back
    rope = None
    if case.rope is not None:
        rope = RotaryEmbedding(features, **{"base": 100.0, **case.rope}).double()
        if rope.trainable:
            inputs["theta"] = rope.theta
    if case.past is not None:
        past = {
            "kv": random(case.batch, case.heads, features, case.value_dim),
            "k_sum": 10 * random(case.batch, case.heads, features).abs(),
            "log_decay": -random(case.batch, case.heads).abs(),
        }
        if case.options.get("normalize") == "rotary":
            past["k_rotated_sum"] = random(case.batch, case.heads, features)
        call["state"] = State(length=case.past, **past)
        inputs |= {"past " + name: tensor for name, tensor in past.items()}
    for tensor in inputs.values():
        tensor.requires_grad_()
    call["args"] = (inputs["q"], inputs["k"], inputs["v"], rope)
    return inputs, call


def assert_agree(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of the expected one, relative to that one's largest entry.

    A gradient that cancels to almost nothing (that of q, where a query sees one key) is measured against a thousandth
    of the largest gradient of its call instead: its rounding is that of the terms that cancelled.
    """
    assert actual.keys() == expected.keys()
    largest = max(tensor.abs().max().item() for name, tensor in expected.items() if name.startswith("grad"))
    for name, right in expected.items():
        scale = max(right.abs().max().item(), 1e-3 * largest if name.startswith("grad") else 0.0)
        error = (actual[name] - right).abs().max().item()
        assert error <= tolerance * scale, f"{name}: off by {error:.2e} where the scale is {scale:.2e}"
