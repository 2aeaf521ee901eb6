"""States of models: saved and read back, they go on as if nothing had happened."""

import io

import pytest
import torch

from linrope import InputError
from linrope.layers.state import from_serialized, to_serialized
from tests.test_segmented import MODELS, model_of, packed, text


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_state_survives_a_file(options):
    model = model_of(**options).eval()
    inputs, _ = text()
    _, state = model(inputs[:, :60], segment_ids=packed()[:, :60], return_state=True)
    file = io.BytesIO()
    torch.save(to_serialized(state), file)
    read = from_serialized(torch.load(io.BytesIO(file.getvalue()), weights_only=True), "cpu")
    assert torch.equal(model(inputs[:, 60:], read), model(inputs[:, 60:], state))
    assert [layer.past.length for layer in read] == [60, 60]


@pytest.mark.parametrize("values", [[{}], [{"type": "Other"}], [{"type": "State"}], 3])
def test_something_else_is_refused(values):
    with pytest.raises(InputError, match="not the state of a model"):
        from_serialized(values)
