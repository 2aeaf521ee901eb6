import errno
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.corpus.splits import cut_by_position, split_bounds, split_corpus
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"b.txt": b"bb", "a.txt": b"aaa", "sub/c.txt": b"c", "empty.txt": b"", "image.bin": b"x\0y"}
    files |= {".hidden": b"h", ".git/objects": b"g", "sub/.secret": b"s"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def names(path) -> list[str]:
    return [document.name for document in find_sources(path).documents]


def test_a_folder_a_glob_and_a_file_yield_their_text_files_in_order(folder):
    assert names(folder) == ["a.txt", "b.txt", "sub/c.txt"]
    assert find_sources(folder).n_skipped == 2  # the empty and the binary one; hidden ones are not looked at
    assert names(folder / "*.txt") == ["a.txt", "b.txt"]
    assert names(folder / "**" / "*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(folder / "b.txt") == ["b.txt"]


def test_folders_of_runs_are_no_text(folder):
    for name, file in (("version_3", "config.yaml"), ("version_4", "text.txt"), ("versions", "config.yaml")):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / file).write_text("task: language_modeling")
    kept = ["runs/version_4/text.txt", "runs/versions/config.yaml"]
    assert names(folder) == ["a.txt", "b.txt", *kept, "sub/c.txt"]
    assert names(folder / "**" / "*.yaml") == ["runs/versions/config.yaml"]


def test_folders_of_tokens_and_saved_datasets_are_no_text(folder):
    for name, content in {
        "mine/linrope-corpus.json": "{}",
        "mine/tokenizer.json": "{}",
        "begun/parts/linrope-lock": "lock",
        "begun/parts/1.json": "{}",
        "saved/state.json": '{"_data_files": []}',
        "saved/README.md": "r",
        "splits/dataset_dict.json": '{"splits": ["train"]}',
        "splits/train/state.json": '{"_data_files": []}',
        "parts/state.json": '{"a": 1}',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    assert names(folder) == names(folder / "**") == ["a.txt", "b.txt", "parts/state.json", "sub/c.txt"]
    for name, message in [
        (
            "mine",
            r"holds no text: .*/mine holds tokens of `linrope prepare`: give it as data\.path of a language",
        ),
        ("mine/*", r"mine holds tokens of `linrope prepare`"),
        ("begun", r"begun holds tokens of `linrope prepare`"),
        ("saved", r"saved is of save_to_disk: read it with linrope prepare --dataset .*saved --output FOLDER\."),
        ("splits", r"splits(/train)? is of save_to_disk"),
    ]:
        with pytest.raises(InputError, match=message):
            find_sources(folder / name)
    assert names(folder / "saved/README.md") == names(folder / "saved/*") == ["README.md"]  # asked for by name
    assert names(folder / "*/**/*.txt") == ["sub/c.txt"]  # beside files


def test_folders_that_cannot_be_read_are_counted_and_an_error_of_the_disk_ends_the_search(folder, monkeypatch):
    (folder / "locked").mkdir()
    reasons = {"sub": errno.ENOENT, "locked": errno.EACCES}
    scandir = os.scandir

    def listing(path: Path):
        if path.name in reasons:  # the user of these tests may be root, who may read all
            raise OSError(reasons[path.name], "no")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listing)
    with pytest.warns(UserWarning, match=r"data\.path='.*': folders that cannot be read are skipped \(2, the first /"):
        found = find_sources(folder)
    assert [document.name for document in found.documents] == ["a.txt", "b.txt"]
    assert found.n_skipped == 4
    reasons["sub"] = errno.EIO
    with pytest.raises(InputError, match=r"sub cannot be listed \(no\), so that its text would be missing"):
        find_sources(folder)


def test_a_json_file_of_one_value_is_text(tmp_path):
    (tmp_path / "line.json").write_text('{"a": 1}\n')
    (tmp_path / "lines.json").write_text('{\n"a": 1\n}\n')
    (tmp_path / "damaged.json.gz").write_bytes(b"\x1f\x8b\0")
    (tmp_path / "damaged.json.zst").write_bytes(b"\x28\xb5\x2f\xfd\0")
    assert names(tmp_path) == ["line.json", "lines.json"]


def test_links_are_followed_and_each_real_file_counts_once(folder):
    outside = folder.with_name(f"{folder.name}-outside")
    outside.mkdir()
    (outside / "o.txt").write_text("o")
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "sub" / "here").symlink_to(folder / "sub")
    (folder / "again").symlink_to(folder / "sub")
    (folder / "0.txt").symlink_to(folder / "b.txt")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    (folder / "circle.txt").symlink_to(folder / "circle.txt")
    for name in ("out", "out2"):
        (folder / "sub" / name).symlink_to(outside)
    assert names(folder) == ["a.txt", "b.txt", "sub/c.txt", "sub/out/o.txt"]
    assert find_sources(folder).n_skipped == 4  # with the links to nothing
    assert names(folder / "**" / "*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/out/o.txt"]
    assert names(folder / "*.txt") == ["a.txt", "b.txt"]
    assert names(folder / "*" / "*.txt") == ["sub/c.txt"]
    assert names(folder / "**") == names(folder / "**" / "**" / "*") == names(folder)


