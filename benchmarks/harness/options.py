"""Options of the benchmarks' commands: types and checks that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from linrope import LanguageModel
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.data.tokenizers.bytes import VOCAB_SIZE, ByteTokenizer
from linrope.errors import InputError, suggest
from linrope.utils import formatting


def parse_bytes(text: str) -> int:
    """The argparse type of a number of bytes: "4GiB", "500 MB" or "1000"."""
    try:
        return formatting.parse_bytes(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace, from_zero: Iterable[str]) -> None:
    """Exit with an error unless every number, also in lists, is above 0; for the options `from_zero`, 0 or more."""
    for name, value in vars(options).items():
        for number in value if isinstance(value, list) else [value]:
            if type(number) in (int, float) and (number < 0 or (number == 0 and name not in from_zero)):
                parser.error(f"--{name} {number}: must be {'0 or more' if name in from_zero else 'above 0'}")


def check_even(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
    """Exit with an error unless the size can be divided into RoPE's pairs."""
    if getattr(options, name) % 2:
        parser.error(f"--{name} {getattr(options, name)}: must be even, because RoPE rotates pairs")


def check_heads(parser: argparse.ArgumentParser, options: argparse.Namespace, multiple: int = 2) -> None:
    """Exit with an error unless heads have a size that RoPE takes: even, or a multiple of 4 if half of it rotates."""
    if options.d_model % (multiple * options.heads):
        heads = f"--heads {options.heads}"
        parser.error(f"{heads}: --d_model {options.d_model} must be a multiple of {multiple} times it, for RoPE")


def check_names(parser: argparse.ArgumentParser, option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Exit with an error unless every name is known."""
    known = list(known)
    for name in names:
        if name not in known:
            parser.error(f"{option} {name}: unknown.{suggest(name, known)} There are {', '.join(known)}")


def read_byte_model(parser: argparse.ArgumentParser, path: Path, option: str, longest: int) -> LanguageModel:
    """The trained model of `--model PATH`, or exit with an error: there is none, its tokens are not bytes, or it has
    positions for rows shorter than `longest`, which `option` asks for."""
    try:
        model = LanguageModel.from_pretrained(path)
    except InputError as error:
        parser.error(f"--model: {error}")
    tokenizer = tokenizer_from_serialized(model.tokenizer)
    if model.config.vocab_size < VOCAB_SIZE or not isinstance(tokenizer, ByteTokenizer):
        parser.error(f"--model {path}: its tokens must be bytes, with a vocabulary of {VOCAB_SIZE} or more")
    fits = model.config.positions.longest_row
    if fits is not None and longest > fits:
        parser.error(f"{option}: reads rows of {longest:,} tokens, and --model {path} has positions for {fits:,}")
    return model
