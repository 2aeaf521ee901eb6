"""linrope models in `transformers`, for its `generate` and `pipeline` and for lm-evaluation-harness.

Importing this module registers linrope with the Auto classes:

    import linrope.interop.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("exported")  # a folder of `linrope export`

The folder also names its classes, and so does each folder that `save_pretrained` of such a model writes: programs that
do not import linrope load them with `trust_remote_code=True`, if linrope is installed. This module needs
`pip install "linrope[hf]"`.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrope.data.tokenizers.base import Tokenizer as TextTokenizer
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError
from linrope.interop.llama import OPTIONS
from linrope.interop.packed_rows import segment_ids_of
from linrope.layers.linear import Linear
from linrope.layers.state import AttentionState, ModelState, map_state
from linrope.models.language_model import EMBEDDING_STD, Block, LanguageModel, LanguageModelConfig
from linrope.models.saving import (
    CONFIG_FILE,
    EXPORTED_TOKENIZER_FILE,
    TOKENIZER_FILE,
    replace_model,
    tokenizer_in,
    write_tokenizer,
)
from linrope.utils.checksums import verify_checksums, write_checksums
from linrope.utils.files import require_free_folder
from linrope.utils.options import require_whole

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
    from transformers.utils import cached_file
    from transformers.utils.logging import disable_progress_bar
except ImportError as error:
    raise InputError(f'{error.name} is not installed: pip install "linrope[hf]".') from error


DOCUMENT = "<|document|>"
"""The separator's text in the exported tokenizer."""
CODE_MODULE = "modeling_linrope"
CODE = "from linrope.interop.transformers import LinropeConfig, LinropeForCausalLM\n"
AUTO_MAP = {
    "AutoConfig": f"{CODE_MODULE}.LinropeConfig",
    "AutoModelForCausalLM": f"{CODE_MODULE}.LinropeForCausalLM",
}
"""Where transformers finds the classes of a folder, with `trust_remote_code=True`."""
CACHE = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))
"""What this version of transformers calls the cache in arguments and outputs: `cache` since 5.24."""
ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options of `generate` that take drafted tokens back."""


class LinropeConfig(PreTrainedConfig):
    """The configuration of transformers; `linrope` has the fields of `LanguageModelConfig`."""

    model_type = "linrope"

    def __init__(self, linrope: dict[str, Any] | None = None, **options: Any) -> None:
        fields = {field.name: field.name for field in dataclasses.fields(LanguageModelConfig)} | OPTIONS
        for name in options.keys() & (fields.keys() - {"vocab_size", "tie_word_embeddings"}):  # which may be set
            meant = {fields[name]: options[name]}
            raise InputError(f"{name}={options[name]!r} is a field of the model: pass linrope={meant}.")
        config = LanguageModelConfig.from_dict(linrope or {})
        self.linrope = config.to_dict()
        super().__init__(**options)
        self.tie_word_embeddings = config.tie_embeddings

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **options: Any) -> None:
        """Write `config.json`, and the module that it names for `trust_remote_code`."""
        self.auto_map = dict(AUTO_MAP)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        Path(save_directory, f"{CODE_MODULE}.py").write_text(CODE)
        super().save_pretrained(save_directory, push_to_hub, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Does nothing: every folder names the classes, and needs no copy of this file."""

    @property
    def vocab_size(self) -> int:
        return self.linrope["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self.linrope["vocab_size"] = size

    # what transformers calls these fields
    hidden_size = property(lambda self: self.linrope["d_model"])
    num_hidden_layers = property(lambda self: self.linrope["n_layers"])
    num_attention_heads = property(lambda self: self.linrope["n_heads"])
    num_key_value_heads = property(lambda self: self.linrope.get("n_kv_heads") or self.linrope["n_heads"])


class StateCache:
    """A model's state as a cache for `generate` of transformers; None before the first token."""

    is_compileable = is_croppable = False
    is_linear = (False,)  # so that `generate` reads only what follows the tokens of a given cache

    def __init__(self, state: ModelState | None) -> None:
        self.state = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read."""
        return 0 if self.state is None else self.state[layer_idx].past.length

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
    `attention_mask` and `position_ids` tell where padding and packed documents are."""

    config_class = LinropeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"model.output.weight": "model.embedding.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: LinropeConfig) -> None:
        super().__init__(config)
        self.model = LanguageModelConfig.from_dict(config.linrope).build()
        self.gradient_checkpointing = False  # transformers sets it, and _gradient_checkpointing_func
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

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, verify: bool = True, **options: Any
    ) -> LinropeForCausalLM:
        """As in transformers. `verify` compares the files of a local folder with its `SHA256SUMS`, if it has some.

        Raises:
            InputError: files that are not those of their checksums, or the tokenizer's file is missing.
        """
        folder = Path(pretrained_model_name_or_path or "", options.get("subfolder") or "")
        is_local = pretrained_model_name_or_path is not None and folder.is_dir()
        if is_local and verify:
            verify_checksums(folder)
        found = super().from_pretrained(pretrained_model_name_or_path, *args, **options)
        model = found[0] if isinstance(found, tuple) else found  # output_loading_info gives two
        kind = getattr(model.config, "linrope_tokenizer", None)
        file = folder / EXPORTED_TOKENIZER_FILE
        if kind == "tokenizers" and pretrained_model_name_or_path is not None and not is_local:
            file = _downloaded(pretrained_model_name_or_path, EXPORTED_TOKENIZER_FILE, options)
        model.model.tokenizer = tokenizer_in(file, kind)
        return found

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **options: Any) -> None:
        """As in transformers, with all that `from_pretrained` of linrope and of transformers needs, and checksums."""
        folder = Path(save_directory)
        if folder.is_file():
            raise InputError(f"save_directory={str(folder)!r} is a file: choose a folder.")
        if is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            (file := folder / EXPORTED_TOKENIZER_FILE).unlink(missing_ok=True)
            self.config.linrope_tokenizer = write_tokenizer(self.model.tokenizer, file)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **options)
        if is_main_process and (folder / CONFIG_FILE).exists():  # adapters alone have none
            _write_checksums(folder)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Does nothing: every folder names the classes, and needs no copy of this file."""

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: a LanguageModel initialises its own weights."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.output

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        output = Linear(new_embeddings.in_features, new_embeddings.out_features, bias=False, device="meta")
        output.weight = new_embeddings.weight
        self.model.output = output

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> torch.nn.Module:
        """As in transformers; without `mean_resizing` new tokens begin like those of a new model."""
        n_before = self.config.vocab_size
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.model.config = LanguageModelConfig.from_dict(self.config.linrope)
        if not mean_resizing:
            for module in (self.model.embedding, self.model.output):
                torch.nn.init.normal_(module.weight.data[n_before:], std=EMBEDDING_STD)
        return embedding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first call returns the cache

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """As in transformers. Raises InputError for assisted and prompt-lookup decoding, and for prompts in chunks
        without a cache or as embeddings."""
        config = self.generation_config if generation_config is None else generation_config
        for name in ASSISTED:
            if options.get(name, getattr(config, name, None)) is not None:
                raise InputError(
                    f"{name} drafts tokens and takes wrong ones back, which a linrope state cannot: leave it out."
                )
        if (size := options.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))) is not None:
            options = self._in_chunks(size, config, options)
        return super().generate(inputs, generation_config, *args, **options)

    @staticmethod
    def _in_chunks(size: int, config: GenerationConfig, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `generate`, so that it reads the prompt in chunks. Padding before a row's text is all in the
        first one: no text may follow a chunk that ends in padding."""
        require_whole("prefill_chunk_size", size, ", or None for no chunks")
        if options.get("use_cache", config.use_cache) is False:
            raise InputError("prefill_chunk_size needs the cache: remove use_cache=False.")
        if options.get("inputs_embeds") is not None:
            raise InputError("prefill_chunk_size reads input_ids in chunks: pass them in place of inputs_embeds.")
        if (mask := options.get("attention_mask")) is not None:
            padding = int((mask.cumsum(1) == 0).sum(1).max())
            options |= {"prefill_chunk_size": padding + 1} if padding >= size else {}
        given = {name: options.get(name) for name in ("cache", "past_key_values")}
        if all(cache is None for cache in given.values()):  # transformers wants one before the first chunk
            options = {name: value for name, value in options.items() if name not in given} | {CACHE: StateCache(None)}
        return options

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: StateCache | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits, and if asked for the loss, the state and the hidden states.

        Args:
            input_ids: (B, T), tokens that the cache does not include.
            attention_mask: (B, tokens so far), 0 for padding. Padding may come before a row's text, or after it if the
                row ends there.
            position_ids: (B, T) or (1, T). Where they start again at 0, a document of a packed row begins, which is
                read by itself. Otherwise they must agree with the mask and the state.
            cache, past_key_values: the cache that an earlier call returned, under its newer or its older name.
            inputs_embeds: (B, T, d_model), in place of `input_ids`.
            labels: (B, T), the input_ids again; -100 for tokens without a loss.
            use_cache: whether to return the state; None returns it outside of training.
            logits_to_keep: number of last tokens whose logits are computed; 0 for all; or a tensor of their indices.
            output_hidden_states: also return the input of each block, and what the output layer reads: n_layers + 1
                of (B, T, d_model). None does what the configuration says, here and in the next two.
            output_attentions: refused if True.
            return_dict: False returns a tuple of what there is.
            options: `seq_idx` as in `DataCollatorWithFlattening`; other arguments of transformers.

        Raises:
            InputError: both or none of input_ids and inputs_embeds, labels of some logits only, output_attentions, two
                caches or one of another kind, use_cache with gradient checkpointing; see `segment_ids_of` for masks
                and position_ids.
        """
        config = self.config
        if config.output_attentions if output_attentions is None else output_attentions:
            raise InputError("output_attentions=True: linrope never has the attention weights of all pairs of tokens.")
        with_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if cache is not None and past_key_values is not None:
            raise InputError("cache and past_key_values are two names of one argument: pass one of them.")
        cache = past_key_values if cache is None else cache
        past = self._checked_past(input_ids, inputs_embeds, cache)
        use_cache = self._checked_use_cache(use_cache)
        x = self.model.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        n_read = 0 if past is None else cache.get_seq_length()
        ids = _segment_ids(x.shape[:2], n_read, attention_mask, position_ids, options)
        hidden: list[Tensor] = []
        recompute = self.gradient_checkpointing and self.training

        def run(block: Block, x: Tensor, *others: Any) -> tuple[Tensor, AttentionState]:
            if with_hidden:  # or all of them would stay in memory
                hidden.append(x)
            return self._gradient_checkpointing_func(block, x, *others) if recompute else block(x, *others)

        n_last = _n_last(logits_to_keep, labels)
        first = 0 if with_hidden or not n_last else max(0, x.shape[1] - n_last)
        x, state = self.model.transform(x, past, ids, first, run)
        logits = self.model.output(x[:, -n_last:] if n_last is not None else x[:, logits_to_keep])
        loss = None
        if labels is not None:
            items = options.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, config.vocab_size, num_items_in_batch=items)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=(*hidden, x) if with_hidden else None,
            **{CACHE: StateCache(state) if use_cache else None},
        )
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _checked_past(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, cache: StateCache | None
    ) -> ModelState | None:
        """The state in the cache, after a check of what `forward` reads."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("pass either input_ids or inputs_embeds.")
        if inputs_embeds is not None:
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != self.config.hidden_size:
                expected = f"(B, T, d_model={self.config.hidden_size})"
                raise InputError(f"inputs_embeds is {tuple(inputs_embeds.shape)}: pass {expected}.")
            input_ids = inputs_embeds.new_zeros(inputs_embeds.shape[:2], dtype=torch.int64)
        if cache is not None and not isinstance(cache, StateCache):
            raise InputError(
                f"{CACHE} is a {type(cache).__name__}: pass the cache that an earlier call of this model returned, or "
                "None."
            )
        past = None if cache is None else cache.state
        self.model.check(input_ids, past)
        return past

    def _checked_use_cache(self, use_cache: bool | None) -> bool:
        if use_cache and self.gradient_checkpointing and self.training:
            raise InputError("use_cache=True does not go with gradient checkpointing: pass use_cache=False.")
        return not self.training if use_cache is None else use_cache


