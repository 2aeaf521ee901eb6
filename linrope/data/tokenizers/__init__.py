"""Tokenizers: bytes, and those of tokenizer.json files."""
