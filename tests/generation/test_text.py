"""Text in, text out: `encode`, `decode` and `generate` of a model."""

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.data.tokenizers.bytes import SEPARATOR, encode_prompt
from tests.conftest import assert_input_errors


@pytest.fixture
def model():
    torch.manual_seed(1)
    model = LanguageModel(LanguageModelConfig(d_model=32, n_layers=1, n_heads=2, tie_embeddings=False)).eval()
    torch.nn.init.normal_(model.embedding.weight)
    torch.nn.init.normal_(model.output.weight)
    return model


def test_text_becomes_tokens_and_back(model):
    tokens = model.encode("wörld")
    assert tokens.tolist() == [SEPARATOR, *"wörld".encode()]
    assert model.decode(tokens) == model.decode(tokens.tolist()) == "wörld"
    assert model.decode([]) == ""
    assert model.decode(tokens[:3]) == "w\ufffd"  # half of a character
    assert model.encode("").tolist() == [SEPARATOR]


def test_a_text_is_continued_up_to_the_end_of_the_document(model):
    tokens = model.generate(model.encode("one")[None], 40, temperature=0)[0, 4:].tolist()
    assert model.generate("one", 40, temperature=0) == "one" + model.decode(tokens)
    with torch.no_grad():  # what it writes after the fifth token ends the document
        hidden = []
        hook = model.norm.register_forward_hook(lambda module, args, out: hidden.append(out[0, -1]))
        model(torch.cat((model.encode("one"), torch.tensor(tokens[:5])))[None])
        hook.remove()
        model.output.weight[SEPARATOR] = 100 * hidden[0] / hidden[0].norm()
    tokens = model.generate(model.encode("one")[None], 40, temperature=0)[0, 4:].tolist()
    assert model.generate("one", 40, temperature=0) == "one" + model.decode(tokens[: tokens.index(SEPARATOR)])


def test_several_texts_are_continued_each_as_if_alone(model):
    texts = ["one", "a longer prompt", ""]
    together = model.generate(texts, 12, seed=3)
    assert together == [model.generate(text, 12, seed=3 + row) for row, text in enumerate(texts)]
    assert all(written.startswith(text) for written, text in zip(together, texts))


def test_what_is_no_text_is_named(model):
    numbers = LanguageModel(LanguageModelConfig(d_model=32, n_layers=1))
    numbers.tokenizer = {"kind": "unknown"}
    assert_input_errors(
        (lambda: model.encode(b"bytes"), "text is a bytes: pass a str"),
        (lambda: model.generate("a\ud800", 3), r"text has '\\ud800' at character 1, half a surrogate pair"),
        (lambda: model.decode(encode_prompt("a")[None]), r"tokens is \(1, 2\) torch.int64: pass one row"),
        (lambda: model.decode([0.5]), r"tokens is \(1,\) torch.float32"),
        (lambda: model.decode([-1]), "integers of at least 0"),
        (lambda: numbers.encode("a"), "encode needs a tokenizer, and the model was trained on tokens without one"),
        (lambda: numbers.decode([1]), "decode needs a tokenizer"),
        (lambda: numbers.generate("a", 3), "encode needs a tokenizer"),
    )
