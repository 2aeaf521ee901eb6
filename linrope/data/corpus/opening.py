"""Open `data.path`, or the path of a split: text files, a folder of `linrope prepare`, or a flat file of tokens."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from linrope.data.corpus.files import Sources, find_sources, require_short
from linrope.data.corpus.sequences import TokenSequence
from linrope.data.corpus.splits import SPLITS, Pieces, cut_by_position, split_bounds, split_corpus, split_documents
from linrope.data.corpus.token_files import NumberFile, PreparedCorpus, TokenRun, survey
from linrope.data.prepare.manifest import DOCUMENTS, LOCK, MANIFEST, PARTS, TEXT_BYTES, TOKENIZER, TOKENS, Manifest
from linrope.data.tokenizers.base import Tokenizer, open_tokenizer
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.errors import InputError


@dataclass(frozen=True)
class OpenedText:
    """A corpus for each split, and its tokenizer."""

    corpora: dict[str, TokenSequence]
    tokenizer: Tokenizer | None
    """None if unknown."""
    vocab_size: int
    """The smallest vocabulary of a model for this text."""
    reason: str
    """What determines `vocab_size`, for error messages."""
    origin: str
    """Where the text comes from, as people read it."""
    n_skipped: int
    """Number of skipped files: binary, empty or unreadable."""
    why_cut: str | None = None
    """Why several documents were cut by position, as people read it; None if they were not."""
    place: Path | None = None
    """The folder that the names of text files are relative to, or the only file, without links; None of tokens."""
    own_origins: dict[str, str] = field(default_factory=dict)
    """Where the text of a split comes from that has a text of its own."""


def open_text(
    path: str | Path | None,
    fractions: Sequence[float],
    tokenizer: str | None = None,
    token_dtype: str = "uint16",
    split: str | None = None,
    verify: bool = True,
    option: str = "data.path",
) -> OpenedText:
    """The train, val and test corpora under a path.

    Args:
        path: text (see `find_sources`), a prepared folder, or a flat file whose name ends in ".bin".
        fractions: of train, val and test.
        tokenizer: "bytes" or the path of a tokenizer.json. None: bytes for text, its own tokenizer for a prepared
            folder, unknown for a flat file.
        token_dtype: dtype of a flat file, uint16 or uint32.
        split: "document", "position" or None: see `split_documents`. A flat file is always cut by position.
        verify: read a prepared folder's files once, to compare their checksums.
        option: the option with the path, for error messages.

    Raises InputError for no text there, a damaged file, or a tokenizer other than that of the tokens.
    """
    given = None if tokenizer is None else open_tokenizer(tokenizer, "data.tokenizer")
    folder = None if path is None else Path(path).expanduser()
    if folder is not None:
        require_short(folder / MANIFEST, option)
    if folder is not None and (folder / MANIFEST).is_file():
        return _open_prepared(folder, fractions, given, split, verify, option)
    if folder is not None and (folder / PARTS / LOCK).is_file():
        raise InputError(
            f"{option}={str(folder)!r} is not completely prepared: run the same `linrope prepare` again; it continues "
            "where it stopped."
        )
    if folder is not None and folder.suffix == ".bin" and folder.is_file():
        return _open_flat(folder, fractions, given, token_dtype)
    if given is not None and given.fingerprint is not None:
        raise InputError(
            f"data.tokenizer={tokenizer!r} tokenizes text once, before training: linrope prepare --path "
            f"{'PATH' if path is None else shlex.quote(str(path))} --tokenizer {shlex.quote(tokenizer)} "
            f"--output FOLDER, then {option}: FOLDER."
        )
    sources, tokens = find_sources(path, option), ByteTokenizer()
    corpora, why = split_corpus(sources, fractions, split)
    reason = "bytes and a separator"
    origin, n_skipped, place = sources.origin, sources.n_skipped, _place_of(sources)
    return OpenedText(corpora, tokens, tokens.vocab_size, reason, origin, n_skipped, why, place)


def open_whole(split: str, path: Path, tokenizer: str | None, token_dtype: str, verify: bool) -> OpenedText:
    """The whole text of `data.val_path` or `data.test_path`, as the only corpus; arguments are those of `open_text`."""
    text = open_text(path, (1.0, 0.0, 0.0), tokenizer, token_dtype, None, verify, f"data.{split}_path")
    return replace(text, corpora={split: text.corpora["train"]}, why_cut=None, own_origins={split: text.origin})


def with_own_text(opened: OpenedText, split: str, whole: OpenedText, path: Path) -> OpenedText:
    """A text whose split is a `whole` one, of `path`. InputError for another tokenizer, or files of both."""
    where, corpus = f"data.{split}_path={str(path)!r}", whole.corpora[split]
    both = opened.tokenizer, whole.tokenizer
    ours, others = ("an unknown one" if one is None else one.fingerprint or one.name for one in both)
    if ours != others:
        raise InputError(
            f"{where} holds tokens of another tokenizer ({others}) than data.path ({ours}): prepare both with one "
            "(linrope prepare --tokenizer), and set data.tokenizer for .bin files."
        )
    of_path = (one.files() for name, one in opened.corpora.items() if name not in opened.own_origins)
    if shared := sorted(corpus.files() & set().union(*of_path)):
        raise InputError(
            f"{where} is part of data.path ({shared[0]}), which is for training: give data.path a file, a folder or a "
            "glob without it."
        )
    vocab_size, reason = max((text.vocab_size, text.reason) for text in (opened, whole))
    return replace(
        opened,
        corpora={**opened.corpora, split: corpus},
        vocab_size=vocab_size,
        reason=reason,
        n_skipped=opened.n_skipped + whole.n_skipped,
        own_origins={**opened.own_origins, **whole.own_origins},
    )


def _place_of(sources: Sources) -> Path:
    first = sources.documents[0]
    root = first.path.parents[len(Path(first.name).parts) - 1]
    return (first.path if len(sources.documents) == 1 else root).resolve()


def _open_prepared(
    folder: Path, fractions: Sequence[float], given: Tokenizer | None, split: str | None, verify: bool, option: str
) -> OpenedText:
    manifest = Manifest.read(folder)
    own = open_tokenizer("bytes" if manifest.tokenizer == "bytes" else str(folder / TOKENIZER), f"{folder}: tokenizer")
    if (own.fingerprint or own.name) != manifest.plan.get("tokenizer"):
        raise InputError(f"{folder / TOKENIZER} is not the one that {folder} was prepared with: prepare it again.")
    if given is not None and given.fingerprint != own.fingerprint:
        raise InputError(
            f"data.tokenizer is another one than {option}={str(folder)!r} was prepared with: omit it, or prepare the "
            "text again with it."
        )
    documents, tokens, text_bytes = _prepared_files(folder, manifest, option)
    if verify:
        _verify(folder, manifest, documents, tokens, text_bytes, option)
    starts, sizes, n_bytes, hashes = documents.T
    parts, why = split_documents(sizes, hashes, fractions, split)
    corpora = {}
    for name, pieces in zip(SPLITS, parts, strict=True):
        firsts, n_tokens = starts[pieces.numbers] + pieces.first, pieces.last - pieces.first
        in_all = _bytes_of(pieces, firsts, n_bytes, sizes, text_bytes)
        corpora[name] = PreparedCorpus(
            tokens, text_bytes, firsts, n_tokens, in_all, own.separator, manifest.fingerprint
        )
    reason = f"the tokenizer of {folder}"
    origin = f"{folder}, of {manifest.origin}"
    return OpenedText(corpora, own, own.vocab_size, reason, origin, manifest.n_skipped_files, why)


def _prepared_files(folder: Path, manifest: Manifest, option: str) -> tuple[np.ndarray, NumberFile, NumberFile | None]:
    """The table of documents, the tokens, and the tokens' bytes of text. InputError if they are damaged."""
    try:
        documents = np.load(folder / DOCUMENTS, allow_pickle=False)
        tokens = NumberFile.of_size(folder / TOKENS, manifest.token_dtype, manifest.vocab_size)
        dtype = manifest.text_bytes_dtype
        text_bytes = None if dtype is None else NumberFile.of_size(folder / TEXT_BYTES, dtype)
    except Exception as error:  # NumPy has many for a damaged header
        raise InputError(f"{option}={str(folder)!r} is damaged ({error}): prepare it again.") from error
    expected = manifest.n_tokens + manifest.n_documents + manifest.n_empty  # each document has a separator
    whole = documents.shape == (manifest.n_documents, 4) and documents[:, 1].sum() == manifest.n_tokens
    if not (whole and tokens.n == expected and (text_bytes is None or text_bytes.n == expected)):
        raise InputError(
            f"{option}={str(folder)!r} is damaged: it holds {tokens.n:,} tokens and {len(documents):,} documents, "
            f"where {MANIFEST} says {expected:,} and {manifest.n_documents:,}. Prepare it again."
        )
    return documents, tokens, text_bytes