def test_a_link_that_is_named_json_lines_counts_before_the_file_it_leads_to(tmp_path):
    """As in the cache of a Hugging Face dataset."""
    for name in ("blobs", "snapshots/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "blobs" / "0a1b").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "snapshots" / "1" / "train.JSONL").symlink_to("../../blobs/0a1b")
    found = find_sources(tmp_path, json_lines=True).documents
    assert [document.name for document in found] == ["snapshots/1/train.JSONL"]
    with pytest.raises(InputError, match="holds JSON lines"):
        find_sources(tmp_path)


def test_folders_that_link_to_each_other_do_not_multiply_their_text(tmp_path):
    folders = [tmp_path / f"{number}" for number in range(9)]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text(folder.name)
    for folder in folders:
        for other in folders:
            (folder / f"to{other.name}").symlink_to(other)
    expected = [f"{number}/a.txt" for number in range(9)]
    assert names(tmp_path) == names(tmp_path / "**" / "*.txt") == expected
    assert names(folders[0]) == ["a.txt", *(f"to{number}/a.txt" for number in range(1, 9))]


def test_thousands_of_nested_folders_pipes_and_devices_do_not_stop_the_search(tmp_path):
    nested, inner = tmp_path / "nested", tmp_path / "nested"
    nested.mkdir()
    for _ in range(1010):  # more than Python can recurse
        inner = inner / "d"
        inner.mkdir()
    (tmp_path / "nested" / "d" / "a.txt").write_text("a")
    (inner / "deep.txt").write_text("deep")
    os.mkfifo(nested / "pipe")
    (nested / "zero").symlink_to("/dev/zero")
    deep = "d/" * 1010 + "deep.txt"
    assert names(nested) == ["d/a.txt", deep]
    for path in (nested / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match=r"data\.path='.*' is a pipe or a device: write its text to a file"):
            find_sources(path)
    subprocess.run(["rm", "-r", nested], check=True)  # Python's own is recursive


def test_the_built_in_corpus_is_the_standard_library_without_its_tests():
    sources = find_sources(None)
    found = [document.name for document in sources.documents]
    assert {"ast.py", "json/decoder.py"} <= set(found)
    assert found == sorted(found)
    assert not [name for name in found if re.search(r"(^|/)(site-packages|tests?|idle_test|__pycache__)/", name)]
    assert sum(document.size for document in sources.documents) > 5_000_000


def test_a_path_without_text_is_named(folder):
    for name in ("c.txt.gz", "d.parquet"):
        (folder / name).write_bytes(b"\0")
    for name, message in [
        ("c.txt.gz", r"\(1 skipped: binary.* Only JSON lines may be compressed: decompress other text\.$"),
        ("*.parquet", r"Read \.parquet and \.arrow with linrope prepare --dataset FOLDER --output OTHER\.$"),
        ("a.tx", r"data\.path='.*a\.tx' does not exist: give a file.* Did you mean 'a\.txt'\?"),
        ("*.md", r"data\.path='.*\*\.md' holds no text: give"),
        ("image.bin", r"holds no text \(1 skipped: binary, .*JSON lines are named \.jsonl or \.ndjson, with \.gz"),
        ("nowhere/at/all", r"data\.path='.*nowhere/at/all' does not exist"),
    ]:
        with pytest.raises(InputError, match=message):
            find_sources(folder / name)
    with pytest.raises(InputError, match=r"^--path is empty: give a path"):
        find_sources("", "--path")


def test_tokens_are_the_documents_each_followed_by_a_separator(folder):
    corpus = Corpus(find_sources(folder).documents)
    whole = [*b"aaa", SEPARATOR, *b"bb", SEPARATOR, *b"c", SEPARATOR]
    assert len(corpus) == len(whole) == corpus.n_bytes + 3
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            tokens = corpus.tokens(start, stop)
            assert tokens.tolist() == whole[start:stop]
            assert tokens.dtype == torch.int64
    with pytest.raises(IndexError):
        corpus.tokens(0, len(whole) + 1)


def test_a_file_larger_than_memory_is_read_in_place(tmp_path):
    size = 2**40  # by its size a terabyte; sparse, so a few blocks on disk
    with open(tmp_path / "huge.txt", "wb") as file:
        file.write(b"x" * 8192)
        file.seek(size - 3)
        file.write(b"end")
    corpora, _ = split_corpus(find_sources(tmp_path / "huge.txt"), [0.9, 0.05, 0.05])
    n_bytes = [corpus.n_bytes for corpus in corpora.values()]
    assert sum(n_bytes) == size
    assert n_bytes == pytest.approx([0.9 * size, 0.05 * size, 0.05 * size], abs=1)
    test = corpora["test"]
    assert test.tokens(len(test) - 4, len(test)).tolist() == [*b"end", SEPARATOR]


def test_documents_are_dealt_out_whole_and_a_new_one_moves_no_other(tmp_path):
    def membership() -> dict[str, str]:
        corpora, why = split_corpus(find_sources(tmp_path), [0.6, 0.2, 0.2])
        assert why is None
        return {document.name: split for split, corpus in corpora.items() for document in corpus.documents}

    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    before = membership()
    shares = [list(before.values()).count(split) / 200 for split in ("train", "val", "test")]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.1)
    (tmp_path / "0new.txt").write_text("new")
    after = membership()
    assert after.pop("0new.txt") in {"train", "val", "test"}
    assert after == before


