"""A part: the tokens of one unit, in files of the folder `parts`."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from linrope.data.corpus.splits import name_hash
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.jsonlines import BadLine
from linrope.data.prepare.units import Reading, TextChunk, Unit, read_unit
from linrope.data.tokenizers.base import Tokenizer
from linrope.errors import InputError
from linrope.utils.files import whole_file

TOKENS_SUFFIX, BYTES_SUFFIX, RECORD_SUFFIX = ".tokens", ".bytes", ".npz"


def write_part(
    unit: Unit, part: Path, tokenizer: Tokenizer, config: PrepareConfig, count: Callable[[int], None]
) -> None:
    """Tokenize a unit and write its part: tokens, bytes of text of each token, and last the record, which marks the
    part as complete.

    Args:
        unit: what to read.
        part: path of the part's files, without suffix.
        tokenizer: the tokenizer.
        config: `text_field` and `skip_bad_lines` are used.
        count: called with the number of bytes read.

    Raises:
        InputError: a bad line that is not skipped, or text that the tokenizer cannot read; see `read_unit`.
    """
    n_bad = 0

    def bad(where: Callable[[], str], line: BadLine) -> None:
        nonlocal n_bad
        if not config.skip_bad_lines:
            raise InputError(f"{where()} {line}. Fix the line, or skip such lines with --skip_bad_lines.")
        n_bad += 1

    dtype, documents, most_bytes = np.dtype(token_dtype(tokenizer)).newbyteorder("<"), array("q"), 0
    separator = np.array([tokenizer.separator], dtype).tobytes()
    unfinished = [0, 0]  # tokens and bytes of the document that has not ended
    with (
        whole_file(part.with_suffix(TOKENS_SUFFIX)) as tokens_file,
        whole_file(part.with_suffix(BYTES_SUFFIX)) as bytes_file,
    ):
        for chunk in read_unit(unit, Reading(config.text_field, count, bad)):
            tokens, n_bytes = _encode(tokenizer, chunk)
            tokens_file.write(tokens.astype(dtype).tobytes() + (separator if chunk.ends else b""))
            if n_bytes is not None:
                bytes_file.write(n_bytes.astype("<u4").tobytes() + (bytes(4) if chunk.ends else b""))
                most_bytes = max(most_bytes, int(n_bytes.max(initial=0)))
            unfinished = [unfinished[0] + len(tokens), unfinished[1] + len(chunk.data)]
            if chunk.ends:
                documents.extend((*unfinished, name_hash(chunk.name), True))
                unfinished = [0, 0]
        if any(unfinished):  # the document continues in the next part
            documents.extend((*unfinished, name_hash(chunk.name), False))
    with whole_file(record_of(part)) as file:
        np.savez(file, documents=np.array(documents).reshape(-1, 4), n_bad=n_bad, most_bytes=most_bytes)


def _encode(tokenizer: Tokenizer, chunk: TextChunk) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        return tokenizer.encode_document(chunk.data)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{chunk.where} is not UTF-8 (byte {error.start} from there), which --tokenizer needs: convert it, or use "
            "the tokenizer bytes."
        ) from error
    except ValueError as error:
        raise InputError(f"{chunk.where} cannot be tokenized: {error}. Remove it.") from error


def token_dtype(tokenizer: Tokenizer) -> str:
    """The smallest dtype of tokens: "uint16" or "uint32"."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def record_of(part: Path) -> Path:
    """The file that says what a part holds: documents (n, 4) of tokens, bytes, hash of the name, whether it ends here;
    the number of bad lines; the most bytes of a token."""
    return part.with_suffix(RECORD_SUFFIX)
