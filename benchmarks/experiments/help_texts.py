"""English–German data from the help of LibreOffice: files for translation, and for the task "is this its translation?".

    apt-get download libreoffice-help-en-us libreoffice-help-de        # Debian and Ubuntu; or install them
    for package in libreoffice-help-*.deb; do dpkg-deb -x "$package" packages; done
    python -m benchmarks.help_texts --packages packages --output help

The help pages of both languages are HTML files of the same names, whose paragraphs have the same ids. A pair is an id
that one paragraph of the page has in each language. Empty and untranslated pairs are dropped, and so is a pair whose
English or German an earlier one has: no text is in two splits. Pages are split into train, val and test by a hash of
their names, so that the split is the same everywhere. Of texts that differ by system or program ("Cmd" and "Ctrl") the
default is kept. The output has

    train.en, train.de, …    one paragraph a line; line n of both is a pair
    train.tsv, …             columns text (English), pair (German) and label: 1 for a translation, 0 for the German of
                             another pair of the split, of about the same length; half of the rows each
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from linrope.data.corpus.splits import HASH_BITS, SPLITS, name_hash
from linrope.errors import InputError
from linrope.evaluation.reports import make_folder
from linrope.utils.files import whole_file
from linrope.utils.terminal import new_table

LANGUAGES = {"en": "en-US", "de": "de"}
"""Endings of the files written, and the folders of the help."""
HELP_FOLDERS = ("usr/share/libreoffice/help", "share/libreoffice/help", ".")
"""Where the help may lie in the folder of --packages."""
SOFT_HYPHEN = "\xad"
BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
ENDS = (0.9, 0.95, 1.0)
"""The shares of pages at which train, val and test end."""
NEIGHBOURS = 10
"""A false pair has the German of one of the so many pairs of next length on either side."""
MISSING = """{path} is missing: --packages must be a folder with LibreOffice's help in English and German. On Debian:
  apt-get download libreoffice-help-en-us libreoffice-help-de
  for package in libreoffice-help-*.deb; do dpkg-deb -x "$package" packages; done
and then --packages packages; or install both packages, for which --packages is not needed."""


@dataclass(frozen=True)
class Pair:
    """A paragraph in English and in German, without line ends and tabs."""

    en: str
    de: str


@dataclass
class Part:
    """An open paragraph, or an open span in one. A switch holds one text for each system or program; of these the
    default is kept, or the first if there is none."""

    is_switch: bool = False
    is_default: bool = False
    text: str = ""
    variants: list[Part] = field(default_factory=list)

    def whole(self) -> str:
        kept = next((part for part in self.variants if part.is_default), None) or next(iter(self.variants), None)
        return self.text if kept is None else self.text + kept.text


class Paragraphs(HTMLParser):
    """The paragraphs and headings of a page that have an id: `found` lists (id, text) in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._id: str | None = None
        self._open: list[Part] = []  # the paragraph and the spans in it; empty between paragraphs

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        if tag in BLOCKS:
            self._finish()
            self._id, self._open = named.get("id"), [Part()]
        elif tag == "span" and self._open:
            self._open.append(Part("switch" in named.get("class", ""), named.get("id", "").startswith("default")))
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self._finish()
        elif tag == "span" and len(self._open) > 1:
            self._close_span()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data

    def close(self) -> None:
        super().close()
        self._finish()

    def _close_span(self) -> None:
        span = self._open.pop()
        if self._open[-1].is_switch:
            self._open[-1].variants.append(Part(is_default=span.is_default, text=span.whole()))
        else:
            self._open[-1].text += span.whole()

    def _finish(self) -> None:
        while len(self._open) > 1:
            self._close_span()
        if self._id is not None:
            self.found.append((self._id, " ".join(self._open[0].text.replace(SOFT_HYPHEN, "").split())))
        self._id, self._open = None, []


def paragraphs_of(page: str) -> dict[str, str]:
    """The text of each id that one paragraph of the HTML page has, white space as single spaces."""
    parser = Paragraphs()
    parser.feed(page)
    parser.close()
    times = Counter(name for name, _ in parser.found)
    return {name: text for name, text in parser.found if times[name] == 1}


def pairs_of(english: str, german: str) -> Iterator[Pair]:
    """The pairs of two HTML pages: ids of both, in the order of the English one, with text that is translated."""
    of_german = paragraphs_of(german)
    for name, text in paragraphs_of(english).items():
        other = of_german.get(name, "")
        if text and other and text != other:
            yield Pair(text, other)


