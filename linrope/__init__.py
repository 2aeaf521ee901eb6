"""linrope: linear attention with rotary positions in the numerator only. Importing it needs torch, not Lightning."""

from linrope import interop
from linrope.errors import InputError
from linrope.feature_maps import register_feature_map
from linrope.layers.cosine_attention import CosineAttention
from linrope.layers.linear_attention import LinearAttention
from linrope.layers.softmax_attention import SoftmaxAttention
from linrope.layers.state import AttentionState, ModelState
from linrope.models.encoder import EncoderConfig, RoFormerEncoder
from linrope.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from linrope.models.heads import MaskedLM, MultipleChoice, QuestionAnswering, SequenceClassifier, TokenClassifier
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.ops.linear_attention import linear_attention
from linrope.ops.softmax import KeyValueCache
from linrope.ops.state import State, merge
from linrope.ops.summarize import summarize
from linrope.rotary import RotaryConfig, RotaryEmbedding, RotaryScaling, permute_pairing
from linrope.segmented import segmented_loss

__version__ = "0.1.0"
__all__ = [
    "AttentionState",
    "CosineAttention",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "InputError",
    "KeyValueCache",
    "LanguageModel",
    "LanguageModelConfig",
    "LinearAttention",
    "MaskedLM",
    "ModelState",
    "MultipleChoice",
    "QuestionAnswering",
    "RoFormerEncoder",
    "RotaryConfig",
    "RotaryEmbedding",
    "RotaryScaling",
    "SequenceClassifier",
    "SoftmaxAttention",
    "State",
    "TokenClassifier",
    "interop",
    "linear_attention",
    "merge",
    "permute_pairing",
    "register_feature_map",
    "segmented_loss",
    "summarize",
]
