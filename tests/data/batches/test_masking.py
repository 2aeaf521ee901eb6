"""Masked rows: their shares, whole words, and that they follow from the key alone."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from linrope.data.batches.masking import HIDDEN, Masking
from linrope.data.tokenizers.bytes import ByteTokenizer, encode
from linrope.data.tokenizers.special_tokens import SpecialTokens
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.losses import IGNORE
from tests.data.tokenizers.subword_files import write_tokenizer

TEXT = "for number in range(10):\n\tprint(number, 'größe')\n"
TOKENS = torch.cat([encode(TEXT), torch.tensor([256]), encode(TEXT)])


def test_the_special_tokens_of_bytes_follow_the_separator():
    assert SpecialTokens.of(ByteTokenizer()) == SpecialTokens(mask=257, cls=258, sep=259, pad=260, vocab_size=261)


def test_special_tokens_of_a_vocabulary_keep_their_numbers(tmp_path):
    tokenizer = SubwordTokenizer(write_tokenizer(tmp_path).read_text())
    tokenizer._tokenizer.add_special_tokens(["[MASK]"])
    special = SpecialTokens.of(tokenizer)
    assert special.mask == tokenizer.token_id("[MASK]")
    assert (special.cls, special.sep, special.pad) == tuple(range(tokenizer.vocab_size, tokenizer.vocab_size + 3))
    assert special.vocab_size == tokenizer.vocab_size + 3


def test_shares_are_as_asked_and_spaces_are_never_hidden():
    masking = Masking(ByteTokenizer(), 0.15, whole_words=False)
    rows = [masking(TOKENS, 1, i) for i in range(2000)]
    inputs, targets = (torch.stack([row[name] for row in rows]) for name in ("inputs", "targets"))
    asked = targets != IGNORE
    words = torch.tensor([chr(token).strip() != "" and token != 256 for token in TOKENS.tolist()])
    assert not asked[:, ~words].any()
    assert abs(asked[:, words].double().mean().item() - 0.15) < 0.005
    assert torch.equal(torch.where(asked, targets, inputs), TOKENS.expand_as(inputs))
    hidden = (inputs[asked] == masking.special.mask).double().mean().item()
    same = (inputs[asked] == targets[asked]).double().mean().item()
    assert abs(hidden - HIDDEN) < 0.01
    assert abs(same - 0.1) < 0.01
    assert asked.any(1).all()


def test_words_are_hidden_whole():
    masking = Masking(ByteTokenizer(), 0.3, whole_words=True)
    spans = []  # of the words
    for at, token in enumerate(TOKENS.tolist()):
        if token == 256 or chr(token).isspace():
            spans.append([])
        elif spans:
            spans[-1].append(at)
        else:
            spans.append([at])
    counts = [0, 0]
    for i in range(200):
        asked = masking(TOKENS, 2, i)["targets"] != IGNORE
        for span in filter(None, spans):
            assert len(set(asked[span].tolist())) == 1
            counts[asked[span[0]]] += 1
    assert abs(counts[1] / sum(counts) - 0.3) < 0.05


def test_masks_follow_from_the_key_alone():
    masking = Masking(ByteTokenizer(), 0.15, whole_words=True)
    first, again, other = masking(TOKENS, 1, 2), masking(TOKENS, 1, 2), masking(TOKENS, 1, 3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["targets"], other["targets"])


def test_a_row_of_spaces_has_nothing_to_hide():
    masked = Masking(ByteTokenizer(), 0.9, whole_words=True)(encode("  \n "), 0)
    assert torch.equal(masked["inputs"], encode("  \n "))
    assert (masked["targets"] == IGNORE).all()


def test_words_of_subwords_begin_at_a_space(tmp_path):
    tokenizer = SubwordTokenizer(write_tokenizer(tmp_path).read_text())
    tokens, _ = tokenizer.encode_document(b"the quick brown fox jumps")
    begins, between = (table[tokens] for table in tokenizer.word_parts())
    text = [tokenizer._tokenizer.id_to_token(token) for token in tokens.tolist()]
    for token, begin, alone in zip(text, begins, between):
        assert begin == token.startswith((" ", "Ġ", "▁"))
        assert alone == (token.strip(" Ġ▁") == "")


@pytest.mark.parametrize("kind", [models.WordLevel, models.WordPiece])
def test_each_token_of_a_vocabulary_of_words_is_a_word(kind):
    words = ["[UNK]", "[SEP]", "the", "quick", "brown", "fox", "\n"]
    made = Tokenizer(kind({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(words[:2])
    masking = Masking(SubwordTokenizer(made.to_str()), 0.3, whole_words=True)
    tokens = torch.tensor([2, 3, 4, 5] * 5)
    asked = torch.stack([masking(tokens, 5, i)["targets"] != IGNORE for i in range(200)]).double()
    assert abs(asked.mean().item() - 0.3) < 0.05


def test_a_vocabulary_of_subwords_may_have_the_token_of_a_heading():
    """ "##" continues a word in WordPiece alone."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(["## heading\n## heading"] * 3, trainers.BpeTrainer(vocab_size=20, show_progress=False))
    tokenizer = SubwordTokenizer(made.to_str())
    assert tokenizer.token_id("##") is not None
    tokens, _ = tokenizer.encode_document(b"## ding ding")
    begins, between = (table[tokens] for table in tokenizer.word_parts())
    text = [made.id_to_token(token) for token in tokens.tolist()]
    assert len(text) > 3
    assert begins.tolist() == [token.startswith("Ġ") for token in text]
    assert between.tolist() == [token == "Ġ" for token in text]
