"""`Graph`, an ONNX graph under construction: nodes, weights, inputs, outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from linrope.errors import InputError

try:
    import onnx
    from onnx import helper
except ImportError as error:
    raise InputError(f'{error.name} is not installed: pip install "linrope[onnx]".') from error

Value = str
"""The name of a value in the graph."""
Shape = Sequence[int | str]
"""The size of each axis; a name stands for a size that each call decides."""
END = np.iinfo(np.int64).max
"""In slices, the end of an axis."""
PAST, PRESENT = "past.", "present."
"""What the names of the state's tensors begin with, as inputs and as outputs."""


class Graph:
    """Nodes in the order in which they are computed, each value with its name.

    Args:
        opset: version of the standard operators.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._weights: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names of values made inside begin with `name/`."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        yield
        self._scope = outer

    @property
    def _path(self) -> str:
        """The scope as the path of a module."""
        return self._scope.replace("/", ".")

    def op(self, operator: str, *inputs: Value | np.ndarray | None, n_outputs: int = 1, **attributes):
        """The output of an operator, or a tuple of them. Arrays become constants; None is an input left out."""
        name = f"{self._scope}{operator}_{len(self._nodes)}"
        given = [self.constant(x) if isinstance(x, (np.ndarray, np.generic)) else x or "" for x in inputs]
        outputs = [name] if n_outputs == 1 else [f"{name}.{i}" for i in range(n_outputs)]
        self._nodes.append(helper.make_node(operator, given, outputs, name=name, **attributes))
        return outputs[0] if n_outputs == 1 else tuple(outputs)

    def constant(self, array: np.ndarray | np.generic) -> Value:
        """A small array. Equal ones are one."""
        array = np.asarray(array)
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self._add_weight(f"constant_{len(self._constants)}", array)
        return self._constants[key]

    def weight(self, name: str, weight: Tensor) -> Value:
        """A weight of the model, in float32; its name in the scope is that in the model."""
        return self._add_weight(f"{self._path}{name}", weight.detach().to("cpu", torch.float32).contiguous().numpy())

    def _add_weight(self, name: str, array: np.ndarray) -> Value:
        self._weights[name] = onnx.numpy_helper.from_array(array, name)
        return name

    def input(self, name: str, dtype: type, shape: Shape) -> Value:
        """An input."""
        self._inputs.append(helper.make_tensor_value_info(name, _type_of(dtype), shape))
        return name

    def output(self, name: str, value: Value, dtype: type, shape: Shape) -> None:
        """An output with that name, whose value is another's."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, _type_of(dtype), shape))

    def past(self, name: str, shape: Shape, dtype: type = np.float32) -> Value:
        """A tensor of the state as it was before the new tokens, without the batch in its shape."""
        return self.input(f"{PAST}{self._path}{name}", dtype, ("batch", *shape))

    def present(self, name: str, value: Value, shape: Shape, dtype: type = np.float32) -> None:
        """The same tensor after them."""
        self.output(f"{PRESENT}{self._path}{name}", value, dtype, ("batch", *shape))

    def slice(self, x: Value, axis: int, start: int | Value, end: int = END) -> Value:
        """x[start:end] along an axis."""
        start = start if isinstance(start, str) else np.array([start])
        return self.op("Slice", x, start, np.array([end]), np.array([axis]))

    def reshape(self, x: Value, *shape: int) -> Value:
        """x in another shape; 0 keeps a size, and -1 stands for what is left."""
        return self.op("Reshape", x, np.array(shape))

    def cast(self, x: Value, dtype: type) -> Value:
        """x in another dtype."""
        return self.op("Cast", x, to=_type_of(dtype))

    def silu(self, x: Value) -> Value:
        """x · sigmoid(x)."""
        return self.op("Mul", x, self.op("Sigmoid", x))

    def model(self, name: str, metadata: dict[str, str]) -> onnx.ModelProto:
        """The graph as a model."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._weights.values()))
        opsets = [helper.make_opsetid("", self.opset)]
        version = helper.find_min_ir_version_for(opsets)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name="linrope")
        helper.set_model_props(model, metadata)
        return model


def _type_of(dtype: type) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
