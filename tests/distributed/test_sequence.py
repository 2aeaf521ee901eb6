"""Sequence parallelism: on 2 and 4 processes, outputs and gradients are those of one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.distributed.cases import (
    ENCODER,
    LAYER,
    LENGTHS,
    MODEL,
    OPERATOR,
    SEGMENTED,
    at_once,
    encoder,
    in_segments,
    layer,
    masked_loss,
    model,
    operator,
)
from tests.distributed.ranks import run_on_ranks

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
PROBLEMS = {f"operator: {name}": partial(operator, torch.float64, options) for name, options in OPERATOR.items()}
PROBLEMS |= {f"layer: {name}": partial(layer, *case) for name, case in LAYER.items()}
PROBLEMS |= {f"model: {name}": partial(model, torch.float64, **options) for name, options in MODEL.items()}
PROBLEMS |= {f"encoder: {name}": partial(encoder, **options) for name, options in ENCODER.items()}
FLOAT32 = {f"operator: {n}, float32": partial(operator, torch.float32, OPERATOR[n]) for n in ("plain", "decay, masked")}
FLOAT32 |= {"model: hybrid, float32": partial(model, torch.float32, **MODEL["hybrid"])}
PROBLEMS |= FLOAT32


def in_slices(name: str, lengths: list[int]):
    return PROBLEMS[name]().run(lengths)


def returned(value):
    """What a function has returned on a rank. Its error is raised."""
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.exhaustive)])
def ranks(request, tmp_path_factory):
    """The number of ranks, and what each returns of every problem with every way to slice it."""
    functions = {
        f"{name}; {slices}": partial(in_slices, name, lengths)
        for slices, lengths in LENGTHS[request.param].items()
        for name in PROBLEMS
    }
    functions |= {f"{name}; segments": partial(in_segments, options, 8) for name, options in SEGMENTED.items()}
    ragged = LENGTHS[request.param]["ragged"]
    functions |= {f"{name}; masked loss": partial(masked_loss, options, ragged) for name, options in ENCODER.items()}
    return run_on_ranks(request.param, tmp_path_factory.mktemp("ranks"), functions)


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize("slices", LENGTHS[2])
@pytest.mark.parametrize("name", PROBLEMS)
def test_outputs_gradients_and_final_states_are_those_of_one_process(ranks, expected, name, slices):
    problem = PROBLEMS[name]()
    if name not in expected:
        expected[name] = problem.run()
    found = problem.joined([returned(one[f"{name}; {slices}"]) for one in ranks])
    assert found.keys() == expected[name].keys()
    tolerance = TOLERANCE["float32" if name in FLOAT32 else "float64"]
    for key, whole in expected[name].items():
        close = {"rtol": tolerance, "atol": tolerance * max(1, whole.abs().amax().item() if whole.numel() else 0)}
        torch.testing.assert_close(found[key], whole, **close, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", SEGMENTED)
def test_segments_that_ranks_share_have_the_gradient_of_the_whole_row(ranks, name):
    losses, grads, states = zip(*(returned(one[f"{name}; segments"]) for one in ranks))
    loss, expected, final = at_once(SEGMENTED[name])
    torch.testing.assert_close(sum(losses), loss)
    for *parts, whole in zip(*grads, expected):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-10)
    for *of_ranks, whole in zip(*states, final):
        for one in of_ranks:
            torch.testing.assert_close(one, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ENCODER)
def test_the_loss_of_masked_tokens_is_the_sum_of_those_of_the_slices(ranks, name):
    losses, grads = zip(*(returned(one[f"{name}; masked loss"]) for one in ranks))
    loss, expected = masked_loss(ENCODER[name], None)
    torch.testing.assert_close(sum(losses), loss, rtol=1e-10, atol=0)
    for *parts, whole in zip(*grads, expected):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-10)
