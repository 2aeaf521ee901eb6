"""Data from LibreOffice's help, of small pages."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.experiments.help_texts import Pair, labelled, main, pairs_of, paragraphs_of, split_of

SYSTEMS = (
    '<span id="swlnsys1" class="switchinline"><span hidden="true" id="MAC1" class="MAC"><span class="emph">{0}</span>'
)
SYSTEMS += '</span><span hidden="true" id="default1">{1}</span></span>'
PROGRAMS = (
    '<span class="switchinline"><span hidden="true" id="CALC1">{0}</span><span hidden="true" id="MATH1">{1}</span>'
)
PROGRAMS += "</span>"


def write_pages(folder: Path, pages: dict[str, list[tuple[str, str, str]]]) -> Path:
    """The help in a folder, as the packages have it: of each page the (id, English, German) of its paragraphs."""
    for name, paragraphs in pages.items():
        for number, language in enumerate(("en-US", "de"), start=1):
            path = folder / "usr/share/libreoffice/help" / language / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f'<p id="{row[0]}" class="paragraph">{row[number]}</p>\n' for row in paragraphs))
    return folder


def read(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1]


def test_paragraphs_have_plain_text_and_the_default_of_each_switch():
    parts = [
        '<header><p id="one">Help</p><p>no id</p></header><h2 id="two" dir="auto">A &amp; B</h2>',
        '<p id="three">\n Choose\xa0 <span class="emph">Tools\t- <i>Opt\xadions</i></span><br>now.<img></p> tail',
        f'<p id="four">Press {SYSTEMS.format("Command", "Ctrl")}+F or {PROGRAMS.format("cell", "root")}.</p>',
        '<p id="one">twice</p>',
        '<span class="switch"><span hidden="true" id="CALC2"><p id="five">inside</p></span></span>',
        '<p id="six">without an end <span class="emph">of its span',
    ]
    assert paragraphs_of("".join(parts)) == {
        "two": "A & B",
        "three": "Choose Tools - Options now.",
        "four": "Press Ctrl+F or cell.",
        "five": "inside",
        "six": "without an end of its span",
    }


def test_pairs_are_translated_paragraphs_of_the_same_id():
    english = '<p id="a">one</p><p id="b">OK</p><p id="c"> </p><p id="d">four</p><p id="e">five</p>'
    german = '<p id="d">vier</p><p id="b">OK</p><p id="c">drei</p><p id="a">eins</p><p id="e"></p><p id="f">sechs</p>'
    assert list(pairs_of(english, german)) == [Pair("one", "eins"), Pair("four", "vier")]


@pytest.mark.parametrize("inside", ["", "usr", "usr/share/libreoffice/help"])
def test_pages_are_split_by_name_and_no_text_is_in_two_splits(inside, tmp_path, capsys):
    pages = {
        f"text/{n}.html": [("p1", f"page {n}", f"Seite {n}"), ("p2", f"the same {n % 7}", f"dasselbe {n}")]
        for n in range(100)
    }
    folder = write_pages(tmp_path, pages)
    (folder / "usr/share/libreoffice/help/en-US/only.html").write_text('<p id="p1">no German page</p>')
    assert main(["--packages", str(folder / inside), "--output", str(tmp_path / "help")]) == 0
    out = capsys.readouterr().out
    first = {f"the same {n % 7}": n for n in sorted(range(100), key=str, reverse=True)}  # pages are read by name
    for split in ("train", "val", "test"):
        rows = list(zip(read(tmp_path / f"help/{split}.en"), read(tmp_path / f"help/{split}.de"), strict=True))
        numbers = [n for n in sorted(range(100), key=lambda n: f"{n}.html") if split_of(f"text/{n}.html") == split]
        expected = []
        for n in numbers:
            expected.append((f"page {n}", f"Seite {n}"))
            if first[f"the same {n % 7}"] == n:
                expected.append((f"the same {n % 7}", f"dasselbe {n}"))
        assert rows == expected
        assert rows
        assert [f"{len(numbers)}", f"{len(rows)}"] == next(li for li in out.splitlines() if split in li).split()[1:3]


def test_half_of_the_sentence_pairs_are_false_with_german_of_similar_length(tmp_path):
    pairs = [Pair(f"number {n}", f"Nummer {n} " + "x" * (3 * n % 101)) for n in range(101)]
    rows, german = labelled(pairs, "0 val"), [pair.de for pair in pairs]
    assert [row[0] for row in rows] == [pair.en for pair in pairs]
    assert Counter(label for _, _, label in rows) == {0: 50, 1: 51}
    by_length = sorted(german, key=len)
    for (_, other, label), pair in zip(rows, pairs, strict=True):
        assert (other == pair.de) == bool(label)
        assert abs(by_length.index(other) - by_length.index(pair.de)) <= 10
    assert labelled(pairs, "0 val") == rows != labelled(pairs, "1 val")
    assert labelled(pairs[:1], "0 val") == [("number 0", "Nummer 0 ", 1)]


def test_the_table_of_sentence_pairs_has_a_header_and_no_quotes(tmp_path):
    name = next(f"{n}.html" for n in range(100) if split_of(f"{n}.html") == "train")
    pages = {name: [("a", 'the "one"\tof\nall', "die „eine“ von allen"), ("b", "two", "zwei"), ("c", "three", "drei")]}
    folder = write_pages(tmp_path, pages)
    assert main(["--packages", str(folder), "--output", str(tmp_path / "help")]) == 0
    header, *rows = (line.split("\t") for line in read(tmp_path / "help/train.tsv"))
    assert header == ["text", "pair", "label"]
    assert [row[0] for row in rows] == ['the "one" of all', "two", "three"]
    assert sorted(row[2] for row in rows) == ["0", "1", "1"]
    assert read(tmp_path / "help/val.tsv") == ["text\tpair\tlabel"]


def test_missing_packages_are_named_with_the_way_to_get_them(tmp_path, capsys):
    def refused(packages: Path, output: Path) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["--packages", str(packages), "--output", str(output)])
        assert exit_.value.code == 2
        return capsys.readouterr().err

    output = tmp_path / "help"
    said = refused(tmp_path, output)
    assert f"{tmp_path / 'usr/share/libreoffice/help/en-US'} is missing" in said
    assert "apt-get download libreoffice-help-en-us libreoffice-help-de" in said
    folder = write_pages(tmp_path, {"a.html": [("p", "the same", "the same")]})
    assert "has no paragraph in both languages" in refused(folder, output)
    (folder / "usr/share/libreoffice/help/de/a.html").unlink()
    assert f"{folder / 'usr/share/libreoffice/help/de'} is missing" in refused(folder, output)
    write_pages(tmp_path, {"a.html": [("p", "one", "eins")]})
    (tmp_path / "file").touch()
    assert "--output" in refused(folder, tmp_path / "file" / "help")