def split_of(page: str) -> str:
    """The split of a page, from a hash of its name."""
    share = name_hash(page) / 2**HASH_BITS
    return next(split for split, end in zip(SPLITS, ENDS, strict=True) if share < end)


def read_pairs(folder: Path) -> tuple[dict[str, list[Pair]], Counter[str]]:
    """The pairs of each split, and its number of pages, of the help in a folder with one folder for each language."""
    english, german = (folder / language for language in LANGUAGES.values())
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    pages: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()  # (language, text)
    for path in sorted(english.rglob("*.html")):
        page = path.relative_to(english).as_posix()
        if not (german / page).is_file():
            continue
        found = pairs_of(path.read_text(encoding="utf-8"), (german / page).read_text(encoding="utf-8"))
        for pair in found:
            texts = {("en", pair.en), ("de", pair.de)}
            if seen.isdisjoint(texts):
                pairs[split_of(page)].append(pair)
                seen |= texts
        pages[split_of(page)] += 1
    return pairs, pages


def labelled(pairs: Sequence[Pair], seed: str) -> list[tuple[str, str, int]]:
    """(English, German, label) of every pair, in order; half of them, drawn from `seed`, are false and have label 0.

    A false pair has the German of another pair, drawn from the 2 · NEIGHBOURS that are next to it in the length of
    their German. A single pair stays true. All texts of `pairs` differ.
    """
    draw = random.Random(seed)
    by_length = sorted(range(len(pairs)), key=lambda number: len(pairs[number].de))
    place = {number: at for at, number in enumerate(by_length)}
    false = set(draw.sample(range(len(pairs)), len(pairs) // 2))
    rows = []
    for number, pair in enumerate(pairs):
        first = max(0, place[number] - NEIGHBOURS)
        others = [other for other in by_length[first : place[number] + NEIGHBOURS + 1] if other != number]
        german = pairs[draw.choice(others)].de if number in false else pair.de
        rows.append((pair.en, german, int(number not in false)))
    return rows


def write(folder: Path, split: str, pairs: Sequence[Pair], seed: int) -> list[Path]:
    """Writes the three files of a split."""
    rows = [("text", "pair", "label"), *labelled(pairs, f"{seed} {split}")]
    contents = {
        "en": [pair.en for pair in pairs],
        "de": [pair.de for pair in pairs],
        "tsv": ["\t".join(map(str, row)) for row in rows],
    }
    written = []
    for ending, lines in contents.items():
        written.append(folder / f"{split}.{ending}")
        with whole_file(written[-1]) as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
    return written


def help_folder(parser: argparse.ArgumentParser, packages: Path) -> Path:
    """The folder of the help in that of the packages, or exit with an error that says how to get them."""
    places = [packages / name for name in HELP_FOLDERS]
    place = next((place for place in places if (place / LANGUAGES["en"]).is_dir()), places[0])
    for language in LANGUAGES.values():
        if next((place / language).rglob("*.html"), None) is None:
            parser.error(MISSING.format(path=place / language))
    return place


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.help_texts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    packages_help = "folder of the unpacked packages, or the help folder itself (default: /, where they are installed)"
    parser.add_argument("--packages", type=Path, default=Path("/"), help=packages_help)
    parser.add_argument("--seed", type=int, default=0, help="decides the false pairs (default: 0)")
    options = parser.parse_args(args)
    help_texts = help_folder(parser, options.packages)
    try:
        folder = make_folder("--output", options.output)
    except InputError as error:
        parser.error(str(error))
    pairs, pages = read_pairs(help_texts)
    if not any(pairs.values()):
        parser.error(f"{help_texts} has no paragraph in both languages: are the packages of the same version?")
    table = new_table("LibreOffice help", "pages", "pairs", "English words", "German words", text=["split"])
    written = []
    for split, own in pairs.items():
        written += write(folder, split, own, options.seed)
        words = [sum(len(text.split()) for text in texts) for texts in ([p.en for p in own], [p.de for p in own])]
        table.add_row(split, *(f"{n:,}" for n in (pages[split], len(own), *words)))
    console = Console(highlight=False)
    console.print(table)
    console.print("wrote", *map(str, written), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
