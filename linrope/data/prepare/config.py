"""The options of a preparation."""

from __future__ import annotations

from dataclasses import dataclass

from linrope.errors import InputError, require_not_empty

MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The text to tokenize, the tokenizer, and the folder to write."""

    output: str
    """Folder to write, for data.path. It must be new or empty."""
    path: str | None = None
    """A file, a folder or a glob of text, which may not be compressed, and of JSON lines (.jsonl and .ndjson, .json of
    that form, each also with .gz or .zst). Without --path and --dataset: the built-in corpus."""
    dataset: str | None = None
    """Dataset of Hugging Face's `datasets`, by name or folder (of Parquet, or of save_to_disk), instead of --path. It
    is read as a stream. Changes of the dataset after this run are not detected."""
    dataset_config: str | None = None
    """Configuration of the dataset, if it has several."""
    dataset_split: str = "train"
    """Split of the dataset."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    text_field: str = "text"
    """Field with the text, in JSON lines and datasets."""
    skip_bad_lines: bool = False
    """Skip and count lines without text in that field; otherwise such a line is an error."""
    workers: int | None = None
    """Number of processes; null for one per CPU core."""

    def __post_init__(self) -> None:
        if self.workers is not None and not 1 <= self.workers <= MOST_WORKERS:
            raise InputError(f"--workers={self.workers} must be 1 to {MOST_WORKERS}, or null for one per CPU core.")
        require_not_empty("--path", self.path)
        if self.path is not None and self.dataset is not None:
            raise InputError(f"--path={self.path!r} and --dataset={self.dataset!r} exclude each other: give one.")
