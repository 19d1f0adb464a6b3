"""The description of a graph: its data types, tensors and nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pybnorm import _arguments
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    PointwiseAttributes,
    PointwiseMode,
    TensorAttributes,
    _data_type,
    _Named,
    _scalar,
    _tensor,
)
from pybnorm.graph.serialization import from_json, to_json
from pybnorm.graph.validation import _FORMS, _Node

_SelfGraph = TypeVar("_SelfGraph", bound="_Description")


def _default(
    name: str, setting: str
) -> tuple[Callable[[_SelfGraph, object], _SelfGraph], Callable[[_Description], DataType | None]]:
    """hipDNN's setter and getter of a data type of the graph."""

    def setter(self: _SelfGraph, data_type: object) -> _SelfGraph:
        setattr(self, f"_{name}", _data_type(data_type, f"{name}_data_type"))
        self._stage = 0
        return self

    def getter(self: _Description) -> DataType | None:
        """The data type; None unless set."""
        found: DataType | None = getattr(self, f"_{name}")
        return found

    setter.__name__, getter.__name__, setter.__doc__ = f"set_{name}_data_type", f"get_{name}_data_type", setting
    return setter, getter


class _Description(_Named):
    """A graph as it is described, before anything is checked; every change starts the stages again."""

    _tensor_type = TensorAttributes

    def __init__(self) -> None:
        super().__init__()
        self._io: DataType | None = None
        self._intermediate: DataType | None = None
        self._compute: DataType | None = None
        self._nodes: list[_Node] = []
        self._stage = 0

    # -------- attributes of the graph

    set_io_data_type, get_io_data_type = _default(
        "io", "Set the default data type of data tensors that are not virtual: float32, float16 or bfloat16."
    )
    set_intermediate_data_type, get_intermediate_data_type = _default(
        "intermediate", "Set the default data type of virtual data tensors."
    )
    set_compute_data_type, get_compute_data_type = _default(
        "compute", "Set the data type of accumulation, statistics and parameters: float32, the only one."
    )

    # -------- JSON

    def to_json(self) -> str:
        """The description as hipDNN's JSON: data types, tensors and nodes, without memory. Assigns missing uids."""
        return to_json(self._name, (self._compute, self._intermediate, self._io), self._nodes)

    def from_json(self, text: str | bytes) -> None:
        """Take the description that `to_json`, or hipDNN, wrote, in place of this graph's own."""
        name, dtypes, nodes = from_json(text)
        self._name, self._nodes, self._stage = name, nodes, 0
        self._compute, self._intermediate, self._io = dtypes

    # -------- tensors

    def tensor(
        self,
        attributes: TensorAttributes | None = None,
        *,
        name: str | None = None,
        dim: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        data_type: object = None,
        uid: int | None = None,
        is_virtual: bool | None = None,
    ) -> TensorAttributes:
        """A new tensor: a copy of `attributes` as in C++, changed by the keywords that cuDNN's Python has."""
        tensor = self._tensor_type() if attributes is None else copy.copy(_tensor(attributes, "attributes"))
        names = "name", "dim", "stride", "data_type", "uid", "is_virtual"
        for attribute, value in zip(names, (name, dim, stride, data_type, uid, is_virtual), strict=True):
            if value is not None:
                getattr(tensor, f"set_{attribute}")(value)
        return tensor

    @staticmethod
    def tensor_like(tensor: TensorAttributes, name: str = "") -> TensorAttributes:
        """Make a copy with another name and no uid."""
        return copy.copy(_tensor(tensor, "tensor")).clear_uid().set_name(name)

    # -------- nodes

    def batchnorm(
        self,
        x: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        attributes: BatchnormAttributes,
    ) -> tuple[TensorAttributes, TensorAttributes, TensorAttributes, TensorAttributes | None, TensorAttributes | None]:
        """Batch norm with the statistics of the batch.

        ``y = scale * (x - mean) * inv_variance + bias`` with ``inv_variance = 1 / sqrt(biased variance + epsilon)``;
        ``next = (1 - momentum) * previous + momentum * batch`` with the unbiased variance (`set_unbiased`).

        Parameters
        ----------
        x : TensorAttributes, dim (N, C, spatial...)
            Rank 2 to 8, more than one element for each channel.
        scale, bias : TensorAttributes, dim (1, C, 1...)
        attributes : BatchnormAttributes
            Epsilon is required.

        Returns
        -------
        y, mean, inv_variance : TensorAttributes
        next_running_mean, next_running_variance : TensorAttributes or None
            None without previous statistics and momentum. All five are virtual until ``set_output(True)``.

        Notes
        -----
        `pybnorm.operations.forward_training`; before it axpby from prev to next, unless they are the same memory.
        """
        y, mean, inv_variance, *following = self._add("batchnorm", attributes, x=x, scale=scale, bias=bias)
        return y, mean, inv_variance, *((following[0], following[1]) if following else (None, None))

    def batchnorm_inference(
        self,
        x: TensorAttributes,
        mean: TensorAttributes,
        inv_variance: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        attributes: BatchnormInferenceAttributes,
    ) -> TensorAttributes:
        """``y = scale * (x - mean) * inv_variance + bias``, the inverse standard deviation given.

        Tensors are as in `batchnorm`.
        """
        parameters = {"mean": mean, "inv_variance": inv_variance, "scale": scale, "bias": bias}
        return self._add("batchnorm_inference", attributes, x=x, **parameters)[0]

    def batchnorm_inference_variance_ext(
        self,
        x: TensorAttributes,
        mean: TensorAttributes,
        variance: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        epsilon: TensorAttributes | float,
        attributes: BatchnormInferenceAttributesVarianceExt,
    ) -> TensorAttributes:
        """``y = scale * (x - mean) / sqrt(variance + epsilon) + bias``.

        Tensors are as in `batchnorm`.
        """
        parameters = {"mean": mean, "variance": variance, "scale": scale, "bias": bias}
        return self._add("batchnorm_inference_variance_ext", attributes, x=x, **parameters, epsilon=epsilon)[0]

    def batchnorm_backward(
        self,
        dy: TensorAttributes,
        x: TensorAttributes,
        scale: TensorAttributes,
        attributes: BatchnormBackwardAttributes,
    ) -> tuple[TensorAttributes, TensorAttributes, TensorAttributes]:
        """Gradients of `batchnorm`.

        With ``x_hat = (x - mean) * inv_variance``: ``dbias = sum(dy)``, ``dscale = sum(dy * x_hat)``,
        ``dx = scale * inv_variance * (dy - (dbias + x_hat * dscale) / m)``.

        Tensors are as in `batchnorm`; the attributes have saved statistics, or an epsilon to compute them from x.
        """
        dx, dscale, dbias = self._add("batchnorm_backward", attributes, dy=dy, x=x, scale=scale)
        return dx, dscale, dbias

    def pointwise(self, in_0: TensorAttributes, *rest: Any) -> TensorAttributes:
        """An elementwise node: ``pointwise(in_0, attributes)`` or ``pointwise(in_0, in_1, attributes)``.

        Parameters
        ----------
        in_0, in_1 : TensorAttributes
            Of one shape; nothing is broadcast. For `PointwiseMode.RELU_BWD` x and dy, in this order.
        attributes : PointwiseAttributes

        Returns
        -------
        out_0 : TensorAttributes

        Notes
        -----
        `Handle.relu`, `Handle.relu_backward`; the addition by `pybnorm.operations.axpby`, or by the beta of the batch
        norm before it.
        """
        if not 1 <= len(rest) <= 2:
            raise ArgumentError("inputs", f"{len(rest)} arguments after in_0", "in_1 if any, then the attributes")
        second = {"in_1": _tensor(rest[0], "in_1")} if len(rest) == 2 else {}
        return self._add("pointwise", rest[-1], in_0=in_0, **second)[0]

    def relu(self, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``max(input, 0)``, as cuDNN's Python has it."""
        return self.pointwise(input, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_FWD))

    def relu_backward(self, loss: TensorAttributes, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``loss where input > 0, else 0``, as cuDNN's Python has it."""
        return self.pointwise(input, loss, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_BWD))

    def add(self, a: TensorAttributes, b: TensorAttributes, name: str = "") -> TensorAttributes:
        """``a + b``, as cuDNN's Python has it."""
        return self.pointwise(a, b, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.ADD))

    def _add(self, kind: str, attributes: Any, **given: Any) -> list[TensorAttributes]:
        """Add a node of these tensors and those of its attributes; returns its outputs."""
        form = _FORMS[kind]
        word = form.attributes.__name__
        _arguments.instance(attributes, form.attributes, "attributes", f"a {word}")
        attributes = copy.copy(attributes)  # as C++ passes attributes by value
        name = attributes.get_name() or f"{word.replace('Attributes', '')}_{len(self._nodes)}"
        if "epsilon" in given:
            given["epsilon"] = _scalar(given["epsilon"], "epsilon")
        for role, tensor in given.items():
            if tensor is not None:  # validate reports missing ones
                _tensor(tensor, role)
        roles = (*form.inputs, *form.scalars)
        node = _Node.of(kind, attributes.set_name(name), {r: given.get(r, attributes._slots.get(r)) for r in roles}, {})
        for role, tensor in node.inputs.items():
            if tensor is not None and not tensor.get_name():
                tensor.set_name(f"{name}::{role.upper()}")
        for role in form.outputs:
            if not role.startswith("next_") or "momentum" in node.scalars:
                node.outputs[role] = self._tensor_type().set_name(f"{name}::{role.upper()}").set_is_virtual(True)
        self._nodes.append(node)
        self._stage = 0
        return list(node.outputs.values())