@pytest.mark.parametrize(
    ("n", "fractions", "reason"),
    [
        (2, [0.9, 0.05, 0.05], "2 documents are too few to split by name"),
        (19, [0.5, 0.25, 0.25], "19 documents are too few to split by name"),
        (25, [0.998, 0.001, 0.001], "by name, val and test would have no text"),
        (25, [0.998, 0.0, 0.002], "by name, test would have no text"),
        (25, [0.5, 0.25, 0.25], None),
        (25, [1.0, 0.0, 0.0], None),
    ],
)
def test_few_documents_are_cut_by_position_so_that_each_split_has_text(tmp_path, n, fractions, reason):
    text = bytes(33 + i % 90 for i in range(n * 400))
    for i in range(n):
        (tmp_path / f"{i:02}.txt").write_bytes(text[400 * i : 400 * i + 400])
    sources = find_sources(tmp_path)
    by_name, why = split_corpus(sources, fractions, "document")
    assert why is None
    assert sum(corpus.n_documents for corpus in by_name.values()) == n
    corpora, why = split_corpus(sources, fractions)
    assert why == reason
    if reason is None:
        assert [c.fingerprint() for c in corpora.values()] == [c.fingerprint() for c in by_name.values()]
        corpora, why = split_corpus(sources, fractions, "position")
        assert why == "data.split=position"
    tokens = [corpus.tokens(0, len(corpus)).tolist() for corpus in corpora.values()]
    assert b"".join(bytes(token for token in part if token != SEPARATOR) for part in tokens) == text
    assert [corpus.n_bytes for corpus in corpora.values()] == [round(share * len(text)) for share in fractions]


def test_fractions_that_are_rounded_cut_within_the_text():
    bounds = split_bounds([0.6666667, 0.3333334, 0.0])  # their sum is 1.0000001
    assert list(cut_by_position(10**7, bounds)) == [(0, 6_666_667), (6_666_667, 10**7), (10**7, 10**7)]


@pytest.mark.parametrize(
    "fractions", [[0.9, 0.1], [0.9, 0.2, 0.1], [1.1, -0.1, 0.0], [0.0, 0.5, 0.5], [math.nan, 0.5, 0.5]]
)
def test_fractions_that_are_none(tmp_path, fractions):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=rf"data\.fractions={re.escape(str(fractions))} must be three numbers"):
        split_corpus(find_sources(tmp_path), fractions)
