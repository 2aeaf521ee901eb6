"""Text in, text out: prompts are tokenized and read, generated text is written piece by piece, up to a stop string."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from linrope.data.tokenizers.base import Tokenizer, tokenizer_from_serialized
from linrope.errors import InputError
from linrope.generation.decoding import SEGMENT_LENGTH, decode, read, stream
from linrope.generation.prompt_state import CausalModel, PromptState
from linrope.generation.sampling import Sampler, Sampling
from linrope.utils.printable import printable

Write = Callable[[str], Any]


class TextWriter:
    """Reads and writes one text, with a model in evaluation mode; `write` takes each piece of generated text.

    `state` is the state after all that was read, generated tokens included; None before a document. It is valid after
    every token, so generation may be interrupted anywhere.
    """

    def __init__(
        self, model: CausalModel, write: Write, state: PromptState | None = None, segment_length: int = SEGMENT_LENGTH
    ) -> None:
        self.model, self.write, self.state, self.segment_length = model, write, state, segment_length
        self.device = next(model.parameters()).device
        self.tokenizer = require_tokenizer(model, "prompt")
        self.speed = Speed()

    def read(self, text: str) -> None:
        """Read text that continues what was read before."""
        tokens = self.tokenizer.encode_prompt(text)
        if self.state is not None:  # no new document begins: drop the separator
            tokens = tokens[1:]
        if len(tokens) == 0:
            return
        with self.speed.measure("read") as count:
            tokens = tokens[None].to(self.device)
            self.state = read(self.model, tokens, self.state, segment_length=self.segment_length)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            count(tokens.shape[1])

    def continue_text(self, max_new_tokens: int, sampler: Sampler, stop_strings: Sequence[str] = ()) -> tuple[str, str]:
        """Write until the document ends, a stop string is complete, or `max_new_tokens` tokens are written.

        The separator that ends a document counts as written, but is not read: text that is read next continues the same
        document.

        Returns:
            The text that was shown, and the text that was read. Only the second includes a stop string.
        """
        decoder, until = self.tokenizer.decoder(self.state.recent[0].tolist()), StopStrings(stop_strings)
        shown, kept, unread = [], [], None

        def show(text: str) -> None:
            shown.append(text)
            self.write(printable(text))

        def read_last() -> None:
            if unread is not None:
                self.state = read(self.model, unread[:, None], self.state)

        with self.speed.measure("written") as count:
            try:
                for token, before in decode(self.model, self.state, max_new_tokens, sampler):
                    unread, self.state = None, before  # in this order: no token is ever read twice
                    count(1)
                    if token.item() == self.tokenizer.separator:
                        break
                    kept.append(decoder.feed(token))
                    show(until.feed(kept[-1]))
                    unread = token
                    if until.found is not None:
                        break
            except KeyboardInterrupt:
                read_last()  # it was shown
                raise
            read_last()
        kept.append(decoder.finish())
        show(until.finish(kept[-1]))
        return "".join(shown), "".join(kept)


class StopStrings:
    """Passes text through up to the first stop string, which is not shown.

    Text that may be the beginning of a stop string is held back until more text decides. `found` is the stop string
    that ended the text, or None. InputError for an empty string.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        if "" in stop_strings:
            raise InputError("--stop='' is empty: it would end every text before its first character. Remove it.")
        self.stop_strings, self.found = tuple(stop_strings), None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that certainly comes before any stop string; "" after one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        places = [(text.find(stop), -len(stop), stop) for stop in self.stop_strings if stop in text]
        if places:  # the first; of two with the same beginning, the longer
            place, _, self.found = min(places)
            return text[:place]
        longest = max((len(stop) - 1 for stop in self.stop_strings), default=0)
        for kept in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[kept:]) for stop in self.stop_strings):
                self._held = text[kept:]
                return text[:kept]
        self._held = ""
        return text

    def finish(self, text: str = "") -> str:
        """The rest of the text, which ends with `text`: what was held back is shown unless a stop string was found."""
        shown = self.feed(text)
        held, self._held = ("" if self.found is not None else self._held), ""
        return shown + held


