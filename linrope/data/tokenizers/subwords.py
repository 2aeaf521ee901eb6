"""Tokenizers of Hugging Face's `tokenizers`, an optional package, from a `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linrope.errors import InputError, require_package

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|document|>")
"""Special tokens that end a document. The first one that a tokenizer has is its separator; the last is that of the byte
tokenizer that `linrope export` writes."""
LARGEST_VOCABULARY = 1 << 24
"""Many times the vocabulary of any tokenizer in use. A larger one is a mistake; its tables would fill the memory."""
N_PENDING = 32
"""Tokens that may wait for the rest of a character, and those before a text that are decoded with it. A character has
four bytes at most, but a token may end in the middle of the next one."""

SPACES = (" ", "\n", "\t", "Ġ", "Ċ", "ĉ", "▁")
"""What begins a token that begins a word: a space, or the character for it in a vocabulary."""


class SubwordTokenizer:
    """The `Tokenizer` of a `tokenizer.json`.

    The separator is the special token of one of the names in END_OF_DOCUMENT; without one, a new token after all
    others. The name of a special token within a text is text, so no document can end itself; a text is refused if the
    vocabulary holds the separator's name as a part of words (Unigram). The file's truncation, padding and tokens around
    each text are ignored.

    Raises InputError, naming the file `where` the text comes from, if it is no tokenizer, or the package `tokenizers`
    is missing.
    """

    def __init__(self, text: str, where: str = "the tokenizer") -> None:
        self.name = "tokenizer.json"
        self._text = text
        self._tokenizer = _load(text, where)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._special = frozenset(special.values())
        n_tokens = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.separator = next((special[name] for name in END_OF_DOCUMENT if name in special), n_tokens)
        self.vocab_size = max(n_tokens, self.separator + 1)
        if not 1 <= n_tokens <= LARGEST_VOCABULARY:
            what = f"numbers its tokens up to {n_tokens - 1:,}" if n_tokens else "has no token"
            raise InputError(f"{where} {what}: give one with 1 to {LARGEST_VOCABULARY:,} tokens, or 'bytes'.")

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that determines tokens; the file's indentation does not matter."""
        decisive = {key: value for key, value in json.loads(self._text).items() if key not in ("truncation", "padding")}
        return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()

    def encode_document(self, data: bytes) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`. The bytes of a token are those up to its end that no earlier token covers; the last token
        also has the rest. They sum to `len(data)`, whatever the tokenizer drops or changes, if there is a token. Raises
        UnicodeDecodeError for text that is not UTF-8, ValueError if it contains the separator as a token, or what the
        tokenizer has no token for.
        """
        text = data.decode("utf-8")
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"the tokenizer has no token for a part of it ({error})") from error
        tokens = np.array(encoding.ids, dtype=np.int64)
        if (tokens == self.separator).any():
            raise ValueError(f"it holds the tokenizer's separator, token {self.separator}")
        if not len(tokens):
            return tokens, tokens
        ends = _byte_positions(text)[np.array(encoding.offsets)[:, 1]]
        ends[-1] = len(data)
        return tokens, np.diff(np.maximum.accumulate(ends), prepend=0)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer`. Texts are encoded in parallel."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the package raises Exception itself
            raise InputError(f"{self.name} has no token for a part of the text ({error}): give another one.") from error
        rows = [encoding.ids for encoding in encodings]
        for text, row in zip(texts, rows):
            if self.separator in row:
                raise InputError(
                    f"the text {text!r:.60} holds the separator of {self.name}, token {self.separator}, which would "
                    "end it: take that out of the text."
                )
        return rows

    def encode_prompt(self, text: str) -> Tensor:
        """See `Tokenizer`. Raises InputError if the text is not Unicode, or as `encode_document` raises ValueError."""
        try:
            tokens, _ = self.encode_document(text.encode("utf-8"))
        except ValueError as error:  # UnicodeEncodeError is one
            raise InputError(f"prompt={text!r} cannot be read by the model's tokenizer: {error}.") from error
        return torch.from_numpy(np.concatenate([[self.separator], tokens]))

    def decoder(self, after: Sequence[int] = ()) -> SubwordDecoder:
        return SubwordDecoder(self, after)

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer`. A token is counted after another token, not at the start of a text. Special tokens have none
        (the separator, "<s>"), other than those that stand for a byte."""
        decoder = json.dumps(json.loads(self._text).get("decoder"))
        byte_level, byte_fallback = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        added = self._tokenizer.get_added_tokens_decoder()
        anchor = next((i for i in range(self.vocab_size) if self._decoded(i).isalpha()), self.separator)
        n_bytes = np.zeros(self.vocab_size, dtype=np.int64)
        for number in range(self.vocab_size):
            token = self._tokenizer.id_to_token(number)
            if token is None:
                continue
            if byte_level and number not in added:
                n_bytes[number] = len(token)  # one character for each byte
            elif byte_fallback and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                n_bytes[number] = 1
            elif number not in self._special:
                n_bytes[number] = len(self._decoded(anchor, number).encode()) - len(self._decoded(anchor).encode())
        return n_bytes

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._tokenizer.id_to_token(token) is not None

    def _decoded(self, *tokens: int) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def word_parts(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer`. In WordPiece a prefix, mostly "##", continues a word. Elsewhere a token with a space before
        it begins one; in a vocabulary without such tokens each token does."""
        tokens = [self._tokenizer.id_to_token(number) or "" for number in range(self.vocab_size)]
        between = np.array([not token.lstrip("".join(SPACES)) for token in tokens])
        begins = np.array([token.startswith(SPACES) for token in tokens])
        if prefix := getattr(self._tokenizer.model, "continuing_subword_prefix", None):
            begins = np.array([not token.startswith(prefix) for token in tokens])
        elif not (begins & ~between).any():
            begins = np.ones_like(begins)
        between[list(self._special)] = True
        return begins, between

    def to_serialized(self) -> dict[str, str]:
        return {"kind": "tokenizers", "json": self._text}


class SubwordDecoder:
    """The `Decoder` of a `SubwordTokenizer`. Unknown tokens become U+FFFD.

    Whether a token starts with a space depends on the token before it. So the last tokens that gave text are decoded
    again, together with the new ones. `after` are the tokens before all of these, whose text is not given again.
    """

    def __init__(self, tokenizer: SubwordTokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer, self._separator = tokenizer, tokenizer.separator
        context = [int(token) for token in after[-N_PENDING:]]
        if self._separator in context:
            context = context[len(context) - context[::-1].index(self._separator) :]
        self._shown = self._whole_characters([token for token in context if tokenizer._is_known(token)])
        self._pending: list[int] = []

    def feed(self, tokens: Iterable[int] | Tensor) -> str:
        values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return "".join(self._feed_one(token) for token in values if token != self._separator)

    def _feed_one(self, token: int) -> str:
        if not self._tokenizer._is_known(token):
            return self.finish() + "\ufffd"
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < N_PENDING:  # perhaps a character whose other bytes follow
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._pending_text()
        self._shown, self._pending = self._whole_characters(self._pending) or self._shown, []
        return text

    def _pending_text(self) -> str:
        decoded = self._tokenizer._decoded
        return decoded(*self._shown, *self._pending)[len(decoded(*self._shown)) :]

    def _whole_characters(self, tokens: list[int]) -> list[int]:
        """Without the last tokens, if these are a part of a character: what follows would lose it."""
        while tokens and self._tokenizer._decoded(*tokens).endswith("\ufffd"):
            tokens = tokens[:-1]
        return tokens


def _load(text: str, where: str) -> Any:
    """The tokenizer of `tokenizers`, set up to encode a text completely, and special names as text."""
    tokenizers = require_package("tokenizers", where)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises Exception itself
        raise InputError(
            f"{where} is not a tokenizer.json of Hugging Face's tokenizers ({error}): give one, or 'bytes'."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _byte_positions(text: str) -> np.ndarray:
    """The byte at which each character of `text` starts in UTF-8, and the end of the last: int64 (len(text) + 1,)."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])
