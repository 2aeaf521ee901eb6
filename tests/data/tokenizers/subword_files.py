"""Small `tokenizer.json` files of the usual kinds, trained on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "the quick brown fox jumps over the lazy dog, and naïve 🐍 snakes print(i) in a loop\n" * 3


def byte_level(special: tuple[str, ...] = ("<|endoftext|>",), vocab_size: int = 300) -> str:
    """As GPT-2's: every byte is a token, so that it writes any text back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer, vocab_size, special, initial_alphabet=alphabet)


def metaspace() -> str:
    """As Llama 2's: spaces are part of words, characters that it lacks fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return _trained(tokenizer, trainers.BpeTrainer, 360, ["<unk>", "<s>", "</s>", *bytes_])


def wordpiece() -> str:
    """As BERT's: it lowers letters, drops accents and spaces, and has an unknown token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(tokenizer, trainers.WordPieceTrainer, 120, ["[UNK]", "[SEP]"])


def _trained(tokenizer: Tokenizer, trainer: type, vocab_size: int, special: Iterable[str], **options: object) -> str:
    options |= {"vocab_size": vocab_size, "special_tokens": list(special), "show_progress": False}
    tokenizer.train_from_iterator([TEXT], trainer(**options))
    return tokenizer.to_str()


KINDS = {"byte_level": byte_level, "metaspace": metaspace, "wordpiece": wordpiece}


def write_tokenizer(folder: Path, text: str | None = None, name: str = "tokenizer.json") -> Path:
    """The path of a tokenizer.json in a folder, by default `byte_level`'s."""
    (folder / name).write_text(text or byte_level())
    return folder / name
