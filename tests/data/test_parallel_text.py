"""Parallel text: files, the built-in numbers, the BPE that is trained on both sides."""

import subprocess
import sys

import pytest

from linrope.data.parallel_text import TokenRows, read_parallel_text
from linrope.data.synthetic.number_words import LARGEST, SIZES, english, german, number_pairs
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.data.tokenizers.training import SMALLEST_VOCABULARY, train_bpe
from linrope.errors import InputError
from tests.data.tokenizers.subword_files import wordpiece


def test_lines_end_with_a_line_feed_only_and_empty_pairs_are_counted(tmp_path):
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_bytes("\ufeffone\r\n\n three\u2028more \n\ffour\n".encode())  # a byte order mark, a line separator
    target.write_bytes(b"eins\nzwei\ndrei\n \n")
    text = read_parallel_text(source, target)
    assert (text.source, text.target, text.n_empty) == (["one", "three\u2028more"], ["eins", "drei"], 2)
    assert len(text) == 2
    for content in (b"", b"\n"):
        source.write_bytes(content)
        target.write_bytes(content)
        assert len(read_parallel_text(source, target)) == 0


def test_files_that_do_not_fit_are_named(tmp_path):
    source, target = tmp_path / "train.en", tmp_path / "train.de"
    source.write_text("one\ntwo\nthree\n")
    target.write_text("eins\nzwei")
    with pytest.raises(InputError, match=r"train\.en has 3 lines and .*train\.de 2: line n"):
        read_parallel_text(source, target)
    target.write_bytes("eins\nfünf\ndrei".encode("latin-1"))
    with pytest.raises(InputError, match=r"train\.de, line 2: it is not UTF-8"):
        read_parallel_text(source, target)
    with pytest.raises(InputError, match=r"train\.dd cannot be read \(No such file.*Did you mean 'train\.de'"):
        read_parallel_text(source, tmp_path / "train.dd")


@pytest.mark.parametrize(
    ("number", "in_english", "in_german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (101, "one hundred and one", "einhunderteins"),
        (777, "seven hundred and seventy-seven", "siebenhundertsiebenundsiebzig"),
        (1_001, "one thousand and one", "eintausendeins"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend"),
        (101_200, "one hundred and one thousand two hundred", "einhunderteintausendzweihundert"),
        (LARGEST, f"{english(999)} thousand {english(999)}", f"{german(999)}tausend{german(999)}"),
    ],
)
def test_numbers_are_written_out(number, in_english, in_german):
    assert (english(number), german(number)) == (in_english, in_german)


def test_no_number_is_in_two_splits():
    lines = {split: number_pairs(split, "de", "en") for split in SIZES}
    assert {split: len(source) for split, (source, _) in lines.items()} == SIZES
    assert len({line for source, _ in lines.values() for line in source}) == sum(SIZES.values())
    assert number_pairs("val", "en", "de") == lines["val"][::-1]


TEXTS = ["the quick brown fox", "der schnelle braune Fuchs", "naïve 🐍 snakes", "  two  spaces "] * 30
PROGRAM = """
from linrope.data.tokenizers.training import train_bpe
from tests.data.test_parallel_text import TEXTS
print(train_bpe(TEXTS, 300, "data.vocab_size").fingerprint)
"""


@pytest.mark.exhaustive
def test_a_trained_bpe_is_the_same_in_every_process_and_keeps_text(monkeypatch):
    tokenizer = train_bpe(TEXTS, 300, "data.vocab_size")
    assert tokenizer.vocab_size == 300
    assert [tokenizer.token_id(name) for name in ("<pad>", "<s>", "</s>")] == [0, 1, 2]
    assert tokenizer.separator == 2
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tokenizer.fingerprint
    for text in (*TEXTS[:4], "Ωμέγα\t<s>"):  # also of letters that training did not see
        (tokens,) = tokenizer.encode_batch([text])
        assert not {0, 1, 2} & set(tokens)
        decoder = tokenizer.decoder()
        assert decoder.feed(tokens) + decoder.finish() == text
    assert train_bpe(["a b c"], 5000, "data.vocab_size").vocab_size < 300
    with pytest.raises(InputError, match=rf"data\.vocab_size=100 must be {SMALLEST_VOCABULARY} or more"):
        train_bpe(TEXTS, 100, "data.vocab_size")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SubwordTokenizer(wordpiece())], ids=["bytes", "wordpiece"])
def test_rows_of_tokens_are_those_of_each_text(tokenizer, monkeypatch):
    monkeypatch.setattr("linrope.data.parallel_text.LINES_AT_ONCE", 2)
    texts = ["the fox", "", "naïve dog, and", "lazy", "over"]
    rows = TokenRows(texts, tokenizer)
    expected = [tokenizer.encode_document(text.encode())[0].tolist() for text in texts]
    assert [rows[i].tolist() for i in range(len(rows))] == expected
    assert rows.lengths.tolist() == list(map(len, expected))
