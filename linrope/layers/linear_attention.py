"""`LinearAttention`: linear attention with rotary positions, as a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linrope.errors import InputError, require_choice
from linrope.feature_maps import MapModule, make_feature_map
from linrope.layers.attention import Attention, AttentionOptions, checked_head_dim, positions_within
from linrope.layers.forget_gate import ForgetGate
from linrope.layers.initialisation import reset
from linrope.layers.state import RemotePast
from linrope.ops.backends import BACKENDS
from linrope.ops.checks import check_eps
from linrope.ops.linear_attention import linear_attention
from linrope.ops.open_documents import OpenEnds, attend_with_open_ends, summarize_first_document
from linrope.ops.state import State, merge
from linrope.ops.summarize import summarize
from linrope.positions.base import PositionsConfig
from linrope.positions.table import require_without_weights, rope_beside
from linrope.rotary import RotaryConfig, RotaryEmbedding, check_config, half_of

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Python 3.10 lacks it

SUMMARIZED = ("rope", "log_decay", "key_mask", "segment_ids", "feature_map", "normalize")
"""Options of a call on which the state depends."""


class LinearAttention(Attention):
    """Linear attention with rotary positions in the numerator only (RoFormer eq. 19), as a layer.

    By default the plain form: q, k, v = W x, `linear_attention`, W_o. Its state does not grow with the length.

    Args:
        d_model: width of the model.
        n_heads: number of heads H.
        head_dim: size of each head; None for d_model / n_heads.
        rope: how queries and keys are rotated, and in which sums (`rope.placement`, see `linrope.RotaryConfig`); None
            for no positions.
        positions: the position encoding; None for `rope`. "none", and "sinusoidal" and "learned", which the model adds
            to its embeddings, take the place of `rope`; the others need the matrix of attention weights.
        feature_map: φ, a name in `linrope.feature_maps.feature_map_names()`, or a callable that keeps the size of a
            head (a module is trained and saved with the layer). "favor", "hedgehog" and "taylor" are modules made for
            these heads; RoPE rotates their features (without the last one if their number is odd).
        temperature: learn a scale for each head inside φ: φ(e^τ x) for queries and keys, τ = 0 at the start. It also
            scales dimensions that skip φ.
        normalize: "plain" divides by the denominator, "none" does not (see `linear_attention`).
        causal: see earlier tokens only; False sees all.
        forget_gate: learn a decay for each head and token, slow at the start (see `linrope.layers.forget_gate`).
        gate_normalizer: r ≥ 1 that divides the forget gate's log decay, one number or one for each head. With a larger
            r a head remembers longer.
        eps: ε of the denominator.
        backend: see `linear_attention`.
        options: those of all layers, see `AttentionOptions`.

    Raises:
        InputError: sizes that do not fit, unknown names, `short_conv` or `forget_gate` with `causal=False`, a
            `rope.rotary_dim` that leaves no dimension to the denominator, positions that need the attention weights.
    """

    past_type = State

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int | None = None,
        rope: RotaryConfig | None = RotaryConfig(),
        positions: PositionsConfig | None = None,
        feature_map: str | Callable[[Tensor], Tensor] = "elu1",
        temperature: bool = False,
        normalize: str = "plain",
        causal: bool = True,
        forget_gate: bool = False,
        gate_normalizer: float | Sequence[float] = 1.0,
        eps: float = 1e-6,
        backend: str = "auto",
        **options: Unpack[AttentionOptions],
    ):
        if forget_gate and not causal:
            raise InputError("forget_gate=True needs causal=True: forgetting is defined for causal attention only.")
        if not forget_gate and not (isinstance(gate_normalizer, Real) and gate_normalizer == 1):
            raise InputError(f"gate_normalizer={gate_normalizer} divides the forget gate's log decay: set forget_gate.")
        require_choice("normalize", normalize, ("plain", "none"))
        require_choice("backend", backend, ("auto", *BACKENDS))
        check_eps(eps)
        check_config(rope)
        require_without_weights(positions, "linear")
        rope = rope_beside(positions, rope)
        placement = None if rope is None else rope.placement
        head_dim = checked_head_dim(d_model, n_heads, head_dim)
        signed = _signed_dim(rope, head_dim, normalize)
        phi = make_feature_map(feature_map, n_heads, head_dim - signed)
        n_features = signed + phi.n_features if isinstance(phi, MapModule) else head_dim
        embedding = _embedding(rope, head_dim, n_features)
        super().__init__(d_model, n_heads, head_dim=head_dim, rope=embedding, causal=causal, **options)
        self.feature_map = phi  # a module becomes part of this one
        self.n_features, self.before_map = n_features, placement == "before_map"
        denominator = "rotary" if placement == "both" and normalize == "plain" else normalize
        self.options = {"normalize": denominator, "eps": eps, "backend": backend}
        self.watch: Callable[..., None] | None = None  # see linrope.profiling.hooks
        self.log_scale = nn.Parameter(torch.zeros(n_heads)) if temperature else None
        self.forget = ForgetGate(d_model, n_heads, gate_normalizer) if forget_gate else None

    def reset_parameters(self) -> None:
        if isinstance(self.feature_map, nn.Module):
            reset(self.feature_map)  # the first to be drawn, as in the constructor
        super().reset_parameters()
        if self.log_scale is not None:
            nn.init.zeros_(self.log_scale)
        reset(self.forget)

    def attend(self, x, queries, k, v, past, segment_ids, key_mask, positions, outputs):
        scale = None if self.log_scale is None else self.log_scale.exp()[:, None, None]
        # φ(R_i q)ᵀφ(R_j k) is not a function of i - j alone
        at = positions_within(past, positions) if self.before_map else {}

        def scaled(y: Tensor) -> Tensor:
            y = y if scale is None else (y * scale).to(y.dtype)
            return self.rope.rotate(y, **at) if self.before_map else y

        k = scaled(k)
        log_decay = None if self.forget is None else self.forget(x)
        if log_decay is not None and key_mask is not None:
            log_decay = log_decay.masked_fill(~key_mask[:, None], 0)
        options = {
            "rope": None if self.before_map else self.rope,
            "log_decay": log_decay,
            "causal": self.causal,
            "key_mask": key_mask,
            "segment_ids": segment_ids,
            "feature_map": self.feature_map,
            **self.options,
        }
        before = start_exchange(k, v, options, past)
        q = scaled(queries())
        past = before()
        o, final = run_operator(q, k, v, options, past, outputs)
        if o is not None and self.watch is not None:
            self.watch(q, k, v, {**options, "state": past}, o, final)
        return o, final

    @property
    def past_rope(self):
        return None if self.before_map else self.rope

    @property
    def sees_positions(self):
        return self.before_map or super().sees_positions

    def past_bytes(self, context, dtype):
        sums = 2 if self.options["normalize"] == "rotary" else 1
        working = torch.promote_types(dtype, torch.float32)
        return self.n_heads * (self.n_features * (self.head_dim + sums) + 1) * working.itemsize


def start_exchange(
    k: Tensor, v: Tensor, options: dict[str, Any], past: State | RemotePast | None
) -> Callable[[], State | OpenEnds | None]:
    """A call of what is returned gives the state before keys and values. Where other devices hold earlier tokens, it
    waits for it, and the state of these keys and values is sent here."""
    if not isinstance(past, RemotePast):
        return lambda: past
    first, of_own = None, _summarized(options)
    if not options["causal"] and options["segment_ids"] is not None:
        first = summarize_first_document(k, v, **of_own)
    return past.start_exchange(summarize(k, v, **of_own), options["rope"], options["causal"], first)


def _summarized(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the operator's options that `summarize` takes."""
    return {name: options[name] for name in SUMMARIZED if name in options}


