"""Text in, text out: prompts tokenized and read, answers written piece by piece as they are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from linrope.data.tokenizers.base import Tokenizer, tokenizer_from_serialized
from linrope.errors import InputError
from linrope.generation.decoding import SEGMENT_LENGTH, read
from linrope.generation.prompt_state import PromptState
from linrope.generation.sampling import Sampler, Sampling
from linrope.generation.stop_strings import StopStrings
from linrope.models.language_model import LanguageModel

Write = Callable[[str], Any]


class TextWriter:
    """A text under way: `context` is what the model has read of it, what it wrote itself among that.

    It is whole after every token, so that writing may be broken off anywhere.

    Args:
        model: in evaluation mode.
        write: where text goes, piece by piece as it is made.
        context: a text to go on with; None begins a document.
        segment_length: tokens of a prompt that are read at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        write: Write,
        context: PromptState | None = None,
        segment_length: int = SEGMENT_LENGTH,
    ) -> None:
        self.model, self.write, self.context, self.segment_length = model, write, context, segment_length
        self.device = next(model.parameters()).device
        self.tokenizer = require_tokenizer(model, "prompt")
        self.speed = Speed()

    def read(self, text: str) -> None:
        """Read on."""
        tokens = self.tokenizer.encode_prompt(text)
        if self.context is not None:  # the text goes on: no document begins
            tokens = tokens[1:]
        if len(tokens) == 0:
            return
        with self.speed.of("read", len(tokens)):
            tokens = tokens[None].to(self.device)
            self.context = read(self.model, tokens, self.context, segment_length=self.segment_length)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def continue_text(self, max_new_tokens: int, sampler: Sampler, stops: Sequence[str] = ()) -> tuple[str, str]:
        """Write until the document ends, a stop string comes, or so many tokens are there.

        The token that ends a document counts as written, but is not read: what is read next goes on in the same one.

        Returns:
            The text that was shown, and that which was read: a stop string is in the latter only.
        """
        decoder, until = self.tokenizer.decoder(), StopStrings(stops)
        shown: list[str] = []
        kept: list[str] = []

        def show(text: str) -> None:
            shown.append(text)
            self.write(printable(text))

        for _ in range(max_new_tokens):
            with self.speed.of("written", 1):
                token = sampler.draw(self.context)
                if token.item() == self.tokenizer.separator:
                    break
                kept.append(decoder.feed(token))
                show(until.feed(kept[-1]))
                self.context = read(self.model, token[:, None], self.context)
            if until.found is not None:
                break
        kept.append(decoder.finish())
        show(until.finish(kept[-1]))
        return "".join(shown), "".join(kept)


class Speed:
    """Tokens and seconds by what was done with them."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[int, float]] = {}

    @contextmanager
    def of(self, what: str, tokens: int) -> Iterator[None]:
        """The time inside counts for so many tokens, unless it ends with an exception."""
        began = time.perf_counter()
        yield
        before, seconds = self.spent.get(what, (0, 0.0))
        self.spent[what] = before + tokens, seconds + time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(
            f"{tokens:,} tokens {what} ({tokens / seconds:,.0f} per second)"
            for what, (tokens, seconds) in self.spent.items()
        )


def write_sample(write: Write, model: LanguageModel, prompt: str, *, max_new_tokens: int, **sampling: Any) -> None:
    """Writes `prompt` and what `model` adds to it, piece by piece as it is made, up to the end of the document.

    Args:
        write: where the pieces go.
        model: in evaluation mode.
        prompt: what the document begins with.
        max_new_tokens: how many to write at most.
        sampling: the fields of `linrope.generation.sampling.Sampling`.
    """
    writer = TextWriter(model, write)
    write(printable(prompt))
    writer.read(prompt)
    writer.continue_text(max_new_tokens, Sampler(Sampling(**sampling)))
    write("\n")


def require_tokenizer(model: LanguageModel, option: str) -> Tokenizer:
    """The tokenizer that a model was trained with; InputError, for what `option` asks, where nobody has told."""
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


_CONTROL_CHARACTERS = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` with U+FFFD for what would steer a terminal: a model may write any byte."""
    return text.encode("utf-8", errors="replace").decode("utf-8").translate(_CONTROL_CHARACTERS)
