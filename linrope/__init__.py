"""linrope: linear attention with rotary positions in the numerator only. Importing it needs torch, not Lightning."""

from linrope.attention import AttentionState, KeyValueCache, LinearAttention, SoftmaxAttention
from linrope.errors import InputError
from linrope.model import LanguageModel, LanguageModelConfig
from linrope.ops import State, linear_attention, merge
from linrope.rotary import RotaryConfig, RotaryEmbedding, RotaryScaling, permute_pairing
from linrope.segments import segmented_loss

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "InputError",
    "KeyValueCache",
    "LanguageModel",
    "LanguageModelConfig",
    "LinearAttention",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryScaling",
    "SoftmaxAttention",
    "State",
    "linear_attention",
    "merge",
    "permute_pairing",
    "segmented_loss",
]
