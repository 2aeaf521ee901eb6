"""The exported decoding step: the eager model's logits, step after step, at any position."""

import io
from dataclasses import replace

import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.generation.decoding import read
from linrope.interop.torch_export import export_decoding_step, initial_state, tensors_of
from linrope.positions.base import PositionsConfig
from tests.conftest import assert_input_errors
from tests.models.test_language_model import CONFIGS, SMALL, awake

ONE_LAYER = {**SMALL, "n_layers": 1}
OPTIONS = {
    "sinusoidal": {**ONE_LAYER, "positions": PositionsConfig("sinusoidal"), "short_conv": 4},
    "before map": {**SMALL, "rope": RotaryConfig(placement="before_map")},
    "signed": {**SMALL, "rope": RotaryConfig(placement="signed"), "forget_gate": True, "short_conv": 4},
    "rotary": {**SMALL, "rope": RotaryConfig(placement="both")},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_twenty_steps_give_the_eager_logits_near_and_far(name):
    torch.manual_seed(0)
    model = awake(LanguageModel(LanguageModelConfig(**OPTIONS[name]))).double().eval()
    file = io.BytesIO()
    program = export_decoding_step(model, batch=2)
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    operators = {getattr(node.target, "namespace", "aten") for graph in graphs for node in graph.nodes}
    assert operators <= {"aten", "higher_order"}  # PyTorch's alone: it runs where this package is not
    torch.export.save(program, file)
    file.seek(0)
    step = torch.export.load(file).module()
    tokens = torch.randint(0, 40, (20, 2))
    _, read = model(torch.randint(0, 40, (2, 30)), return_state=True)
    far = tuple(replace(layer, past=replace(layer.past, length=10**6)) for layer in read)
    for state, position in [(None, 0), (read, 30), (far, 10**6)]:
        tensors = tensors_of(state or initial_state(model, 2))
        for token in tokens:
            expected, state = model(token[:, None], state, return_state=True)
            logits, tensors = step(token, position, tensors)
            position += 1
            # float64: a graph may round and add in another order, which denominators that cancel ("rotary") make larger
            torch.testing.assert_close(logits, expected[:, 0], rtol=1e-10, atol=1e-10)
    assert state[0].past.length == position
    torch.testing.assert_close(tensors, tensors_of(state), rtol=1e-10, atol=1e-10)


def test_what_has_no_step_is_refused():
    model, hybrid = (LanguageModel(CONFIGS[name]).eval() for name in ("sinusoidal", "hybrid"))
    short, long = torch.randint(0, 40, (5,)), torch.randint(0, 40, (12,))
    assert len(tensors_of(read(model, [long, long]).state)) == len(tensors_of(initial_state(model, 2)))
    assert_input_errors(
        (lambda: tensors_of(read(model, [short, long]).state), "state comes from prompts of different lengths"),
        (lambda: export_decoding_step(LanguageModel(CONFIGS["plain"])), "model is in training mode"),
        (lambda: initial_state(hybrid), r"attention=\['linear', 'softmax'\]: the decoding step"),
        (lambda: initial_state(model, -1), "batch=-1 must be"),
        (lambda: export_decoding_step(hybrid), r"attention=\['linear', 'softmax'\]: the decoding step"),
    )
