"""`prepare`: what it reads and writes, that it goes on where it stopped, and that it loses and overwrites nothing."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import zstandard

from linrope.data.corpus.opening import open_text
from linrope.data.corpus.token_files import NumberFile
from linrope.data.prepare import units
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.jsonlines import read_lines
from linrope.data.prepare.manifest import Manifest, document_sizes
from linrope.data.prepare.preparation import prepare
from linrope.data.prepare.workers import Progress
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import DocumentChanged, InputError
from tests.data.tokenizers.subword_files import TEXT, byte_level, wordpiece, write_tokenizer

ALL = [1.0, 0.0, 0.0]
LINES = ["first\ndocument", "naïve 🐍", "third", "x" * 50]


def run(
    folder: Path, name: str = "out", progress: Progress = lambda *_: None, **options: object
) -> tuple[Path, Manifest]:
    config = PrepareConfig(output=str(folder / name), **{"path": str(folder / "in"), "workers": 1, **options})
    return folder / name, prepare(config, progress)


def flat(out: Path) -> list[int]:
    return np.fromfile(out / "tokens.bin", "<u2").tolist()


def with_separators(*documents: str) -> list[int]:
    return [token for document in documents for token in (*document.encode(), 256)]


def files_of(out: Path) -> dict[str, bytes]:
    return {file.relative_to(out).as_posix(): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def times_of(folder: Path, pattern: str = "*.json") -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.glob(pattern)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    monkeypatch.setattr(units, "CHUNK_BYTES", 30)
    monkeypatch.setattr(units, "LINE_REACH", 20)


def json_lines(*texts: object, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def test_the_documents_of_a_folder_in_order_each_followed_by_a_separator(source, tmp_path):
    (source / "b.txt").write_text("text of b")
    (source / "a").mkdir()
    (source / "a" / "c.txt").write_text("cé")
    (source / "d.jsonl").write_bytes(json_lines(*LINES))
    (source / "empty.txt").touch()
    (source / "image.png").write_bytes(b"\0\1")
    out, manifest = run(tmp_path)
    assert flat(out) == with_separators("cé", "text of b", *LINES)
    assert sorted(files_of(out)) == ["documents.npy", "linrope-corpus.json", "tokens.bin"]
    n_bytes = sum(len(text.encode()) for text in ("cé", "text of b", *LINES))
    assert (manifest.n_documents, manifest.n_tokens, manifest.n_bytes) == (6, n_bytes, n_bytes)
    assert (manifest.n_skipped_files, manifest.n_skipped_lines, manifest.n_empty) == (2, 0, 0)
    assert document_sizes(out).tolist() == [3, 9, *(len(text.encode()) for text in LINES)]
    opened = open_text(out, ALL)
    assert opened.corpora["train"].tokens(0, len(flat(out))).tolist() == flat(out)
    assert opened.n_skipped == 2


def compressed(name: str, data: bytes) -> bytes:
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    return compress(data[:40]) + compress(data[40:])  # archives may follow each other


@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz", "jsonl.zst", "ndjson", "json", "json.gz", "json.zst"])
def test_json_lines_plain_and_compressed(source, tmp_path, end, small_units):
    name = f"c.{end}"
    data = json_lines(*LINES, "", field="content").replace(b"\n", b"\r\n", 1) + b"\n  \n" + b'{"content": "no newline"}'
    (source / name).write_bytes(compressed(name, data))
    out, manifest = run(tmp_path, text_field="content", path=str(source / name))
    documents = open_text(out, ALL).corpora["train"]
    assert documents.tokens(0, len(documents)).tolist() == with_separators(*LINES, "no newline")
    assert (manifest.n_documents, manifest.n_empty) == (5, 1)


@pytest.mark.parametrize("name", ["c.jsonl", "c.JSONL.gz", "c.jsonl.zst"])
def test_a_byte_order_mark_and_padding_of_an_archive_are_no_text(source, tmp_path, name):
    data = compressed(name.lower(), b"\xef\xbb\xbf" + json_lines(*LINES))
    (source / name).write_bytes(data if name == "c.jsonl" else data + b"\0" * 5000)
    out, _ = run(tmp_path)
    assert flat(out) == with_separators(*LINES)


def test_an_archive_of_the_largest_window_is_read(source, tmp_path):
    """As `zstd --long=31` writes it."""
    settings = zstandard.ZstdCompressionParameters(window_log=31)
    compressing = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    data = compressing.compress(json_lines(*LINES)) + compressing.flush()
    assert zstandard.get_frame_parameters(data).window_size == 2**31
    (source / "c.jsonl.zst").write_bytes(data)
    _, manifest = run(tmp_path, path=str(source / "c.jsonl.zst"))
    assert manifest.n_documents == len(LINES)


BAD_LINES = [
    (b'{"text": "a', r"is not JSON"),
    (b'{"id": ' + b"7" * 5000 + b"}", r"is not JSON that can be read"),  # Python reads 4,300 digits
    (b'["a"]', r"holds a list where an object with the field 'text' was expected"),
    (b'{"id": 1, "body": "b"}', r"has no field 'text' \(set --text_field to one it has: 'id', 'body'\)"),
    (b'{"text": null}', r"has a NoneType in the field 'text', where text was expected"),
    (b'{"text": "\xff"}', r"is not UTF-8 \(byte 11 of the line\)"),
    (b'{"text": "\\ud800"}', r"has half a surrogate pair in the field 'text'"),
]


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_counted(source, tmp_path, name, line, message, small_units):
    (source / name).write_bytes(compressed(name, json_lines(*LINES) + line + b"\n" + json_lines("last")))
    with pytest.raises(InputError, match=rf"{name} line 5 {message}.*\. Fix the line, or .* --skip_bad_lines\."):
        run(tmp_path)
    assert not (tmp_path / "out" / "linrope-corpus.json").exists()
    out, manifest = run(tmp_path, skip_bad_lines=True)  # which goes on from there
    assert flat(out) == with_separators(*LINES, "last")
    assert manifest.n_skipped_lines == 1
    with pytest.raises(InputError, match=r"was prepared with --skip_bad_lines, and 1 lines were skipped: give"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl.zst"])
def test_an_archive_that_is_cut_short_or_damaged_is_an_error_even_where_bad_lines_are_not(source, tmp_path, name):
    data = json_lines(*(f"document {number} {number**7}" for number in range(2000)))
    zst = zstandard.ZstdCompressor(write_checksum=True)
    archive = gzip.compress(data) if name.endswith("gz") else zst.compress(data)
    (source / name).write_bytes(archive[: len(archive) // 2])
    with pytest.raises(InputError, match=rf"{name} line \d+ cannot be read: the compressed file ends in the middle"):
        run(tmp_path, skip_bad_lines=True)
    changed = bytearray(archive)
    changed[len(archive) // 2] ^= 0xFF
    (source / name).write_bytes(changed)
    with pytest.raises(InputError, match=rf"{name} line \d+ cannot be read: its compressed data is damaged"):
        run(tmp_path, "other", skip_bad_lines=True)


def archive_of(block: bytes, n_blocks: int) -> bytes:
    file = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as archive:
        for _ in range(n_blocks):
            archive.write(block)
    return file.getvalue()


def test_an_archive_of_a_gigabyte_of_zeros_is_refused_at_once(source, tmp_path):
    (source / "zeros.jsonl.zst").write_bytes(archive_of(bytes(1 << 20), 1 << 10))
    seen = []
    with pytest.raises(InputError, match=r"zeros\.jsonl\.zst line 1 is longer than 268,435,456 bytes: split its text"):
        run(tmp_path, progress=lambda done, total: seen.append(done))
    assert seen[-1] < (source / "zeros.jsonl.zst").stat().st_size / 2


def test_an_archive_of_many_lines_is_read_in_small_steps(source, tmp_path):
    file = source / "lines.jsonl.zst"
    text = b"".join(b'{"text": "%d"}\n' % (number % 7) for number in range(7 << 12))
    file.write_bytes(archive_of(text, 1) + archive_of(b"\n" * (1 << 20), 3))
    n_lines, longest = 0, 0
    seen = []
    for _, line in read_lines(file, 0, file.stat().st_size, seen.append):
        n_lines, longest = n_lines + 1, max(longest, len(line))
    assert (n_lines, longest) == ((7 << 12) + (3 << 20), 13)
    assert sum(seen) == file.stat().st_size
    assert max(seen) <= 4096


def test_documents_are_joined_in_steps_too(many, tmp_path, monkeypatch):
    (many / "long.txt").write_text("a long document\n" * 50)  # in many parts
    whole, _ = run(tmp_path, "whole")
    monkeypatch.setattr("linrope.data.prepare.parts.READ_BYTES", 64)
    steps, _ = run(tmp_path, "steps")
    assert files_of(steps) == files_of(whole)
    assert document_sizes(steps).tolist() == [len(file.read_text()) for file in sorted(many.iterdir())]


def test_large_files_are_cut_into_units_without_changing_a_byte(source, tmp_path, small_units):
    rows = "".join(f"line {number} naïve 🐍\n" for number in range(40)) + "🐍" * 100  # which has no line to cut after
    (source / "a.txt").write_text(rows)
    (source / "b.jsonl").write_bytes(json_lines(*(f"{number} {'y' * 40 * (number % 4)}" for number in range(12))))
    (source / "c.txt").write_text("end")
    assert len(units.file_units(str(source))[0]) > 10
    out, manifest = run(tmp_path)
    expected = [rows, *(f"{number} {'y' * 40 * (number % 4)}" for number in range(12)), "end"]
    assert flat(out) == with_separators(*expected)
    assert document_sizes(out).tolist() == [len(text.encode()) for text in expected]
    # tokens of a tokenizer are cut there too, and still write the text back and count all its bytes
    tokenizer = SubwordTokenizer(byte_level())
    out, manifest = run(tmp_path, "subwords", tokenizer=str(write_tokenizer(tmp_path)))
    text = tokenizer.decoder().feed(flat(out))
    assert text == "".join(expected)
    assert np.fromfile(out / "text_bytes.bin", manifest.text_bytes_dtype).sum() == len(text.encode())


def test_a_tokenizers_tokens_and_the_bytes_they_stand_for(source, tmp_path):
    (source / "a.jsonl").write_bytes(json_lines(TEXT, "second", "   "))
    file = write_tokenizer(tmp_path, wordpiece())
    out, manifest = run(tmp_path, tokenizer=str(file))
    tokenizer = SubwordTokenizer(file.read_text())
    tokens = [tokenizer.encode_document(text.encode())[0].tolist() for text in (TEXT, "second", "   ")]
    assert flat(out) == [*tokens[0], tokenizer.separator, *tokens[1], tokenizer.separator, tokenizer.separator]
    assert (manifest.n_documents, manifest.n_empty, manifest.n_bytes) == (2, 1, len(TEXT.encode()) + 6)
    assert (out / "tokenizer.json").read_text() == file.read_text()
    file.unlink()  # the folder needs nothing else
    opened = open_text(out, ALL)
    assert opened.vocab_size == opened.tokenizer.vocab_size == tokenizer.vocab_size
    train = opened.corpora["train"]
    assert train.tokens(0, len(train)).tolist() == flat(out)[:-1]  # the document without a token is left out
    assert train.text_bytes(0, len(train)).sum() == train.n_bytes == manifest.n_bytes
    assert train.text_bytes(len(tokens[0]), len(train)).sum() == 6
    assert [train.text_bytes(i, i + 1).item() for i in range(len(train))] == train.text_bytes(0, len(train)).tolist()


def test_text_that_is_not_utf8_is_named_where_the_tokenizer_needs_it(source, tmp_path):
    (source / "latin.txt").write_bytes("naïve".encode("latin-1"))
    assert flat(run(tmp_path)[0]) == [*"naïve".encode("latin-1"), 256]
    with pytest.raises(InputError, match=r"latin\.txt from byte 0 is not UTF-8 \(byte 2 from there\)"):
        run(tmp_path, "other", tokenizer=str(write_tokenizer(tmp_path)))


def test_a_dataset_read_as_a_stream(source, tmp_path):
    (source / "a.jsonl").write_bytes(json_lines(*LINES[:2], field="body"))
    (source / "b.jsonl").write_bytes(json_lines(*LINES[2:], field="body"))
    out, manifest = run(tmp_path, path=None, dataset=str(source), text_field="body")
    assert flat(out) == with_separators(*LINES)
    assert manifest.origin == f"dataset {source} (train)"
    with pytest.raises(InputError, match=r"dataset '.*in' shard 0 row 0 has no field 'text' \(set --text_field to"):
        run(tmp_path, "other", path=None, dataset=str(source))
    with pytest.raises(InputError, match=r"--dataset='.*nowhere' \(--dataset_config=None, .*\) cannot be opened"):
        run(tmp_path, "other", path=None, dataset=str(tmp_path / "nowhere"))


def test_a_dataset_of_save_to_disk(tmp_path):
    rows = datasets.Dataset.from_dict({"text": LINES})
    rows.save_to_disk(tmp_path / "rows", num_shards=2)
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    options = {"path": None, "dataset": str(tmp_path / "rows")}
    assert flat(run(tmp_path, **options)[0]) == with_separators(*LINES)
    assert len(units.dataset_units(str(tmp_path / "rows"), None, "train")) == 2
    for wrong, message in [
        ({"dataset_split": "test"}, r"--dataset_split='test' is unknown: choose one of 'train'"),
        ({"dataset_config": "en"}, r"--dataset_config='en': .*rows was saved without configurations: leave it out"),
        ({"dataset": str(tmp_path / "splits")}, r"--dataset_split='train' is unknown: choose one of 'test'"),
    ]:
        with pytest.raises(InputError, match=message):
            run(tmp_path, "other", **{**options, **wrong})
    options = {"path": None, "dataset": str(tmp_path / "splits"), "dataset_split": "test"}
    assert flat(run(tmp_path, "other", **options)[0]) == with_separators(*LINES)


@pytest.mark.parametrize("package", ["datasets", "zstandard", "tokenizers"])
def test_an_extra_that_is_missing_is_named(source, tmp_path, monkeypatch, package):
    (source / "a.jsonl.zst").write_bytes(zstandard.compress(json_lines("a")))
    tokenizer = write_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    options = {"datasets": {"path": None, "dataset": str(source)}, "tokenizers": {"tokenizer": str(tokenizer)}}
    with pytest.raises(InputError, match=rf"needs the package {package}, .* pip install 'linrope\[text\]'"):
        run(tmp_path, **options.get(package, {}))


# --- interrupted, run again ------------------------------------------------------------------------------------------


@pytest.fixture
def many(source: Path, small_units: None) -> Path:
    for number in range(12):
        (source / f"{number:02}.txt").write_text(f"document {number} " * 7)
    return source


def test_a_preparation_that_was_interrupted_goes_on_where_it_stopped(many, tmp_path):
    whole, _ = run(tmp_path, "whole")
    parts = tmp_path / "out" / "parts"

    def stop(done: int, total: int | None) -> None:
        assert total == sum(file.stat().st_size for file in many.iterdir())
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=stop)
    assert not (tmp_path / "out" / "linrope-corpus.json").exists()
    with pytest.raises(InputError, match=r"data\.path='.*out' is not completely prepared: run the same"):
        open_text(tmp_path / "out", ALL)
    finished = times_of(parts)
    assert 3 <= len(finished) < 12
    assert not list(parts.glob("*.partial"))

    seen = []
    run(tmp_path, progress=lambda *_: seen.append(times_of(parts)))
    assert all(finished.items() <= at.items() for at in seen)  # what was done is not done again
    assert files_of(tmp_path / "out") == files_of(whole)
    before = times_of(tmp_path / "out", "*")
    run(tmp_path)
    assert times_of(tmp_path / "out", "*") == before  # what is complete is left as it is


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.bin", lambda data: data[:100]),
        ("tokens.bin", None),
        ("tokens.bin", lambda data: data[:-1] + b"\1"),
        ("text_bytes.bin", lambda data: data[:-1] + b"\7"),
        ("documents.npy", lambda data: data[:50]),
        ("tokenizer.json", None),
    ],
    ids=["cut", "removed", "token", "bytes of text", "documents", "tokenizer"],
)
def test_a_damaged_folder_is_prepared_again(source, tmp_path, name, damage):
    (source / "a.txt").write_text(TEXT)
    options = {"tokenizer": str(write_tokenizer(tmp_path))}
    out, manifest = run(tmp_path, **options)
    whole = files_of(out)
    (out / name).unlink() if damage is None else (out / name).write_bytes(damage(whole[name]))
    with pytest.raises(InputError):
        open_text(out, ALL)
    assert run(tmp_path, **options)[1] == manifest
    assert files_of(out) == whole
    open_text(out, ALL)


def test_a_repair_that_was_interrupted_goes_on(many, tmp_path):
    out, _ = run(tmp_path)
    whole = files_of(out)
    (out / "tokens.bin").unlink()

    def stop(done: int, total: int | None) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=stop)
    with pytest.raises(InputError, match="is not completely prepared"):
        open_text(out, ALL)
    run(tmp_path)
    assert files_of(out) == whole


@pytest.mark.exhaustive
def test_a_process_that_is_killed_leaves_what_another_finishes(many, tmp_path):
    """Its two workers end with it. The result is that of a process that was not killed."""
    whole, _ = run(tmp_path, "whole")
    code = (  # a new interpreter: one that is forked would take over the fork server of other tests
        "import sys; from linrope.data.prepare import config, preparation, units; units.UNIT_BYTES = 100\n"
        "say = lambda done, total: print(done, total, flush=True)\n"
        "preparation.prepare(config.PrepareConfig(path=sys.argv[1], output=sys.argv[2], workers=2), say)"
    )
    command = [sys.executable, "-c", code, str(many), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    next(line for line in process.stdout if not line.startswith("0 "))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    seen = []
    run(tmp_path, progress=lambda *progress: seen.append(progress))
    total = sum(file.stat().st_size for file in many.iterdir())
    assert seen[-1] == (total, total)
    assert files_of(tmp_path / "out") == files_of(whole)


def test_a_source_that_was_mended_is_read_again_and_only_that(source, tmp_path, small_units):
    for name, line in (("a", json_lines("x" * 90)), ("b", b"[]\n" + b" " * 90), ("c", json_lines("z" * 90))):
        (source / f"{name}.jsonl").write_bytes(line)
    with pytest.raises(InputError, match=r"b\.jsonl line 1 holds a list"):
        run(tmp_path)
    parts = tmp_path / "out" / "parts"
    kept = times_of(parts).items()
    assert len(kept) == 1
    (source / "b.jsonl").write_bytes(json_lines("mended" * 20))
    seen = []
    run(tmp_path, progress=lambda *_: seen.append(times_of(parts).items()))
    assert all(kept <= at for at in seen)
    assert flat(tmp_path / "out") == with_separators("x" * 90, "mended" * 20, "z" * 90)


def test_a_glob_that_matches_the_output_leaves_it_out(source, tmp_path):
    (source / "a.txt").write_text("text")
    (source / "b.jsonl").write_bytes(b'{"text": "b"}\n{"text"')
    options = {"path": str(source / "**" / "*"), "name": "in/out"}
    with pytest.raises(InputError, match=r"b\.jsonl line 2"):
        run(tmp_path, **options)
    (source / "b.jsonl").write_bytes(b'{"text": "b"}\n')
    out, _ = run(tmp_path, **options)
    assert flat(out) == with_separators("text", "b")


def test_many_short_documents_are_read_at_once(source, tmp_path, monkeypatch):
    """A row of 16,384 tokens may have a thousand."""
    texts = [f"{'ab' * (number % 5)}{number}" for number in range(300)]
    (source / "c.jsonl").write_bytes(json_lines(*texts))
    out, _ = run(tmp_path, tokenizer=str(write_tokenizer(tmp_path)))
    whole, reads = {}, []
    tokens, n_bytes = np.fromfile(out / "tokens.bin", "<u2"), np.fromfile(out / "text_bytes.bin", np.uint8)
    ends = np.flatnonzero(n_bytes == 0) + 1
    pieces = list(zip(np.split(tokens, ends), np.split(n_bytes, ends)))
    real = NumberFile.read
    monkeypatch.setattr(NumberFile, "read", lambda *args: reads.append(args[1:]) or real(*args))
    for split, corpus in open_text(out, [0.5, 0.3, 0.2]).corpora.items():
        chosen = [int(np.flatnonzero(corpus._starts[d] == np.array([0, *ends]))[0]) for d in range(corpus.n_documents)]
        whole[split] = [np.concatenate([pieces[document][i] for document in chosen]) for i in (0, 1)]
        for start, stop in ((0, len(corpus)), (3, 4), (17, 171), (0, 0), (len(corpus), len(corpus))):
            reads.clear()
            assert corpus.tokens(start, stop).tolist() == whole[split][0][start:stop].tolist()
            if stop - start == len(corpus):
                assert len(reads) == 1 + sum(np.diff(chosen) != 1)
            assert corpus.text_bytes(start, stop).tolist() == whole[split][1][start:stop].tolist()
    assert sum(len(tokens) for tokens, _ in whole.values()) == len(tokens)
    assert len(open_text(out, ALL).corpora["train"]) == len(tokens)
    reads.clear()
    assert open_text(out, ALL).corpora["train"].tokens(0, len(tokens)).tolist() == tokens.tolist()
    assert reads[-1] == (0, len(tokens) - 1)  # one read; the last separator is known


def test_something_else_is_not_prepared_into_an_unfinished_folder(source, tmp_path, small_units):
    (source / "a.txt").write_text("x" * 99)
    (source / "b.jsonl").write_bytes(b"[]\n" + b" " * 90)
    with pytest.raises(InputError, match=r"b\.jsonl line 1 holds a list"):
        run(tmp_path)
    before = files_of(tmp_path / "out")
    (tmp_path / "other.txt").write_text("other")
    for options in ({"path": str(tmp_path / "other.txt")}, {"tokenizer": str(write_tokenizer(tmp_path))}):
        with pytest.raises(InputError, match=r"holds an unfinished preparation of other text, .*: name another"):
            run(tmp_path, **options)
    assert files_of(tmp_path / "out") == before


def test_an_output_that_holds_something_else_is_refused_and_kept(many, tmp_path):
    out, _ = run(tmp_path)
    before = files_of(out)
    for option, value in (("tokenizer", str(write_tokenizer(tmp_path))), ("text_field", "body")):
        with pytest.raises(InputError, match=rf"--output='.*out' holds another corpus .*\(different: {option}\): name"):
            run(tmp_path, **{option: value})
    (many / "12.txt").write_text("new")
    with pytest.raises(InputError, match=r"\(different: sources\): name another folder, or remove it"):
        run(tmp_path)
    assert files_of(out) == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(InputError, match=r"--output='.*mine' exists and holds other files: name another folder"):
        run(tmp_path, "mine")
    with pytest.raises(InputError, match=r"--output='.*thesis\.txt' is a file: name a folder"):
        run(tmp_path, "mine/thesis.txt")
    assert files_of(tmp_path / "mine") == {"thesis.txt": b"all of it"}


def test_two_preparations_into_one_folder_are_kept_apart(many, tmp_path):
    def another(done: int, total: int | None) -> None:
        if 0 < done < total:
            with pytest.raises(InputError, match="is being prepared by another process"):
                run(tmp_path)

    assert run(tmp_path, progress=another)[1].n_documents == 12


def test_a_source_that_changes_meanwhile_is_named(many, tmp_path):
    with pytest.raises(DocumentChanged, match=r"05\.txt changed while the corpus was being prepared: remove"):
        run(tmp_path, progress=lambda *_: (many / "05.txt").write_text("changed"))
    with pytest.raises(DocumentChanged, match=r"07\.txt changed"):
        run(tmp_path, "other", progress=lambda *_: (many / "07.txt").unlink(missing_ok=True))


def test_options_that_are_none_are_named(tmp_path):
    with pytest.raises(InputError, match=r"--workers=0 must be 1 to 1024"):
        PrepareConfig(output="out", workers=0)
    with pytest.raises(InputError, match=r"--path='a' and --dataset='b' exclude each other"):
        PrepareConfig(output="out", path="a", dataset="b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "blank.jsonl").write_bytes(json_lines("", ""))
    for output, path, message in [
        ("out", "nowhere", r"--path='.*nowhere' does not exist"),
        ("texts/out", "texts", r"--output='.*texts/out' lies within --path='.*texts': name a folder"),
        ("out", "empty", r"--path='.*empty' holds no text"),
        ("blank", "blank.jsonl", r"blank\.jsonl holds no text: there is nothing to prepare"),
    ]:
        with pytest.raises(InputError, match=message):
            run(tmp_path, output, path=str(tmp_path / path))
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_read_or_written_are_named(many, tmp_path):
    long = "x" * 300
    for output, message in [
        ("/proc/nowhere/out", r"--output='/proc/nowhere/out': cannot write there \("),
        (long, r"--output='.*x' was not finished: .* cannot be read or written \(File name too long\)"),
    ]:
        with pytest.raises((InputError, DocumentChanged), match=message):
            run(tmp_path, output)
    for name, call in (("--path", lambda: run(tmp_path, path=long)), ("data.path", lambda: open_text(long, ALL))):
        with pytest.raises(InputError, match=rf"{name}='x+.*' cannot be opened: File name too long"):
            call()
    with pytest.raises(InputError, match=r"--tokenizer='x+' cannot be read \(File name too long\)"):
        run(tmp_path, tokenizer=long)

    def remove(done: int, total: int | None) -> None:
        if done > total / 2:
            shutil.rmtree(tmp_path / "out")

    with pytest.raises(
        DocumentChanged, match=r"--output='.*out' was not finished: .*parts.* cannot be read or written"
    ):
        run(tmp_path, progress=remove)
