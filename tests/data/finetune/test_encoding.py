"""Rows of one text, of a pair and of choices; truncation and padding."""

import numpy as np
import pytest
import torch

from linrope.data.finetune.encoding import TextEncoder, kept_lengths, pad, pad_choices
from linrope.data.tokenizers.bytes import ByteTokenizer
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import InputError
from tests.data.tokenizers.subword_files import byte_level

CLS, SEP, PAD = 258, 259, 260


def kept_one_by_one(lengths: list[int], room: int) -> list[int]:
    lengths = list(lengths)
    while sum(lengths) > room:
        if len(lengths) == 1 or lengths[0] > lengths[1]:
            lengths[0] -= 1
        else:
            lengths[1] -= 1
    return lengths


def test_the_longer_text_loses_tokens():
    for room in range(1, 9):
        for first in range(12):
            assert kept_lengths([first], room) == kept_one_by_one([first], room)
            for second in range(12):
                assert kept_lengths([first, second], room) == kept_one_by_one([first, second], room)


def test_rows_have_special_tokens_and_types():
    encode = TextEncoder(ByteTokenizer(), max_length=9)
    single, pair, long = encode("abc"), encode("ab", "é"), encode("abcdefgh", "xyz")
    assert single.tokens.tolist() == [CLS, *b"abc", SEP]
    assert pair.tokens.tolist() == [CLS, *b"ab", SEP, *"é".encode(), SEP]
    assert long.tokens.tolist() == [CLS, *b"abc", SEP, *b"xyz", SEP]
    assert [row.truncated for row in (single, pair, long)] == [False, False, True]
    assert [row.start_of_last for row in (single, pair, long)] == [1, 4, 5]
    assert pair.ends.tolist() == [1, 2]
    assert encode("a", "x" * 9).ends.tolist() == [1, 2, 3, 4, 5]
    assert pair.ends.base is None  # it does not keep the array of its whole text
    batch = pad([single, pair, long], PAD)
    assert batch["inputs"].dtype == batch["token_types"].dtype == torch.int64
    assert batch["inputs"][0].tolist() == [CLS, *b"abc", SEP, PAD, PAD, PAD, PAD]
    assert batch["key_mask"].sum(1).tolist() == [5, 7, 9]
    assert batch["token_types"].tolist() == [[0] * 9, [0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1]]


def test_an_empty_text_is_a_row_too():
    encode = TextEncoder(ByteTokenizer(), max_length=9)
    assert encode("").tokens.tolist() == [CLS, SEP]
    assert encode("", "").tokens.tolist() == [CLS, SEP, SEP]


def test_choices_have_a_dimension_of_their_own():
    encode = TextEncoder(ByteTokenizer(), max_length=20)
    rows = [[encode("a", "bc"), encode("a", "d")], [encode("efg", ""), encode("efg", "hij")]]
    batch = pad_choices(rows, PAD)
    assert {x.shape for x in batch.values()} == {(2, 2, 9)}
    for i, choices in enumerate(rows):
        for j, choice in enumerate(choices):
            n = len(choice.tokens)
            assert batch["inputs"][i, j, :n].tolist() == choice.tokens.tolist()
            assert batch["key_mask"][i, j].sum() == n


def test_a_tokenizer_with_special_tokens_of_its_own_uses_them():
    tokenizer = SubwordTokenizer(byte_level(special=("[PAD]", "[CLS]", "[SEP]")))
    encode = TextEncoder(tokenizer, max_length=30)
    row = encode("the quick", "brown é")
    cls, sep = (tokenizer.token_id(name) for name in ("[CLS]", "[SEP]"))
    assert row.tokens[0] == cls
    assert [at for at, token in enumerate(row.tokens) if token == sep] == [row.n_first - 1, len(row.tokens) - 1]
    assert row.ends[-1] == len("brown é".encode())
    assert np.all(np.diff(row.ends) >= 0)


def test_a_text_that_the_tokenizer_cannot_read_is_named():
    encode = TextEncoder(SubwordTokenizer(byte_level()), max_length=9)
    with pytest.raises(InputError, match=r"the tokenizer cannot read the text .*…': 'utf-8' codec"):
        encode("\ud800" + "a" * 99)
