"""What data.path may name: prepared folders and flat files of tokens, whole or damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from linrope.data.batches.contiguous import ContiguousBatches
from linrope.data.batches.windows import EvaluationWindows, TrainingWindows
from linrope.data.corpus import token_files
from linrope.data.corpus.opening import open_text
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import DocumentChanged, InputError
from tests.conftest import write_documents
from tests.data.tokenizers.subword_files import TEXT, byte_level, write_tokenizer

FRACTIONS = [0.6, 0.2, 0.2]


def prepared(path: Path, name: str = "prepared", **options: object) -> Path:
    folder = path.parent / name
    prepare(PrepareConfig(path=str(path), output=str(folder), workers=1, **options))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "texts", (1 + 13 * number % 60 for number in range(40)))


def write_flat(path: Path, tokens: object, dtype: str = "<u2") -> Path:
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize("which", ["*.txt", "00*.txt", "038.txt"], ids=["folder", "few", "file"])
def test_prepared_bytes_are_the_text_as_it_would_be_read(texts, which):
    path = texts if which == "*.txt" else texts / which
    plain, ready = open_text(path, FRACTIONS), open_text(prepared(path), FRACTIONS)
    for split, corpus in plain.corpora.items():
        other = ready.corpora[split]
        assert len(corpus) == len(other) > 0
        assert torch.equal(corpus.tokens(0, len(corpus)), other.tokens(0, len(corpus)))
        assert (other.n_bytes, other.n_documents, other.separator) == (corpus.n_bytes, corpus.n_documents, 256)
        assert other.text_bytes(0, len(other)) is None
        with pytest.raises(IndexError):
            other.tokens(0, len(other) + 1)
    assert plain.why_cut == ready.why_cut == ("10 documents are too few to split by name" if "00" in which else None)
    assert (ready.vocab_size, ready.tokenizer.name) == (plain.vocab_size, "bytes") == (257, "bytes")


def test_the_only_document_of_a_tokenizer_is_cut_by_position(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    folder = prepared(tmp_path / "text.txt", tokenizer=str(write_tokenizer(tmp_path)))
    corpora = open_text(folder, FRACTIONS).corpora
    tokenizer = SubwordTokenizer(byte_level())
    tokens, n_bytes = tokenizer.encode_document(TEXT.encode())
    cuts = [0, round(0.6 * len(tokens)), round(0.8 * len(tokens)), len(tokens)]
    for corpus, start, stop in zip(corpora.values(), cuts[:-1], cuts[1:], strict=True):
        assert corpus.tokens(0, len(corpus)).tolist() == [*tokens[start:stop].tolist(), tokenizer.separator]
        assert corpus.n_bytes == n_bytes[start:stop].sum()
        assert corpus.text_bytes(0, len(corpus)).tolist() == [*n_bytes[start:stop].tolist(), 0]
    with pytest.raises(InputError, match=r"holds 0 tokens.* To train without validation, set its share to 0"):
        EvaluationWindows(open_text(folder, [0.9, 0.0, 0.1]).corpora["val"], 10)


def test_pieces_of_few_documents_have_the_bytes_of_their_tokens(texts, tmp_path):
    folder = prepared(texts, tokenizer=str(write_tokenizer(tmp_path)))
    whole = open_text(folder, [1.0, 0.0, 0.0]).corpora["train"]
    corpora = open_text(folder, FRACTIONS, split="position").corpora
    assert [corpus.n_documents for corpus in corpora.values()] == [24, 9, 9]  # two documents are in two splits
    for corpus in corpora.values():
        assert corpus.n_bytes == corpus.text_bytes(0, len(corpus)).sum()
    assert sum(corpus.n_bytes for corpus in corpora.values()) == whole.n_bytes


def test_samples_of_a_tokenizer_say_how_many_bytes_their_targets_stand_for(texts, tmp_path):
    opened = open_text(prepared(texts, tokenizer=str(write_tokenizer(tmp_path))), [1.0, 0.0, 0.0])
    corpus = opened.corpora["train"]
    rows = ContiguousBatches(corpus, 20, 3)
    samples = [kind(corpus, 50)[i] for kind in (TrainingWindows, EvaluationWindows) for i in range(8)]
    for sample in samples + [rows[number] for number in range(rows.batches_per_pass)]:
        targets, n_bytes = (sample[name].reshape(-1, sample["targets"].shape[-1]) for name in ("targets", "n_bytes"))
        decoded = [opened.tokenizer.decoder().feed(row.tolist()) for row in targets]
        assert n_bytes.sum(dim=1).tolist() == [len(text.encode()) for text in decoded]  # text of single bytes


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens.bin", lambda data: data[:-2], r"is damaged: it holds 1,219 tokens and 40 documents, .* says 1,220"),
        ("tokens.bin", lambda data: data[:-1], r"is damaged \(.*tokens\.bin is damaged .* is not a multiple of 2"),
        ("documents.npy", lambda data: data[: len(data) // 2], r"is damaged \(.*: prepare it again"),
        ("linrope-corpus.json", lambda data: data[:50], r"corpus\.json is damaged"),
        ("linrope-corpus.json", lambda data: data.replace(b'"format": 1', b'"format": 2'), r"has format 2, this"),
        ("linrope-corpus.json", lambda data: data.replace(b'"n_bytes"', b'"nbytes"'), r"corpus\.json is damaged"),
        ("text_bytes.bin", None, r"is damaged \(.*text_bytes"),
        ("tokenizer.json", None, r"cannot be read \(No"),
    ],
)
def test_a_damaged_folder_is_named(texts, tmp_path, name, change, message):
    folder = prepared(texts, tokenizer="bytes" if change else str(write_tokenizer(tmp_path)))
    if change:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    with pytest.raises(InputError, match=message):
        open_text(folder, FRACTIONS)


def test_a_token_beyond_the_vocabulary_and_a_file_that_changes_while_in_use_are_named(texts):
    file = prepared(texts) / "tokens.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[123] = 999
    write_flat(file, tokens)
    train = open_text(file.parent, [1.0, 0.0, 0.0], verify=False).corpora["train"]
    with pytest.raises(InputError, match=r"tokens\.bin is .* holds 999 at position 123, where tokens are below 257"):
        train.tokens(0, len(train))
    write_flat(file, tokens[:50])
    with pytest.raises(DocumentChanged, match=r"tokens\.bin changed from \d+ to 100 bytes while in use"):
        train.tokens(0, 10)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "text_bytes.bin"])
def test_a_prepared_file_that_changed_at_equal_size_is_named(texts, tmp_path, name):
    folder = prepared(texts, tokenizer=str(write_tokenizer(tmp_path)))
    data = bytearray((folder / name).read_bytes())
    data[-40] ^= 1  # in documents.npy the bytes of a document
    (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=rf"prepared' is damaged: .*{name}.* changed after .* Prepare it again"):
        open_text(folder, FRACTIONS)
    assert open_text(folder, FRACTIONS, verify=False).corpora["train"].n_documents > 0


# --- flat files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "highest"), [("uint16", 50256), ("uint32", 128_000)])
def test_a_flat_file_is_its_tokens_cut_by_position(tmp_path, dtype, highest):
    tokens = np.random.default_rng(0).integers(0, highest, 1000)
    tokens[617] = highest
    opened = open_text(write_flat(tmp_path / "x.bin", tokens, dtype), FRACTIONS, token_dtype=dtype)
    parts = [corpus.tokens(0, len(corpus)) for corpus in opened.corpora.values()]
    assert [len(part) for part in parts] == [600, 200, 200]
    assert torch.equal(torch.cat(parts), torch.from_numpy(tokens))
    assert (opened.tokenizer, opened.vocab_size) == (None, highest + 1)
    assert opened.reason.endswith(f"x.bin holds {highest:,} at position 617")
    assert opened.corpora["val"].tokens(17, 18).item() == highest
    assert opened.corpora["val"].text_bytes(0, 200).tolist() == [0] * 200
    assert opened.corpora["val"].n_bytes is None


def test_a_tokenizer_makes_a_flat_files_documents_and_bytes_known(tmp_path):
    tokenizer = SubwordTokenizer(byte_level())
    tokens = np.concatenate([[*tokenizer.encode_document(TEXT.encode())[0], tokenizer.separator]] * 4)
    file, json_file = write_flat(tmp_path / "x.bin", tokens), write_tokenizer(tmp_path)
    opened = open_text(file, [1.0, 0.0, 0.0], str(json_file))
    train = opened.corpora["train"]
    assert train.n_bytes == train.text_bytes(0, len(tokens)).sum() == 4 * len(TEXT.encode())
    assert train.separator == tokenizer.separator
    assert TrainingWindows(train, len(tokens) - 1, document_mask=True)[0]["segment_ids"].max() == 3
    unknown = open_text(file, [1.0, 0.0, 0.0]).corpora["train"]
    ends = np.where(tokens == tokenizer.separator, tokenizer.separator + 1, tokens)  # with another token
    other = open_text(write_flat(tmp_path / "other.bin", ends), [1.0, 0.0, 0.0], str(json_file)).corpora["train"]
    told = rf"other\.bin holds no token {tokenizer.separator}, the separator of .* one of these names .*: <\|endoftext"
    for windows, sizes in ((TrainingWindows, [10]), (ContiguousBatches, [10, 2])):
        with pytest.raises(InputError, match=r"data\.document_mask=True needs to know .*: set data\.tokenizer"):
            windows(unknown, *sizes, document_mask=True)
        with pytest.raises(InputError, match=told):
            windows(other, *sizes, document_mask=True)
        windows(other, *sizes)
    assert EvaluationWindows(other, 10, document_mask=True)[0]["segment_ids"].max() == 0  # may be one document
    assert train.fingerprint() == unknown.fingerprint()  # the same tokens; `order` names the tokenizer itself
    tokens[0] += 1
    assert open_text(write_flat(file, tokens), [1.0, 0.0, 0.0]).corpora["train"].fingerprint() != unknown.fingerprint()


def test_a_flat_file_is_read_once_with_one_table_of_bytes(tmp_path, monkeypatch):
    tokens = np.arange(300).repeat(10)
    file, json_file = write_flat(tmp_path / "x.bin", tokens), str(write_tokenizer(tmp_path))
    table = SubwordTokenizer(byte_level()).token_bytes()
    calls = []
    monkeypatch.setattr(SubwordTokenizer, "token_bytes", lambda self: calls.append("table") or table)
    monkeypatch.setattr(token_files, "CHUNK", 700)
    read = token_files.read_range
    monkeypatch.setattr(token_files, "read_range", lambda *args: calls.append("read") or read(*args))
    corpora = open_text(file, FRACTIONS, json_file).corpora
    assert calls == ["table", *["read"] * 5]
    expected = [table[part].sum() for part in (tokens[:1800], tokens[1800:2400], tokens[2400:])]
    assert [corpus.n_bytes for corpus in corpora.values()] == expected


def test_a_flat_file_that_cannot_be_is_named(tmp_path):
    file = tmp_path / "x.bin"
    for data in (b"", b"abc"):
        file.write_bytes(data)
        with pytest.raises(InputError, match=rf"x\.bin is damaged .* size, {len(data)} bytes, is not a multiple of 2"):
            open_text(file, FRACTIONS)
    write_flat(file, [1, 2, 299, 300, 301])
    with pytest.raises(InputError, match=r"it holds 300 at position 3, where tokens are below 300"):
        open_text(file, FRACTIONS, str(write_tokenizer(tmp_path)))
    for highest in (50256, 128_000):
        write_flat(file, [1, highest, 7], "<u4")
        with pytest.raises(InputError, match=r"less than 16 at every other position, .*: set data\.token_dtype=uint32"):
            open_text(file, FRACTIONS)
        assert open_text(file, FRACTIONS, token_dtype="uint32").vocab_size == highest + 1
    assert open_text(write_flat(file, [1, 0, 15, 0]), FRACTIONS).vocab_size == 16  # a small vocabulary is none
    write_flat(file, [299, 298, 297, 296])
    for tokenizer in (None, str(write_tokenizer(tmp_path))):
        with pytest.raises(InputError, match=r"holds 19,530,027, beyond .*: set data\.token_dtype=uint16"):
            open_text(file, FRACTIONS, tokenizer, token_dtype="uint32")


# --- what must be prepared, and with which tokenizer ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.ndjson", "c.ndjson.gz", "c.json"])
def test_json_lines_are_to_be_prepared(texts, name):
    (texts / name).write_text('{"text": "a"}\n{"text": "b"}\n')
    for path in (texts, texts / name, texts / "c*"):
        with pytest.raises(InputError, match=rf"holds JSON lines \({name}\).*: linrope prepare --path .* --output"):
            open_text(path, FRACTIONS)
    assert len(open_text(texts / "*.txt", FRACTIONS).corpora) == 3


def test_text_for_a_tokenizer_is_to_be_prepared(texts, tmp_path):
    file = write_tokenizer(tmp_path, name="my tokenizer.json")
    with pytest.raises(InputError, match=rf"text once, .*: linrope prepare --path {texts} --tokenizer '{file}' --out"):
        open_text(texts, FRACTIONS, str(file))
    assert open_text(texts, FRACTIONS, "bytes").tokenizer.name == "bytes"


def test_another_tokenizer_than_a_folders_own_is_refused(texts, tmp_path):
    file, other = write_tokenizer(tmp_path), write_tokenizer(tmp_path, byte_level(vocab_size=290), "other.json")
    folder = prepared(texts, tokenizer=str(file))
    assert open_text(folder, FRACTIONS, str(file)).tokenizer.fingerprint == SubwordTokenizer(byte_level()).fingerprint
    for name in ("bytes", str(other)):
        with pytest.raises(InputError, match=r"data\.tokenizer is another one than data\.path='.*' was prepared with"):
            open_text(folder, FRACTIONS, name)
    (folder / "tokenizer.json").write_text(byte_level(special=("</s>",)))  # with as many tokens
    with pytest.raises(InputError, match=r"tokenizer\.json is not the one that .* was prepared with"):
        open_text(folder, FRACTIONS)
