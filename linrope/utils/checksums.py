"""Checksums of a folder's files, in the format of `sha256sum`: `sha256sum -c SHA256SUMS` checks them too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from linrope.errors import InputError
from linrope.utils.files import whole_file

CHECKSUMS_FILE = "SHA256SUMS"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            digest.update(buffer[:n_read])
    return digest.hexdigest()


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files of a folder beside them."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in sorted(names)]
    with whole_file(folder / CHECKSUMS_FILE) as file:
        file.write("".join(lines).encode())


def verify_checksums(folder: Path) -> None:
    """Raise InputError unless the files of a folder are those of its checksums; without checksums, do nothing."""
    sums = folder / CHECKSUMS_FILE
    if not sums.is_file():
        return
    for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition("  ")
        file = folder / name
        if not file.is_file():
            raise InputError(f"{str(file)!r} is missing, {CHECKSUMS_FILE} lists it: save or copy the folder again.")
        if sha256_of(file) != expected:
            raise InputError(
                f"{str(file)!r} is not the file that was saved, by its checksum in {CHECKSUMS_FILE}: it is damaged, "
                "was changed, or a later save was interrupted. Save or copy the folder again; to load it as it is, "
                f"remove {sums}."
            )
