import pytest

from linrope import InputError
from linrope.layers.state import from_serialized


@pytest.mark.parametrize("values", [[{}], [{"type": "Other"}], [{"type": "State"}], 3])
def test_what_is_no_state_of_a_model_is_refused(values):
    with pytest.raises(InputError, match="not the state of a model"):
        from_serialized(values)
