"""linrope models in `transformers`, for its `generate` and `pipeline` and for lm-evaluation-harness.

Importing this module registers linrope with the Auto classes:

    import linrope.interop.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")  # a folder of `linrope export`

The folder also names its classes, so programs that do not import linrope load it with `trust_remote_code=True`, if
linrope is installed. This module needs `pip install "linrope[hf]"`.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.data.tokenizers.base import Tokenizer as TextTokenizer
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError
from linrope.layers.state import ModelState, map_state
from linrope.models.language_model import LanguageModel, LanguageModelConfig
from linrope.models.saving import CONFIG_FILE, EXPORTED_TOKENIZER_FILE, WEIGHTS_FILE
from linrope.utils.files import require_writable

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as error:
    raise InputError(f'{error.name} is not installed: pip install "linrope[hf]".') from error


DOCUMENT = "<|document|>"
"""The separator's text in the exported tokenizer."""
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
CODE_MODULE = "modeling_linrope"
CODE = "from linrope.interop.transformers import LinropeConfig, LinropeForCausalLM\n"


class LinropeConfig(PreTrainedConfig):
    """The configuration of transformers; `linrope` has the fields of `LanguageModelConfig`."""

    model_type = "linrope"

    def __init__(self, linrope: dict[str, Any] | None = None, **options: Any) -> None:
        config = LanguageModelConfig.from_dict(linrope or {})
        self.linrope = config.to_dict()
        super().__init__(**options)
        self.tie_word_embeddings = config.tie_embeddings

    # what transformers calls these fields
    vocab_size = property(lambda self: self.linrope["vocab_size"])
    hidden_size = property(lambda self: self.linrope["d_model"])
    num_hidden_layers = property(lambda self: self.linrope["n_layers"])
    num_attention_heads = property(lambda self: self.linrope["n_heads"])


class StateCache:
    """A model's state as a cache for `generate` of transformers."""

    is_compileable = False

    def __init__(self, state: ModelState) -> None:
        self.state = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read."""
        return self.state[layer_idx].past.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i] (beam search)."""
        self.state = map_state(lambda _, x: x.index_select(0, beam_idx.to(x.device)), self.state)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.state = map_state(lambda _, x: x.repeat_interleave(repeats, dim=0), self.state)

    def crop(self, max_length: int) -> None:
        raise InputError("a linrope state cannot drop its last tokens, which assisted generation needs.")


class LinropeForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel` with the interface of transformers. Its cache is the model's state, whose size is fixed;
    `attention_mask` marks padding and decides positions."""

    config_class = LinropeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.output.weight": "model.embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: LinropeConfig) -> None:
        super().__init__(config)
        self.model = LanguageModelConfig.from_dict(config.linrope).build()
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel) -> LinropeForCausalLM:
        """The wrapper of a linrope model, which shares its weights."""
        with torch.device("meta"):
            wrapped = cls(LinropeConfig(linrope=model.config.to_dict()))
        wrapped.model = model
        wrapped.config.dtype = next(model.parameters()).dtype
        if (tokenizer := _tokenizer_of(model)) is not None:
            separator = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.separator)
            wrapped.generation_config = GenerationConfig(**separator)
        return wrapped.train(model.training)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: a LanguageModel initialises its own weights."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.output

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first call returns the cache

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and if asked for the loss and the state.

        Args:
            input_ids: (B, T), tokens that `past_key_values` does not include.
            attention_mask: (B, tokens so far), 0 for padding. Padding may come before a row's text, or after it if the
                row ends there.
            past_key_values: the cache that an earlier call returned.
            labels: (B, T), the input_ids again; -100 for tokens without a loss.
            use_cache: whether to return the state; None returns it outside of training.
            logits_to_keep: number of last tokens whose logits are computed; 0 for all.
            options: other arguments of transformers. `position_ids` must agree with the mask and the state.

        Raises:
            InputError: a mask of the wrong shape, with holes, or that hides tokens after the first call; text that
                continues after padding, position_ids of packed rows, inputs_embeds.
        """
        if options.get("inputs_embeds") is not None:
            raise InputError("inputs_embeds are not supported: pass input_ids.")
        use_cache = not self.training if use_cache is None else use_cache
        _check_positions(options.get("position_ids"), attention_mask)
        past = None if past_key_values is None else past_key_values.state
        n_read = 0 if past_key_values is None else past_key_values.get_seq_length()
        ids = None if attention_mask is None else _documents(attention_mask, input_ids, n_read)
        logits, state = self.model(input_ids, past, ids, return_state=True, logits_to_keep=logits_to_keep or None)
        loss = None
        if labels is not None:
            items = options.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=items)
        cache = StateCache(state) if use_cache else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


def _documents(mask: Tensor, input_ids: Tensor, n_read: int) -> Tensor | None:
    """segment_ids that make padding a document of its own; None without padding in the input_ids."""
    n_rows, n_new = input_ids.shape
    if mask.shape != (n_rows, n_read + n_new):
        raise InputError(
            f"attention_mask is {tuple(mask.shape)} for input_ids {(n_rows, n_new)} after {n_read} tokens of "
            f"past_key_values: pass {(n_rows, n_read + n_new)}, the mask of all tokens so far."
        )
    mask = mask.bool()
    if mask[:, max(n_read - 1, 0) :].all():
        return None
    if n_read:
        hidden = "hides tokens after past_key_values" if mask[:, n_read - 1].all() else "ends in padding there"
        raise InputError(
            f"attention_mask {hidden}: a row can only continue after its text. Pad on the left, and pass the padding "
            "together with the first tokens of the rows."
        )
    if (mask.long().diff(dim=1, prepend=torch.zeros_like(mask[:, :1]).long()) > 0).sum(dim=1).max() > 1:
        raise InputError(
            "attention_mask has a hole: the text after it would not see the text before it. Padding may only come "
            "before or after the text of a row."
        )
    return mask.long()


def _check_positions(position_ids: Tensor | None, mask: Tensor | None) -> None:
    if position_ids is None or position_ids.shape[-1] < 2:
        return
    jumps = position_ids.diff(dim=-1) != 1
    if mask is not None:  # padding has no position
        seen = mask[:, mask.shape[1] - position_ids.shape[-1] :].bool()
        jumps = jumps & seen[:, 1:] & seen[:, :-1]
    if jumps.any():
        raise InputError("position_ids jump, as in packed rows: pass each document as a row of its own.")


AutoConfig.register("linrope", LinropeConfig, exist_ok=True)
AutoModelForCausalLM.register(LinropeConfig, LinropeForCausalLM, exist_ok=True)


def _tokenizer_of(model: LanguageModel) -> TextTokenizer | None:
    """The model's tokenizer; None if it is unknown, or if the model has fewer tokens than it."""
    tokenizer = tokenizer_from_serialized(model.tokenizer)
    return None if tokenizer is None or model.config.vocab_size < tokenizer.vocab_size else tokenizer


def tokenizer_for_transformers(tokenizer: TextTokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for transformers; it gives the ids of `tokenizer.encode_prompt`."""
    if isinstance(tokenizer, ByteTokenizer):
        made = _of_bytes()
    else:
        made = Tokenizer.from_str(tokenizer.to_serialized()["json"])
        made.no_truncation()
        made.no_padding()
    mark = made.id_to_token(tokenizer.separator) or DOCUMENT
    made.add_special_tokens([mark])  # without one in the vocabulary, the separator is the last id
    made.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A", pair=f"{mark} $A {mark} $B", special_tokens=[(mark, tokenizer.separator)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), mark),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _of_bytes() -> Tokenizer:
    """Bytes as byte-level BPE without merges, which loads without linrope."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's characters for bytes
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({**vocabulary, DOCUMENT: ByteTokenizer.separator}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def export(model: LanguageModel, folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Write a model in the format of transformers: `model.safetensors`, `config.json` and the tokenizer, if known.

    `LanguageModel.from_pretrained` reads the folder too, without transformers.

    Raises:
        InputError: the folder is not empty, and `overwrite` is False.
    """
    folder = Path(folder)
    require_free(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.partial-") as partial:
        _write(model, Path(partial))
        folder.mkdir(exist_ok=True)
        for old in (CONFIG_FILE, WEIGHTS_FILE, EXPORTED_TOKENIZER_FILE, *TOKENIZER_FILES):  # of another model
            (folder / old).unlink(missing_ok=True)
        mode = Path(partial, CONFIG_FILE).stat().st_mode  # safetensors makes its file readable for the owner only
        for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == CONFIG_FILE):  # config.json last
            file.chmod(mode)
            file.replace(folder / file.name)


def require_free(folder: Path, overwrite: bool) -> None:
    """Raise InputError unless the folder is new or empty, or may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output={str(folder)!r} is a file: choose a folder.")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--output={str(folder)!r} exists and is not empty: choose another, or pass --overwrite.")
    require_writable(folder, "--output")


def _write(model: LanguageModel, folder: Path) -> None:
    LinropeForCausalLM.of(model).save_pretrained(folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    classes = {"AutoConfig": LinropeConfig, "AutoModelForCausalLM": LinropeForCausalLM}
    config["auto_map"] = {name: f"{CODE_MODULE}.{one.__name__}" for name, one in classes.items()}
    if model.tokenizer is not None:
        config["linrope_tokenizer"] = model.tokenizer["kind"]
        if "json" in model.tokenizer:
            (folder / EXPORTED_TOKENIZER_FILE).write_text(model.tokenizer["json"], encoding="utf-8")
    (folder / CONFIG_FILE).write_text(f"{json.dumps(config, indent=2)}\n")
    (folder / f"{CODE_MODULE}.py").write_text(CODE)
    if (tokenizer := _tokenizer_of(model)) is not None:
        tokenizer_for_transformers(tokenizer).save_pretrained(folder)
