"""Text in, text out: `encode`, `decode` and `generate` of a model."""

from unittest.mock import Mock

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.data.tokenizers.bytes import SEPARATOR, encode_prompt
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.generation import text as text_module
from linrope.generation.text import TextWriter
from linrope.serving.requests import Options, Request
from tests.conftest import assert_input_errors
from tests.data.tokenizers.subword_files import KINDS


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


def test_texts_end_before_a_stop(model):
    texts = ["one", "a longer prompt", ""]
    whole = model.generate(texts, 30, seed=3)
    stop = [whole[0][13:15], whole[2][20]]
    ends = []
    for prompt, text in zip(texts, whole):
        places = [text.find(one, len(prompt)) for one in stop]
        ends.append(min([place for place in places if place >= 0], default=len(text)))
    assert ends[0] <= 13
    assert ends[2] <= 20
    assert model.generate(texts, 30, seed=3, stop=stop) == [text[:end] for text, end in zip(whole, ends)]
    assert model.generate("one", 30, seed=3, stop=whole[0][5]) == whole[0][: whole[0].index(whole[0][5], 3)]
    assert model.generate(texts, 30, seed=3, stop=None) == whole
    for wrong in ("", ["a", ""], [3], 3):
        assert_input_errors(
            (lambda wrong=wrong: model.generate("a", 3, stop=wrong), "stop=.* must be a text or a list")
        )


def test_words_are_apart_from_those_of_the_prompt(monkeypatch):
    """A decoder that does not know the prompt leaves out the space before the first word."""
    for kind in KINDS:
        tokenizer = SubwordTokenizer(KINDS[kind]())
        prompt, tokens = "the dog", tokenizer.encode_document(b"the dog chases the cat")[0].tolist()
        added = tokens[len(tokenizer.encode_document(prompt.encode())[0]) :]
        model = LanguageModel(LanguageModelConfig(vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1)).eval()
        model.tokenizer = tokenizer.to_serialized()
        with monkeypatch.context() as patch:
            patch.setattr(text_module, "stream", lambda *args, **options: (torch.tensor([token]) for token in added))  # noqa: B023
            assert model.generate(prompt, len(added)) == "the dog chases the cat"
            assert model.generate(prompt, len(added), stop=[" cat", "s the"]) == "the dog chase"
        shown: list[str] = []
        writer = TextWriter(model, shown.append)
        writer.read(prompt)
        sampler = Mock(draw=Mock(side_effect=[torch.tensor([token]) for token in added]))
        assert writer.continue_text(len(added), sampler)[0] == " chases the cat"
        choice = Request(model.encode(prompt).numpy(), Options(max_tokens=len(added)), tokenizer).choices[0]
        for token in added:
            choice.add(token)
        assert choice.take().text == " chases the cat"
        assert model.generate("  two", 0) == "  two"  # the prompt itself, whatever its tokens stand for


def test_what_was_shown_before_an_interruption_is_in_the_state(model):
    """The last token too, which is read when the next one is drawn."""
    shown: list[str] = []
    writer = TextWriter(model, shown.append)
    writer.read("abc")
    tokens = (torch.tensor([token]) for token in b"wxyz")
    sampler = Mock(draw=Mock(side_effect=[*tokens, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        writer.continue_text(8, sampler)
    assert "".join(shown) == "wxyz"
    assert writer.state.recent[0].tolist() == [SEPARATOR, *b"abcwxyz"]


def test_what_is_no_text_is_named(model):
    numbers = LanguageModel(LanguageModelConfig(d_model=32, n_layers=1))
    numbers.tokenizer = {"kind": "unknown"}
    assert_input_errors(
        (lambda: model.encode(b"bytes"), "text is a bytes: pass a str"),
        (lambda: model.generate("a\ud800", 3), r"text has '\\ud800' at character 1, half a surrogate pair"),
        (lambda: model.decode(encode_prompt("a")[None]), r"tokens is \(1, 2\) torch.int64: pass one row"),
        (lambda: model.decode([0.5]), r"tokens is \(1,\) torch.float32"),
        (lambda: model.decode([-1]), "integers of at least 0"),
        (lambda: model.decode([97, 257]), "tokens has 257: the model's vocabulary ends at 256"),
        (lambda: model.decode("abc"), "tokens='abc' is no row of tokens"),
        (lambda: model.decode([[1], [1, 2]]), "is no row of tokens"),
        (lambda: numbers.encode("a"), "encode needs a tokenizer, and the model was trained on tokens without one"),
        (lambda: numbers.decode([1]), "decode needs a tokenizer"),
        (lambda: numbers.generate("a", 3), "encode needs a tokenizer"),
    )
