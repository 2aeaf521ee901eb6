"""Generation: prompts in segments and of different lengths, forked states, the repetition penalty, state files."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.generation.decoding import REPETITION_WINDOW, read, require_memory, stream
from linrope.generation.prompt_state import load_prompt_state, save_prompt_state
from linrope.generation.sampling import _inverse, _penalised
from linrope.layers.state import tensors_of
from linrope.positions.base import PositionsConfig
from linrope.utils.memory import memory_of
from tests.conftest import assert_input_errors, covering
from tests.models.test_language_model import CONFIGS, SMALL

LENGTHS = (1, 7, 33, 70, 70, 64)
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64, and sums in another order
BY_DEFAULT = ("recipe", "hybrid", "sinusoidal", "window")


@pytest.fixture(params=covering(CONFIGS, BY_DEFAULT))
def model(request):
    torch.manual_seed(0)
    return LanguageModel(CONFIGS[request.param]).double().eval()


@pytest.fixture
def recipe():
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS["recipe"]).eval()
    torch.nn.init.normal_(model.output.weight, std=0.3)  # a distribution with some shape
    return model


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 40, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("segment_length", covering([1, 16, 33, 1000], [1, 16]))
def test_segments_and_the_whole_leave_the_same(model, prompts, segment_length):
    whole, after = model(prompts[3][None], return_state=True)
    state = read(model, prompts[3][None], segment_length=segment_length)
    torch.testing.assert_close(state.logits, whole[:, -1], **EXACT)
    torch.testing.assert_close(tensors_of(state.state), tensors_of(after), **EXACT)
    assert state.length == 70
    assert torch.equal(state.recent, prompts[3][None])


@pytest.mark.parametrize("segment_length", covering([16, 1000], [16]))
def test_prompts_of_different_lengths_are_each_continued_as_if_alone(model, prompts, segment_length):
    together = read(model, prompts, segment_length=segment_length)
    for row, prompt in enumerate(prompts):
        alone = model(prompt[None])
        torch.testing.assert_close(together.logits[row], alone[0, -1], **EXACT)
    drawn = torch.stack(list(stream(model, together, 9, seed=5, repetition_penalty=1.3, top_k=9)), dim=1)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], 9, seed=np.int64(5 + row), repetition_penalty=1.3, top_k=9)
        assert torch.equal(torch.cat((prompt, drawn[row])), alone[0])


def test_a_fork_is_continued_in_several_ways(model, prompts):
    forked = read(model, torch.stack(prompts[3:5])).fork(3)
    ways = torch.stack(list(stream(model, forked, 8, seed=2)), dim=1)
    assert ways.shape == (6, 8)
    for row in range(6):
        alone = model.generate(prompts[3 + row // 3][None], 8, seed=2 + row)
        assert torch.equal(ways[row], alone[0, 70:])
    assert len({tuple(way.tolist()) for way in ways}) == 6


def test_a_list_comes_back_as_a_list_and_after_a_state_only_the_new_tokens(recipe, prompts):
    written = recipe.generate(prompts, 4, temperature=0)
    for text, prompt in zip(written, prompts, strict=True):
        assert torch.equal(text, recipe.generate(prompt[None], 4, temperature=0)[0])
    state = read(recipe, torch.stack(prompts[3:5]))
    before = [tensor.clone() for tensor in tensors_of(state.state)]
    for _ in range(2):  # continuing does not change a state
        assert torch.equal(recipe.generate(state, 4, temperature=0), torch.stack(written[3:5])[:, -4:])
    assert all(map(torch.equal, tensors_of(state.state), before))
    assert recipe.generate(state, 0).shape == (2, 0)


def test_memory_does_not_grow_with_the_prompt(recipe):
    """What a state holds; and reading asks for logits of one token only, not of a segment."""
    sizes = []
    for length in (REPETITION_WINDOW, 5 * REPETITION_WINDOW):
        state = read(recipe, torch.zeros(1, length, dtype=torch.int64), segment_length=512)
        sizes.append(sum(x.untyped_storage().nbytes() for x in tensors_of(state.state)))
        assert state.recent.shape == (1, REPETITION_WINDOW)
    assert sizes[0] == sizes[1]
    asked = []
    recipe.output.register_forward_hook(lambda module, args, out: asked.append(out.shape[1]))
    read(recipe, torch.zeros(1, 300, dtype=torch.int64), segment_length=128)
    assert asked == [1, 1, 1]


def test_the_penalty_is_ctrls_over_the_recent_tokens(recipe, prompts):
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0]] * 2)
    recent = torch.tensor([[0, 3, 0], [-1, -1, 2]])
    penalised = _penalised(logits, recent, 2.0)
    assert penalised.tolist() == [[1.0, -1.0, 0.5, -6.0], [2.0, -1.0, 0.25, -3.0]]
    # a token that was written counts as one that was read, and those beyond the window do not count
    first = torch.tensor([[3]])
    state = read(recipe, torch.cat((first, torch.full((1, REPETITION_WINDOW - 1), 7)), dim=1))
    assert 3 in state.recent
    assert 3 not in read(recipe, torch.tensor([[9]]), state).recent
    assert read(recipe, torch.tensor([[9]]), state).recent[0, -1] == 9
    # a strong one never repeats
    plain = recipe.generate(prompts[1][None], 30, temperature=0)[0, 7:].tolist()
    assert len(set(plain)) < 30
    text = recipe.generate(prompts[1][None], 30, temperature=0, repetition_penalty=1e6)[0].tolist()
    assert len(set(text)) == len(set(text[:7])) + 30


def test_a_draw_is_the_inverse_of_the_running_sum():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).double().expand(4, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert _inverse(probabilities, uniform).tolist() == [1, 1, 3, 3]


def test_rows_without_a_seed_follow_the_global_generator(recipe, prompts):
    torch.manual_seed(4)
    first, second = (recipe.generate(prompts[1][None], 12) for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(recipe.generate(prompts[1][None], 12), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_saved_state_is_continued_as_the_original(model, prompts, tmp_path, ragged):
    model = model.float()
    state = read(model, prompts if ragged else prompts[3][None])
    save_prompt_state(tmp_path / "state.pt", model, state)
    loaded = load_prompt_state(tmp_path / "state.pt", model)
    assert torch.equal(loaded.logits, state.logits)
    ours, again = (list(stream(model, c, 8, seed=1, repetition_penalty=1.5)) for c in (state, loaded))
    assert all(map(torch.equal, ours, again))
    torch.load(tmp_path / "state.pt", weights_only=True)  # nothing but tensors and plain values


def test_a_state_of_another_model_is_refused_with_what_differs(recipe, prompts, tmp_path):
    path = tmp_path / "state.pt"
    state = read(recipe, prompts[1][None])
    save_prompt_state(path, recipe, state)
    nowhere = tmp_path / "nowhere" / "state.pt"
    assert_input_errors((lambda: save_prompt_state(nowhere, recipe, state), "lies in a folder that does not exist"))
    wider = LanguageModel(dataclasses.replace(recipe.config, d_ff=32, output_gate=False))
    differs = r"belongs to another model.*\n  model.d_ff: None in the file, 32 in this model\n  model.out"
    assert_input_errors((lambda: load_prompt_state(path, wider), differs))
    with torch.no_grad():
        recipe.norm.weight[3] += 1e-6
    assert_input_errors((lambda: load_prompt_state(path, recipe), "the same configuration, but other weights"))


def test_a_damaged_state_file_or_none_is_refused(recipe, prompts, tmp_path):
    path = tmp_path / "state.pt"
    save_prompt_state(path, recipe, read(recipe, prompts[1][None]))
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    torch.save({"format": "something else"}, tmp_path / "other.pt")
    (tmp_path / "flipped.pt").write_bytes(bytes(damaged))
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    (tmp_path / "sate").mkdir()  # no file: it is not suggested
    missing = r"state file '.*sate.pt' does not exist. Did you mean 'state.pt'"
    damage = dict.fromkeys(("flipped.pt", "cut.pt"), "damaged or no state file")
    for name, message in {"sate.pt": missing, "other.pt": "is not in the format", **damage}.items():
        assert_input_errors((partial(load_prompt_state, tmp_path / name, recipe), message))


def alterations_of(value):
    """Each value that differs from the given one in one place."""
    if isinstance(value, dict):
        for name in value:
            yield {other: x for other, x in value.items() if other != name}
            yield from ({**value, name: other} for other in alterations_of(value[name]))
        yield {**value, "more": 1}
    elif isinstance(value, list):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        yield from (
            [*value[:i], other, *value[i + 1 :]] for i in range(len(value)) for other in alterations_of(value[i])
        )
        yield [*value, *value[:1]]
    elif isinstance(value, torch.Tensor):
        yield from (value[None], value[..., :-1].clone(), value.to(torch.float16), value.long().neg() - 2)
        yield value.clone().index_fill_(-1, torch.tensor([0]), 7)
    if value is not None:
        yield None
    yield "text" if isinstance(value, int) else 3
    yield [value]


def test_an_altered_state_file_is_refused_whatever_was_altered(prompts, tmp_path):
    model = LanguageModel(CONFIGS["hybrid"]).eval()
    save_prompt_state(tmp_path / "state.pt", model, read(model, prompts[1:3]))
    content = torch.load(tmp_path / "state.pt", weights_only=True)
    n_altered = 0
    for altered in alterations_of(content):
        torch.save(altered, tmp_path / "altered.pt")
        with pytest.raises(InputError, match=r"state file '.*altered.pt' (was altered|is not in the format)"):
            load_prompt_state(tmp_path / "altered.pt", model)
        n_altered += 1
    assert n_altered > 200
    torch.save(content, tmp_path / "again.pt")
    load_prompt_state(tmp_path / "again.pt", model)


def test_a_temperature_may_be_a_number_of_any_type(recipe, prompts):
    for number in (10**20, np.float32(0.5), np.float64(2)):
        expected, found = (recipe.generate(prompts[1][None], 4, temperature=t, seed=1) for t in (float(number), number))
        assert torch.equal(found, expected)


def test_bad_calls_are_named(recipe, prompts):
    state = read(recipe, prompts[1][None])
    assert_input_errors(
        (lambda: read(recipe, torch.zeros(1, 0, dtype=torch.int64)), "at least one token"),
        (lambda: read(recipe, []), r"tokens is list \[\], not a list of prompts"),
        (lambda: recipe.generate([1, 2, 3], 4), r"tokens is list \[1, 2, 3\], not .*: pass .*tensor\(\[\[1, 2, 3\]\]"),
        (lambda: recipe.generate([[1, 2], [3]], 4), r"tokens is list \[\[1, 2\], \[3\]\], not a list of prompts"),
        (lambda: recipe.generate(None, 4), "tokens is NoneType None, not a list of prompts"),
        (lambda: recipe.stream("text", 4), r"tokens is text: pass its tokens, \[model.encode\(text\)\]"),
        (lambda: recipe.generate([prompts[0], "text"], 4), "tokens is text: pass its tokens"),
        (lambda: recipe("text"), r"tokens is a str: pass int64 of shape \(B, T\), model.encode\(text\)\[None\] for a"),
        (lambda: recipe.generate("text", 4), "encode needs a model of text: this one knows 40 tokens"),
        (lambda: recipe.stream(state, 3, temprature=1), "temprature=1 is not an option of .* mean 'temperature'"),
        (lambda: recipe.generate(state, 3, num_beams=2), "num_beams=2 is not an option of generation: choose among"),
        (lambda: recipe.generate(state, 3, segment_lenght=2), "Did you mean 'segment_length'"),
        (lambda: read(recipe, [prompts[0], prompts[1][:0]]), r"tokens\[1\] is empty"),
        (lambda: read(recipe, prompts[:2], state), "and a state is given: read each prompt alone"),
        (lambda: read(recipe, prompts[1][None].expand(2, -1), state), "state.*this call needs"),
        (lambda: read(recipe, prompts[1][None], segment_length=0), "segment_length=0"),
        (lambda: recipe.stream(state, 3, repetition_penalty=0), "repetition_penalty=0 must be a number from 1e-6"),
        (lambda: state.fork(0), "n=0 must be a whole number, at least 1"),
        (lambda: recipe.stream(state, -3), "max_new_tokens=-3"),
        (lambda: recipe.stream(state, True), "max_new_tokens=True"),
        (lambda: recipe.stream(state, 3, temperature=10**400), "temperature=1000.* must be a finite number"),
    )


def test_keys_and_values_beyond_the_memory_are_refused_before_the_reading():
    there = memory_of()
    softmax = LanguageModel(LanguageModelConfig(**SMALL, attention=["linear", "softmax"]))
    per_token = 2 * 16 * 4  # a key and a value of one layer
    require_memory(softmax, there // per_token // 2)
    message = "GiB for the keys and values of softmax layers without a window"
    assert_input_errors((lambda: require_memory(softmax, there // per_token + 1), message))
    require_memory(LanguageModel(CONFIGS["recipe"]), 10**15)
    require_memory(LanguageModel(CONFIGS["window"]), 10**15)


def test_more_tokens_than_the_model_has_positions_are_refused_before_the_first():
    positions = PositionsConfig(name="learned", length=16)
    model = LanguageModel(LanguageModelConfig(**{**SMALL, "positions": positions})).eval()
    tokens = torch.tensor([[1, 2, 3]])
    assert model.generate(tokens, 14).shape == (1, 17)  # the last token is not read
    message = r"max_new_tokens=15 after 3 tokens is too much .* positions.length=16: set max_new_tokens to at most 14"
    assert_input_errors((lambda: model.stream(tokens, 15), message))


def test_another_default_device_is_not_that_of_prompts_draws_and_rows():
    """As where a program sets "cuda" and keeps this model on the CPU: what is drawn, and lists, are of the CPU."""
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)).eval()
    tokens = model.encode("abc")[None]
    drawn, (_, state) = model.generate(tokens, 3, seed=0), model(tokens, return_state=True)
    torch.set_default_device("meta")
    try:
        assert torch.equal(model.encode("abc"), tokens[0])
        assert torch.equal(model.generate(tokens, 3, seed=0), drawn)
        assert model.generate(tokens, 3).device.type == "cpu"
        again = state.select_rows([0, 0]).reset_rows([True, False])
    finally:
        torch.set_default_device(None)
    assert model(tokens.expand(2, -1), again).isfinite().all()
