"""Columns of CoNLL: sentences, the first token of each word, entities."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from linrope.data.finetune.conll import Sentence, are_entities, entities, first_tokens, label_numbers, read_sentences
from linrope.data.finetune.encoding import TextEncoder
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from tests.conftest import assert_input_errors
from tests.data.tokenizers.subword_files import byte_level

TEXT = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- -X- O

Zürich\tNNP  B-NP B-LOC
. . O O
"""


def test_sentences_have_words_and_labels(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    first, second = read_sentences(path)
    assert first == Sentence("0", ("EU", "rejects"), ("B-ORG", "O"), 3)
    assert second == Sentence("1", ("Zürich", "."), ("B-LOC", "O"), 8)
    path.write_text("EU\n10\u00a0000\n \t\n\n.")
    assert [(sentence.words, sentence.labels) for sentence in read_sentences(path)] == [
        (("EU", "10\u00a0000"), None),
        ((".",), None),
    ]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SubwordTokenizer(byte_level())], ids=["bytes", "subwords"])
def test_the_first_token_of_a_word_holds_its_beginning(tokenizer):
    words = ("the", "naïve", "🐍", "quick", "a", "snakes")
    sentence = Sentence("0", words, None, 1)
    row = TextEncoder(tokenizer, 99)(sentence.text)
    begins = [0, *row.ends[:-1].tolist()]
    for word, token in zip(words, first_tokens(sentence, row, tokenizer)):
        at = token - row.start_of_last
        piece = sentence.text.encode()[begins[at] : row.ends[at]].lstrip()
        assert piece
        assert word.encode().startswith(piece) or piece.startswith(word.encode())
    short = TextEncoder(tokenizer, 7)(sentence.text)
    kept = [token for token in first_tokens(sentence, short, tokenizer) if token is not None]
    assert kept == first_tokens(sentence, row, tokenizer)[: len(kept)]
    assert 0 < len(kept) < len(words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "b", "\u200b"), [1, 2, None]),
        (("a", "\u200e", "b", "\u200b", "\u200e"), [1, None, 2, None, None]),
        (("\u200e", "a", "b"), [None, 1, 2]),
        (("a", "\u200b"), [1, None]),
        (("\u200b", "\u200b"), [None, None]),
    ],
)
def test_a_word_that_the_tokenizer_drops_has_no_token(words, expected):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    subwords, sentence = SubwordTokenizer(tokenizer.to_str()), Sentence("0", words, None, 1)
    assert first_tokens(sentence, TextEncoder(subwords, 9)(sentence.text), subwords) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("O B-A I-A O", {(1, 3, "A")}),
        ("B-A B-A I-A", {(0, 1, "A"), (1, 3, "A")}),
        ("I-A I-A I-B O I-B", {(0, 2, "A"), (2, 3, "B"), (4, 5, "B")}),  # as in CoNLL-2003's own files
        ("I-A B-A", {(0, 1, "A"), (1, 2, "A")}),
        ("B-A I-B-C I-B-C", {(0, 1, "A"), (1, 3, "B-C")}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities_are_those_of_conlleval(labels, expected):
    assert entities(labels.split()) == expected


def test_what_is_wrong_is_named_with_file_and_line(tmp_path):
    path = tmp_path / "train.txt"

    def read(text: str):
        def call():
            path.write_text(text)
            return read_sentences(path)

        return call

    assert_input_errors(
        (read("a O\nb\n"), r"train\.txt, line 2: it has 1 columns, and the lines before 2"),
        (read("-DOCSTART- O\n\n"), r"train\.txt has no words"),
        (read(""), r"train\.txt is empty"),
        (lambda: label_numbers(read("a O\nb X\n")()[0], ("O",), path), r"train\.txt, line 2: the label 'X' is unknown"),
    )
    assert are_entities(("O", "B-A", "I-A"))
    assert not are_entities(("O", "NN"))
