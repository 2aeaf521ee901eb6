"""Bytes, and tokenizers of tokenizer.json files: text as text, every byte counted, decoding in pieces."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from linrope.data.tokenizers.base import open_tokenizer, tokenizer_from_serialized, tokenizer_to_serialized
from linrope.data.tokenizers.bytes import SEPARATOR, ByteTokenizer, TextDecoder, encode, encode_prompt
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import InputError
from tests.data.tokenizers.subword_files import KINDS, TEXT, byte_level, metaspace, wordpiece, write_tokenizer

TEXTS = [TEXT, "naïve 🐍 text\n", "  two  spaces ", "日本語", "x", "a<|endoftext|>b</s>c[SEP]d"]


@pytest.fixture(params=KINDS)
def tokenizer(request) -> SubwordTokenizer:
    return SubwordTokenizer(KINDS[request.param]())


def test_bytes_are_tokens_and_decode_to_the_text_in_pieces_too():
    assert encode("aé").tolist() == [0x61, 0xC3, 0xA9]
    assert encode("").dtype == encode("a").dtype == torch.int64
    assert encode(bytes(range(256))).tolist() == list(range(256))
    assert encode_prompt("a").tolist() == [SEPARATOR, 0x61]
    assert ByteTokenizer.vocab_size == SEPARATOR + 1 == 257
    assert TextDecoder().feed(encode("naïve 🐍 text\n")) == "naïve 🐍 text\n"
    assert TextDecoder().feed([0x61, SEPARATOR, 0xFF, 0x62]) == "a\ufffdb"
    assert TextDecoder().feed([0x61, 257, 1000]) == "a\ufffd\ufffd"  # of a model that knows more tokens than bytes
    decoder = TextDecoder()
    assert [decoder.feed([byte]) for byte in "é🐍".encode()] == ["", "é", "", "", "", "🐍"]
    assert [decoder.finish(), decoder.feed([0xC3]), decoder.finish()] == ["", "", "\ufffd"]


def test_each_token_stands_for_its_own_bytes():
    tokenizer = SubwordTokenizer(byte_level())
    tokens, n_bytes = tokenizer.encode_document(b"the the dog")
    names = [tokenizer._tokenizer.id_to_token(token) for token in tokens.tolist()]
    # "Ġ" is the space before a word: the file's own offsets leave it out, and it must count all the same
    assert [len(name) for name in names] == n_bytes.tolist()
    accented, n_bytes = tokenizer.encode_document("çé".encode())  # no merges: two tokens for each character
    assert (len(accented), n_bytes.tolist()) == (4, [2, 0, 2, 0])


def test_bytes_that_a_tokenizer_drops_or_changes_count():
    tokenizer = SubwordTokenizer(wordpiece())
    tokens, n_bytes = tokenizer.encode_document(b"  the   dog  ")
    assert tokenizer.decoder().feed(tokens.tolist()) == "the dog"
    assert n_bytes.sum() == 13
    assert n_bytes[0] >= 3  # the two spaces before it, and at least "t"
    nothing, n_bytes = tokenizer.encode_document(b"   ")
    assert len(nothing) == len(n_bytes) == 0


@pytest.mark.parametrize("text", TEXTS)
def test_every_byte_counts_and_pieces_decode_to_the_same_text_as_the_whole(tokenizer, text):
    tokens, n_bytes = tokenizer.encode_document(text.encode())
    assert tokens.shape == n_bytes.shape
    assert n_bytes.sum() == len(text.encode())
    assert n_bytes.min() >= 0
    decoder = tokenizer.decoder()
    pieces = [decoder.feed([token]) for token in [*tokens.tolist(), tokenizer.separator]]
    assert "".join(pieces) + decoder.finish() == tokenizer._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_goes_on_after_its_first_tokens_as_the_whole_does(tokenizer, text):
    """With the space before its next word, which some tokenizers leave out at the beginning of a text."""
    tokens = tokenizer.encode_prompt(text).tolist()
    whole = tokenizer._tokenizer.decode(tokens[1:], skip_special_tokens=False)
    for n in range(1, len(tokens) + 1):
        first, rest = tokenizer.decoder(), tokenizer.decoder(tokens[:n])
        begun = first.feed(tokens[:n])
        if not first.finish():  # not in the middle of a character
            assert begun + rest.feed(tokens[n:]) + rest.finish() == whole


def test_bytes_that_are_no_text_do_not_wait_for_the_end():
    tokenizer = SubwordTokenizer(byte_level())
    invalid = next(n for n in range(tokenizer.vocab_size) if tokenizer._tokenizer.id_to_token(n) == "ÿ")  # 0xFF
    decoder = tokenizer.decoder()
    pieces = [decoder.feed([invalid]) for _ in range(100)]
    assert len("".join(pieces)) == 96
    assert "".join(pieces) + decoder.finish() == "\ufffd" * 100
    half, rest = tokenizer.encode_document("é".encode())[0].tolist()
    letter = tokenizer.encode_document(b"x")[0].tolist()
    assert decoder.feed([half, 10**6, rest, *letter]) == "\ufffd\ufffd\ufffdx"  # half an é is no é


def test_an_unfinished_character_shows_at_the_end_and_an_unknown_token_at_once():
    tokenizer = SubwordTokenizer(byte_level())
    tokens, _ = tokenizer.encode_document("é🐍".encode())
    decoder = tokenizer.decoder()
    assert [decoder.feed(tokens[:1]), decoder.feed([tokens[1]])] == ["", "é"]
    assert decoder.feed(tokens[2:-1].tolist()) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""
    assert decoder.feed([tokenizer.vocab_size + 5]) == "\ufffd"


def test_a_special_tokens_name_in_a_text_is_text():
    for kind, name in (("byte_level", "<|endoftext|>"), ("metaspace", "</s>"), ("wordpiece", "[SEP]")):
        tokenizer = SubwordTokenizer(KINDS[kind]())
        assert tokenizer._tokenizer.id_to_token(tokenizer.separator) == name
        assert Tokenizer.from_str(KINDS[kind]()).encode(f"a{name}b").ids.count(tokenizer.separator) == 1
        tokens, _ = tokenizer.encode_document(f"a{name}b".encode())
        assert tokenizer.separator not in tokens


def test_a_text_with_a_separator_that_is_a_part_of_words_is_refused():
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("b", -2.0)], unk_id=0))
    raw.add_special_tokens(["</s>"])
    tokenizer = SubwordTokenizer(raw.to_str())
    assert tokenizer.encode_batch(["ab", "a"]) == [[2, 3], [2]]
    message = r"the text 'a</s>b' holds the separator of tokenizer\.json, token 1, which would end it"
    with pytest.raises(InputError, match=message):
        tokenizer.encode_batch(["ab", "a</s>b"])
    with pytest.raises(ValueError, match="holds the tokenizer's separator, token 1"):
        tokenizer.encode_document(b"a</s>b")


def test_a_tokenizer_without_an_end_gets_a_separator_after_all_tokens():
    tokenizer = SubwordTokenizer(byte_level(special=("<pad>",)))
    assert tokenizer.separator == 300
    assert tokenizer.vocab_size == 301
    assert SubwordTokenizer(byte_level()).vocab_size == 300
    assert tokenizer.encode_prompt("x").tolist()[0] == 300
    decoder = tokenizer.decoder()
    assert decoder.feed([300]) + decoder.finish() == ""


def test_truncation_and_padding_of_the_file_are_not_done():
    raw = Tokenizer.from_str(byte_level())
    raw.enable_truncation(4)
    raw.enable_padding(length=1000)
    tokenizer = SubwordTokenizer(raw.to_str())
    tokens, _ = tokenizer.encode_document(TEXT.encode())
    assert tokens.tolist() == SubwordTokenizer(byte_level()).encode_document(TEXT.encode())[0].tolist()
    assert tokenizer.fingerprint == SubwordTokenizer(byte_level()).fingerprint


def test_the_bytes_that_tokens_decode_to():
    for make in (byte_level, metaspace):
        tokenizer = SubwordTokenizer(make())
        n_bytes = tokenizer.token_bytes()
        assert n_bytes.shape == (tokenizer.vocab_size,)
        assert n_bytes[tokenizer.separator] == 0
        tokens, _ = tokenizer.encode_document("dog naïve 🐍 日".encode())
        decoded = tokenizer._decoded(*tokens.tolist())
        # the space that is put before the first word is dropped again where it begins a text
        assert n_bytes[tokens].sum() == len(decoded.encode()) + (make is metaspace)
    assert ByteTokenizer().token_bytes().tolist() == [1] * 256 + [0]


def test_special_tokens_stand_for_no_bytes():
    tokenizer = SubwordTokenizer(byte_level(special=("<|begin_of_text|>", "<|end_of_text|>")))
    bos = tokenizer.token_id("<|begin_of_text|>")
    assert (tokenizer.token_bytes()[[bos, tokenizer.separator]] == 0).all()
    tokenizer = SubwordTokenizer(metaspace())
    numbers = [tokenizer.token_id(name) for name in ("<unk>", "<s>", "</s>", "<0x0A>", "<0xFF>")]
    assert tokenizer.token_bytes()[numbers].tolist() == [0, 0, 0, 1, 1]


def test_the_fingerprint_is_of_what_the_file_says():
    text = byte_level()
    indented = json.dumps(json.loads(text), indent=3)
    assert indented != text
    assert SubwordTokenizer(text).fingerprint == SubwordTokenizer(indented).fingerprint
    assert SubwordTokenizer(text).fingerprint != SubwordTokenizer(byte_level(vocab_size=299)).fingerprint
    assert ByteTokenizer().fingerprint is None


def test_the_plain_form_makes_the_same_tokenizer(tokenizer):
    again = tokenizer_from_serialized(tokenizer.to_serialized())
    assert again.fingerprint == tokenizer.fingerprint
    assert np.array_equal(again.encode_document(TEXT.encode())[0], tokenizer.encode_document(TEXT.encode())[0])
    assert isinstance(tokenizer_from_serialized(ByteTokenizer().to_serialized()), ByteTokenizer)
    assert isinstance(tokenizer_from_serialized(None), ByteTokenizer)
    assert tokenizer_from_serialized(tokenizer_to_serialized(None)) is None
    with pytest.raises(InputError, match=r"has type 'runes', which this version of linrope does not know"):
        tokenizer_from_serialized({"kind": "runes"})


def test_a_file_that_is_no_tokenizer_and_a_prompt_that_is_no_text_are_named(tmp_path):
    with pytest.raises(InputError, match=r"prompt='a\\udcff' cannot be read by the model's tokenizer"):
        SubwordTokenizer(byte_level()).encode_prompt("a\udcff")
    file = write_tokenizer(tmp_path, '{"model": 3}')
    with pytest.raises(InputError, match=r"--tokenizer='.*tokenizer\.json' is not a tokenizer\.json of Hugging Face"):
        open_tokenizer(str(file), "--tokenizer")
    with pytest.raises(InputError, match=r"--tokenizer='.*' cannot be read \(No such .*Did you mean 'tokenizer\.js"):
        open_tokenizer(str(tmp_path / "tokeniser.json"), "--tokenizer")


def test_a_tokenizer_without_what_it_needs_is_named(tmp_path):
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    for model, message in [
        (None, r"is not a tokenizer\.json .*Model missing"),
        ({**words, "vocab": {}}, r"has no token: give one with 1 to"),
        ({**words, "vocab": {"a": 4_000_000_000}}, r"numbers its tokens up to 4,000,000,000: give one with 1 to"),
    ]:
        file = write_tokenizer(tmp_path, json.dumps({"version": "1.0", **({} if model is None else {"model": model})}))
        with pytest.raises(InputError, match=rf"--tokenizer='.*json' {message}"):
            open_tokenizer(str(file), "--tokenizer")
    tokenizer = SubwordTokenizer(json.dumps({"version": "1.0", "model": words}))
    assert tokenizer.encode_document(b"a")[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"the tokenizer has no token for a part of it \(.*Missing \[UNK\]"):
        tokenizer.encode_document(b"b")
    with pytest.raises(InputError, match=r"prompt='b' cannot be read by the model's tokenizer: the tokenizer has no"):
        tokenizer.encode_prompt("b")
    with pytest.raises(InputError, match=r"--tokenizer='/dev/zero' is a pipe or a device"):
        open_tokenizer("/dev/zero", "--tokenizer")