class Speed:
    """Numbers of tokens and seconds, by what was done with the tokens."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[int, float]] = {}

    @contextmanager
    def measure(self, action: str) -> Iterator[Callable[[int], None]]:
        """Add the time inside, and the tokens that the block counts with the function it gets, to an action."""
        started, counted = time.perf_counter(), []
        try:
            yield counted.append
        finally:
            if counted:
                tokens, seconds = self.spent.get(action, (0, 0.0))
                self.spent[action] = tokens + sum(counted), seconds + time.perf_counter() - started

    def __str__(self) -> str:
        text = "{1:,} tokens {0} ({2:,.0f} per second)"
        return ", ".join(text.format(action, n, n / seconds) for action, (n, seconds) in self.spent.items())


def write_sample(write: Write, model: CausalModel, prompt: str, *, max_new_tokens: int, **sampling: Any) -> None:
    """Write `prompt`, the beginning of a document, and its continuation by a model in evaluation mode.

    At most `max_new_tokens` tokens, up to the end of the document. `sampling` are the fields of `Sampling`.
    """
    writer = TextWriter(model, write)
    write(printable(prompt))
    writer.read(prompt)
    writer.continue_text(max_new_tokens, Sampler(Sampling(**sampling)))
    write("\n")


@torch.no_grad()
def generate_texts(
    model: CausalModel,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    stop: str | Sequence[str] | None = None,
    segment_length: int = SEGMENT_LENGTH,
    **sampling: Any,
) -> list[str]:
    """Each prompt, the beginning of a document, and its continuation up to the end of the document, or to one of the
    texts `stop`, which is left out.

    The other options are those of `linrope.generation.decoding.stream`. Raises InputError if the model has no
    tokenizer, or for a `stop` that is no text or empty.
    """
    stop_strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stop_strings, (list, tuple)) or not all(isinstance(one, str) and one for one in stop_strings):
        raise InputError(f"stop={stop!r} must be a text or a list of texts, none of them empty.")
    rows = [encode_text(model, prompt) for prompt in prompts]
    tokenizer = require_tokenizer(model, "encode")
    decoders, untils = [tokenizer.decoder(row.tolist()) for row in rows], [StopStrings(stop_strings) for _ in rows]
    new: list[list[str]] = [[] for _ in rows]
    open_rows = set(range(len(rows)))
    for token in stream(model, rows, max_new_tokens, segment_length=segment_length, **sampling):
        numbers = token.tolist()
        for row in sorted(open_rows):
            if numbers[row] != tokenizer.separator:
                new[row].append(untils[row].feed(decoders[row].feed([numbers[row]])))
            if numbers[row] == tokenizer.separator or untils[row].found is not None:
                open_rows.discard(row)
        if not open_rows:
            break
    ends = [until.finish(decoder.finish()) for until, decoder in zip(untils, decoders, strict=True)]
    return ["".join([prompt, *added, end]) for prompt, added, end in zip(prompts, new, ends, strict=True)]


def encode_text(model: CausalModel, text: str) -> Tensor:
    """See `LanguageModel.encode`."""
    if not isinstance(text, str):
        raise InputError(f"text is a {type(text).__name__}: pass a str.")
    tokens = require_tokenizer(model, "encode").encode_prompt(text)
    return tokens.to(next(model.parameters()).device)


def decode_text(model: CausalModel, tokens: Tensor | Sequence[int]) -> str:
    """See `LanguageModel.decode`."""
    tokenizer = require_tokenizer(model, "decode")
    try:
        tokens = torch.as_tensor(tokens, dtype=None if len(tokens) else torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        found = reprlib.repr(tokens)
        raise InputError(f"tokens={found} is no row of tokens: pass (T,) integers of at least 0.") from error
    if tokens.ndim != 1 or tokens.dtype not in (torch.int32, torch.int64) or (tokens < 0).any():
        raise InputError(f"tokens is {tuple(tokens.shape)} {tokens.dtype}: pass one row, (T,) integers of at least 0.")
    if len(tokens) and (highest := int(tokens.max())) >= model.config.vocab_size:
        raise InputError(f"tokens has {highest}: the model's vocabulary ends at {model.config.vocab_size - 1}.")
    decoder = tokenizer.decoder()
    return decoder.feed(tokens) + decoder.finish()


def require_tokenizer(model: CausalModel, option: str) -> Tokenizer:
    """The tokenizer that the model was trained with. InputError, which names `option`, if it is unknown or has more
    tokens than the model."""
    if (tokenizer := tokenizer_from_serialized(model.tokenizer, "the model's tokenizer")) is None:
        raise InputError(
            f"{option} needs a tokenizer, and the model was trained on tokens without one: train it with "
            "data.tokenizer set (sample.prompt=null trains without)."
        )
    if model.config.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"{option} needs a model of text: this one knows {model.config.vocab_size:,} tokens, the tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size:,}."
        )
    return tokenizer
