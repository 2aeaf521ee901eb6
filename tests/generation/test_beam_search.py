"""Beam search: against all translations, against greedy decoding, and batches against single rows."""

import itertools
import math

import pytest
import torch

from linrope.errors import InputError, NonFiniteError
from linrope.generation.beam_search import beam_search, length_divisor
from linrope.models.encoder_decoder import EncoderDecoderConfig

BEGIN, END = 0, 1


def model_of(vocab_size=4, **options):
    torch.manual_seed(5)
    sizes = {"vocab_size": vocab_size, "d_model": 8, "n_encoder_layers": 1, "n_decoder_layers": 2, "n_heads": 2}
    model = EncoderDecoderConfig(**sizes, dropout=0.0, **options).build().double()
    for parameter in model.parameters():  # far from the uniform distribution of the start
        parameter.data.mul_(6)
    return model.eval()


def sources_of(n, length, vocab_size=4):
    mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
    return torch.randint(vocab_size, (n, length)), mask


def log_p_of(model, source, tokens):
    """The log probability of a translation, its end included, from one forward pass."""
    target = torch.tensor([[BEGIN, *tokens[:-1]]])
    log_p = model(source, target).log_softmax(-1)[0]
    return sum(log_p[t, token].item() for t, token in enumerate(tokens))


