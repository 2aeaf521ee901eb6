import torch

from linrope.data.tokenizers.bytes import SEPARATOR, VOCAB_SIZE, TextDecoder, encode, encode_prompt


def test_tokens_are_the_bytes_of_utf8_and_decode_to_the_text():
    assert encode("aé").tolist() == [0x61, 0xC3, 0xA9]
    assert encode("").shape == (0,)
    assert encode_prompt("a").tolist() == [SEPARATOR, 0x61]
    assert encode("").dtype == encode("a").dtype == torch.int64
    assert encode(bytes(range(256))).tolist() == list(range(256))
    assert TextDecoder().feed(encode("naïve 🐍 text\n")) == "naïve 🐍 text\n"
    assert VOCAB_SIZE == SEPARATOR + 1 == 257


def test_decoding_leaves_out_separators_and_marks_invalid_bytes():
    assert TextDecoder().feed([0x61, SEPARATOR, 0xFF, 0x62]) == "a\ufffdb"
    assert (
        TextDecoder().feed([0x61, 257, 1000, 0x62]) == "a\ufffd\ufffdb"
    )  # of a model that knows more tokens than bytes


def test_pieces_decode_to_the_same_text_as_the_whole():
    decoder = TextDecoder()
    pieces = [decoder.feed([byte]) for byte in "é🐍".encode()]
    assert pieces == ["", "é", "", "", "", "🐍"]
    assert decoder.finish() == ""
    assert decoder.feed([0xC3]) == ""
    assert decoder.finish() == "\ufffd"