def _n_last(logits_to_keep: int | Tensor, labels: Tensor | None) -> int | None:
    """Number of last tokens whose logits are computed, 0 for all; None for a tensor of indices."""
    is_tensor = isinstance(logits_to_keep, Tensor)
    if not is_tensor and logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep} must be at least 1, or 0 for all.")
    if labels is not None and (is_tensor or logits_to_keep):
        raise InputError("labels need the logits of all tokens: leave logits_to_keep at 0.")
    return None if is_tensor else logits_to_keep


def _segment_ids(
    shape: tuple[int, int],
    n_read: int,
    mask: Tensor | None,
    position_ids: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    seq_idx = options.get("seq_idx")
    if options.get("cu_seq_lens_q") is not None and position_ids is None and seq_idx is None:
        raise InputError("cu_seq_lens_q alone is not read: pass the position_ids of packed rows too.")
    return segment_ids_of(tuple(shape), n_read, mask, position_ids, seq_idx)


def _write_checksums(folder: Path, *more: str) -> None:
    """Write the checksums of the files of a model, and of more files if they are there."""
    found = (CONFIG_FILE, EXPORTED_TOKENIZER_FILE, "model*.safetensors", "model*.safetensors.index.json", *more)
    write_checksums(folder, {file.name for pattern in found for file in folder.glob(pattern)})


AutoConfig.register("linrope", LinropeConfig, exist_ok=True)
AutoModelForCausalLM.register(LinropeConfig, LinropeForCausalLM, exist_ok=True)


def _downloaded(repository: str, name: str, options: Mapping[str, Any]) -> Path:
    """A file that transformers does not download by itself, by its options of `from_pretrained`."""
    asked = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    try:
        return Path(cached_file(repository, name, **{name: options[name] for name in asked if name in options}))
    except OSError as error:
        raise InputError(f"{repository!r} has no {name}: export the model again, and upload all files.") from error


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
        split_special_tokens=True,  # the name of one within a text is text
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


def without_progress_bars() -> None:
    """Show none of transformers' own in this process."""
    disable_progress_bar()


def export(model: LanguageModel, folder: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Write a model in the format of transformers: `model.safetensors`, `config.json` and the tokenizer, if known.

    `LanguageModel.from_pretrained` reads the folder too, without transformers.

    Raises:
        InputError: the folder is not empty, and `overwrite` is False.
    """
    folder = Path(folder)
    require_free_folder(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.partial-") as partial:
        new = Path(partial)
        LinropeForCausalLM.of(model).save_pretrained(new)
        if (tokenizer := _tokenizer_of(model)) is not None:
            tokenizer_for_transformers(tokenizer).save_pretrained(new)
        _write_checksums(new, TOKENIZER_FILE)  # others of transformers' files its users may write again
        folder.mkdir(exist_ok=True)
        replace_model(new, folder)
