"""The position encodings by name, and which of them a layer can have."""

from __future__ import annotations

from linrope.errors import InputError
from linrope.positions.alibi import ALiBi
from linrope.positions.base import PositionEncoding, PositionsConfig, Sizes
from linrope.positions.deberta import DeBERTa
from linrope.positions.learned import Learned
from linrope.positions.shaw import Shaw
from linrope.positions.sinusoidal import Sinusoidal
from linrope.positions.t5 import T5
from linrope.positions.transformer_xl import TransformerXL
from linrope.positions.tupe import TUPE
from linrope.rotary import RotaryConfig

IN_EMBEDDING: dict[str, type[PositionEncoding]] = {"sinusoidal": Sinusoidal, "learned": Learned}
"""Added to the token embeddings, once a model."""
IN_WEIGHTS: dict[str, type[PositionEncoding]] = {
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "t5": T5,
    "tupe": TUPE,
    "deberta": DeBERTa,
    "alibi": ALiBi,
}
"""In the logits of attention, in each layer: as a bias, or in a score with queries and keys."""
ENCODINGS = {"rope": PositionEncoding, "none": PositionEncoding, **IN_EMBEDDING, **IN_WEIGHTS}
"""All position encodings; RoPE, a rotation, is `linrope.rotary.RotaryEmbedding`."""


def rope_beside(positions: PositionsConfig | None, rope: RotaryConfig | None) -> RotaryConfig | None:
    """How layers rotate with this encoding: as `rope` says for "rope" (or None), not at all for the others.

    Raises:
        InputError: another encoding, and a `rope` that is not the default.
    """
    if positions is None or positions.name == "rope":
        return rope
    if rope not in (None, RotaryConfig()):
        raise InputError(
            f"positions.name={positions.name!r} takes the place of RoPE, whose options {rope} would do nothing: remove "
            "rope, or set positions.name to 'rope'."
        )
    return None


def require_without_weights(positions: PositionsConfig | None, attention: str) -> None:
    """Raise InputError for an encoding that linear attention cannot have; `attention` is its name in the message."""
    if positions is not None and positions.name in IN_WEIGHTS:
        allowed = [name for name in ENCODINGS if name not in IN_WEIGHTS]
        raise InputError(
            f"positions.name={positions.name!r} changes the attention weight of each pair of tokens, and {attention} "
            f"attention never forms these weights: choose one of {', '.join(allowed)}, or softmax attention. RoPE does "
            "not need them: it rotates queries and keys."
        )


def embedding_of(positions: PositionsConfig, d_model: int) -> PositionEncoding | None:
    """What a model adds to its token embeddings; None for nothing."""
    kind = IN_EMBEDDING.get(positions.name)
    return None if kind is None else kind(positions, Sizes(d_model))


def encoding_of(positions: PositionsConfig | None, sizes: Sizes) -> PositionEncoding | None:
    """What a softmax layer adds to its logits; None for nothing."""
    kind = None if positions is None else IN_WEIGHTS.get(positions.name)
    return None if kind is None else kind(positions, sizes)
