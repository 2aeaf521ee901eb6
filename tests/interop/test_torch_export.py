"""The exported decoding step: the eager model's logits, step after step, at any position."""

import io
from dataclasses import replace

import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig, RotaryConfig
from linrope.generation.decoding import read
from linrope.interop.torch_export import export_decoding_step, initial_state, tensors_of
from tests.conftest import covering
from tests.models.test_language_model import CONFIGS, SMALL, awake

ONE_LAYER = {**SMALL, "n_layers": 1}
OPTIONS = {
    "sinusoidal": {**ONE_LAYER, "rope": None, "sinusoidal": True, "short_conv": 4},
    "before map": {**SMALL, "rope": RotaryConfig(placement="before_map")},
    "signed": {**SMALL, "rope": RotaryConfig(placement="signed"), "forget_gate": True, "short_conv": 4},
    "selective": {**ONE_LAYER, "rope": RotaryConfig(placement="selective"), "forget_gate": True, "sinusoidal": True},
    "rotary": {**SMALL, "rope": RotaryConfig(placement="both")},
}
BY_DEFAULT = ("signed", "selective")


@pytest.mark.parametrize("name", covering(OPTIONS, BY_DEFAULT))
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
    for ours, eager in zip(tensors, tensors_of(state), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_prompts_of_unequal_lengths_have_no_step_in_common():
    model = LanguageModel(CONFIGS["sinusoidal"]).eval()
    prompts = [torch.randint(0, 40, (n,)) for n in (5, 12)]
    with pytest.raises(InputError, match="state comes from prompts of different lengths"):
        tensors_of(read(model, prompts).state)
    assert len(tensors_of(read(model, [prompts[1], prompts[1]]).state)) == len(tensors_of(initial_state(model, 2)))


def test_what_has_no_step_is_refused():
    with pytest.raises(InputError, match="model is in training mode"):
        export_decoding_step(LanguageModel(CONFIGS["plain"]))
    with pytest.raises(InputError, match=r"attention=\['linear', 'softmax'\]: the decoding step"):
        export_decoding_step(LanguageModel(CONFIGS["hybrid"]).eval())