def _verify(
    folder: Path,
    manifest: Manifest,
    documents: np.ndarray,
    tokens: NumberFile,
    text_bytes: NumberFile | None,
    option: str,
) -> None:
    """Raise InputError unless the files of a prepared folder are those that its manifest has checksums of."""
    digest = hashlib.blake2b(manifest.plan["tokenizer"].encode(), digest_size=16)
    for _, numbers in tokens.chunks():
        digest.update(numbers.data)
    digest.update(documents.data)
    changed = [] if digest.hexdigest() == manifest.fingerprint else [f"{TOKENS} or {DOCUMENTS}"]
    if text_bytes is not None:
        digest = hashlib.blake2b(digest_size=16)
        for _, numbers in text_bytes.chunks():
            digest.update(numbers.data)
        changed += [] if digest.hexdigest() == manifest.text_bytes_checksum else [TEXT_BYTES]
    if changed:
        raise InputError(
            f"{option}={str(folder)!r} is damaged: {' and '.join(changed)} changed after `linrope prepare` wrote it "
            "(the checksum differs). Prepare it again."
        )


def _bytes_of(
    pieces: Pieces, firsts: np.ndarray, n_bytes: np.ndarray, sizes: np.ndarray, text_bytes: NumberFile | None
) -> int:
    """Bytes of text of pieces that start at the tokens `firsts`; `n_bytes` and `sizes` are those of whole documents."""
    n_tokens = pieces.last - pieces.first
    if text_bytes is None:
        return int(n_tokens.sum())
    whole = n_tokens == sizes[pieces.numbers]
    cut = zip(firsts[~whole].tolist(), n_tokens[~whole].tolist(), strict=True)  # at most two
    chunks = (numbers for first, n in cut for _, numbers in text_bytes.chunks(first, first + n))
    return int(n_bytes[pieces.numbers[whole]].sum()) + sum(int(numbers.sum(dtype=np.int64)) for numbers in chunks)


def _open_flat(path: Path, fractions: Sequence[float], tokenizer: Tokenizer | None, token_dtype: str) -> OpenedText:
    file = NumberFile.of_size(path, token_dtype, None if tokenizer is None else tokenizer.vocab_size)
    cuts = list(cut_by_position(file.n, split_bounds(fractions)))
    separator, bytes_of = (None, None) if tokenizer is None else (tokenizer.separator, tokenizer.token_bytes())
    found = survey(file, cuts, separator, bytes_of)
    corpora = {
        split: TokenRun(file, *cut, found, separator, bytes_of, n_bytes)
        for split, cut, n_bytes in zip(SPLITS, cuts, found.n_bytes, strict=True)
    }
    vocab_size, reason = found.highest + 1, f"{path} holds {found.highest:,} at position {found.position:,}"
    if tokenizer is not None:
        vocab_size, reason = tokenizer.vocab_size, "data.tokenizer"
    return OpenedText(corpora, tokenizer, vocab_size, reason, str(path), 0)