@pytest.mark.parametrize("attention", ["linear", pytest.param("softmax", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("length_penalty", [0.0, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (0.6, 1.7))])
def test_a_wide_beam_finds_the_best_of_all_translations(length_penalty, attention):
    model, limit = model_of(attention=attention), 4
    sources, mask = sources_of(3, 5)
    found = beam_search(
        model, sources, mask, begin=BEGIN, end=END, max_new_tokens=limit, n_beams=64, length_penalty=length_penalty
    )
    others = [token for token in range(4) if token != END]
    for source, visible, hypothesis in zip(sources, mask, found):
        every = {
            (*tokens, END): log_p_of(model, source[visible][None], (*tokens, END)) / ((5 + n) / 6) ** length_penalty
            for n in range(1, limit + 1)
            for tokens in itertools.product(others, repeat=n - 1)
        }
        best = max(every, key=every.get)
        assert (*hypothesis.tokens.tolist(), END) == best
        assert hypothesis.score == pytest.approx(every[best], rel=1e-9)
        assert hypothesis.ended


def test_one_beam_is_greedy_decoding():
    model, limit = model_of(9), 12
    sources, mask = sources_of(20, 6, 9)
    found = beam_search(model, sources, mask, begin=BEGIN, end=END, max_new_tokens=limit, n_beams=1)
    ends = 0
    for source, visible, hypothesis in zip(sources, mask, found):
        tokens = [BEGIN]
        while len(tokens) <= limit and tokens[-1] != END:
            tokens.append(model(source[visible][None], torch.tensor([tokens]))[0, -1].argmax().item())
        ended = tokens[-1] == END
        ends += ended
        assert hypothesis.tokens.tolist() == (tokens[1:-1] if ended else tokens[1:])
        assert hypothesis.ended == ended
    assert 0 < ends < 20  # both are seen


def slow_search(model, source, limit, n_beams, length_penalty):
    """The same search in lists, one forward pass for each hypothesis."""
    beams, finished = [(0.0, ())], []
    for n in range(1, limit + 1):
        candidates = []
        for score, tokens in beams:
            log_p = model(source, torch.tensor([[BEGIN, *tokens]]))[0, -1].log_softmax(-1).tolist()
            candidates += [(score + log_p[token], (*tokens, token)) for token in range(len(log_p))]
        candidates = sorted(candidates, reverse=True)[: 2 * n_beams]
        ending = [(score, tokens) for score, tokens in candidates[:n_beams] if tokens[-1] == END]
        finished += [(score / length_divisor(n, length_penalty), tokens[:-1]) for score, tokens in ending]
        beams = [candidate for candidate in candidates if candidate[1][-1] != END][:n_beams]
        if len(finished) >= n_beams and max(finished)[0] >= beams[0][0] / length_divisor(n, length_penalty):
            break
    return max(finished, default=(beams[0][0] / length_divisor(limit, length_penalty), beams[0][1]))


@pytest.mark.parametrize("n_beams", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_a_narrow_beam_is_the_search_written_out(n_beams):
    model = model_of(9)
    sources, mask = sources_of(8, 6, 9)
    limits = torch.tensor([1, 2, 3, 4, 5, 7, 9, 11])
    options = {"n_beams": n_beams, "length_penalty": 0.8}
    found = beam_search(model, sources, mask, begin=BEGIN, end=END, max_new_tokens=limits, **options)
    for row, hypothesis in enumerate(found):
        source, limit = sources[row][mask[row]][None], limits[row].item()
        score, tokens = slow_search(model, source, limit, **options)
        assert hypothesis.tokens.tolist() == list(tokens)
        assert hypothesis.score == pytest.approx(score, rel=1e-9)
        (alone,) = beam_search(model, source, begin=BEGIN, end=END, max_new_tokens=limit, **options)
        assert alone.tokens.equal(hypothesis.tokens)


class Fixed:
    """A model whose next token depends on nothing: log probabilities in a list. It counts its steps."""

    def __init__(self, *log_p):
        self.log_p, self.steps = torch.tensor(log_p, dtype=torch.float64), 0

    def encode(self, source, source_mask=None):
        return self

    def select_rows(self, rows):
        return self

    def step(self, tokens, memory, state=None):
        self.steps += 1
        return self.log_p.expand(len(tokens), 1, -1), self


class Scripted(Fixed):
    """A model that is sure of the tokens 2, 3, 4, 2, 3, 4, 2 and the end, and finds all others equally improbable."""

    def step(self, tokens, memory, state=None):
        self.steps += 1
        likely = [2, 3, 4, 2, 3, 4, 2, END][self.steps - 1 if self.steps < 8 else 7]
        log_p = torch.full((len(tokens), 1, 30), math.log(0.1 / 29), dtype=torch.float64)
        log_p[..., likely] = math.log(0.9)
        return log_p, self


@pytest.mark.parametrize("n_beams", [1, 2, 4, 25])
def test_improbable_ends_do_not_end_the_search(n_beams):
    options = {"begin": BEGIN, "end": END, "max_new_tokens": 30, "n_beams": n_beams}
    (found,) = beam_search(Scripted(), torch.zeros(1, 2).long(), **options)
    assert found.tokens.tolist() == [2, 3, 4, 2, 3, 4, 2]


def test_it_stops_when_no_open_hypothesis_can_win():
    options = {"begin": BEGIN, "end": END, "max_new_tokens": 50, "n_beams": 3}
    likely_end = Fixed(-8.0, math.log(0.99), -6.0, -6.0)
    (found,) = beam_search(likely_end, torch.zeros(1, 2).long(), length_penalty=0.0, **options)
    assert (found.tokens.tolist(), likely_end.steps) == ([], 1)
    never_ends = Fixed(-8.0, -math.inf, -0.1, -6.0)
    (found,) = beam_search(never_ends, torch.zeros(1, 2).long(), **options)
    assert (found.tokens.tolist(), found.ended, never_ends.steps) == ([2] * 50, False, 50)
    assert beam_search(never_ends, torch.zeros(0, 2).long(), **options) == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n_beams": 0}, "n_beams=0"),
        ({"length_penalty": -1.0}, "length_penalty=-1.0"),
        ({"length_penalty": "x"}, "length_penalty='x' must be a finite number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be a whole number"),
        ({"max_new_tokens": "4"}, "max_new_tokens='4' must be a whole number"),
        ({"max_new_tokens": torch.tensor([1, 2, 3])}, "one for each row"),
        ({"end": 4}, "end=4 is no token"),
    ],
)
def test_options_out_of_range_are_named(option, message):
    options = {"begin": BEGIN, "end": END, "max_new_tokens": 3, **option}
    with pytest.raises(InputError, match=message):
        beam_search(model_of(), torch.zeros(2, 3).long(), **options)


def test_weights_that_are_not_finite_give_no_translation():
    model = model_of()
    model.output.weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="logits are not finite"):
        beam_search(model, *sources_of(2, 3), begin=BEGIN, end=END, max_new_tokens=3)