def run_operator(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], past: State | OpenEnds | None, outputs: bool
) -> tuple[Tensor | None, State]:
    """`linear_attention` after `past`, and the state; without `outputs` the state alone, which takes less time."""
    if isinstance(past, OpenEnds):
        return attend_with_open_ends(q, k, v, **options, ends=past)
    if outputs:
        return linear_attention(q, k, v, **options, state=past, return_state=True)
    new = summarize(k, v, **_summarized(options))
    return None, new if past is None else merge(past, new, options["rope"])


def _embedding(rope: RotaryConfig | None, head_dim: int, n_features: int) -> RotaryEmbedding | None:
    """RoPE for heads (`before_map`), or for the features made of them (without the last one of an odd number)."""
    if rope is None:
        return None
    if rope.placement == "before_map":
        return RotaryEmbedding.from_config(head_dim, rope)
    if rope.rotary_dim is None and n_features != head_dim:
        rope = replace(rope, rotary_dim=half_of(head_dim) if rope.signed else n_features // 2 * 2)
    return RotaryEmbedding.from_config(n_features, rope)


def _signed_dim(rope: RotaryConfig | None, head_dim: int, normalize: str) -> int:
    """Number of first dimensions of a head that skip the feature map and the denominator."""
    if rope is None or not rope.signed:
        return 0
    signed = half_of(head_dim) if rope.rotary_dim is None else rope.rotary_dim
    if normalize == "plain" and signed >= head_dim:
        raise InputError(
            f"rope.rotary_dim={signed} with rope.placement={rope.placement!r} leaves none of the {head_dim} dimensions "
            "of a head to the denominator: lower rotary_dim, or set normalize='none'."
        )
    return signed
