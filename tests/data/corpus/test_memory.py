"""Documents in memory are the corpus that the same documents in files are."""

import torch

from linrope.data.corpus.opening import open_text
from linrope.data.tokenizers.base import open_tokenizer
from linrope.training import TextDataModule, text_of_documents
from tests.conftest import assert_input_errors, write_documents
from tests.data.tokenizers.subword_files import write_tokenizer


def test_documents_in_memory_are_those_in_files(tmp_path):
    folder = write_documents(tmp_path / "texts", [50, 3, 120])
    files = open_text(folder, [1.0, 0.0, 0.0]).corpora["train"]
    texts = [document.path.read_bytes() for document in files.documents]
    memory = text_of_documents([*texts[:2], b"", texts[2]]).corpora["train"]
    assert torch.equal(memory.tokens(0, len(memory)), files.tokens(0, len(files)))
    assert torch.equal(memory.tokens(40, 60), files.tokens(40, 60))
    assert (memory.n_documents, memory.n_bytes, memory.separator) == (3, 173, files.separator)
    assert memory.text_bytes(0, 10) is None  # a token is a byte
    assert memory.fingerprint() != text_of_documents(texts[::-1]).corpora["train"].fingerprint()


def test_subwords_have_their_bytes(tmp_path):
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)), "tokenizer")
    opened = text_of_documents(["for i in range", "größer"], ["x"], tokenizer=tokenizer)
    train = opened.corpora["train"]
    n_bytes = train.text_bytes(0, len(train))
    assert n_bytes.sum() == train.n_bytes == len("for i in range") + len("größer".encode())
    assert n_bytes[train.tokens(0, len(train)) == tokenizer.separator].tolist() == [0, 0]
    assert (opened.vocab_size, opened.tokenizer) == (tokenizer.vocab_size, tokenizer)


class FromDatabase(TextDataModule):
    def read(self):
        rows = [f"row {number}: the quick brown fox jumps over the lazy dog\n" for number in range(40)]
        return text_of_documents(rows[:30], rows[30:], origin="my database")


def test_a_data_module_of_ones_own_overrides_read():
    data = FromDatabase(context=32, batch_size=2)
    data.setup("fit")
    assert data.origin == "my database"
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert data.open() is data.open()
    assert data.tokenizer.name == "bytes"
    assert data.corpora["val"].tokens(0, 6).tolist() == list(b"row 30")


def test_what_is_no_document_is_named():
    assert_input_errors(
        (lambda: text_of_documents("one string"), "documents are one string: give a list"),
        (lambda: text_of_documents(["a", 3]), "document 1 is a int: give strings or bytes"),
        (lambda: text_of_documents(["\ud800"]), "document 0 cannot be tokenized: .*surrogates not allowed"),
    )
