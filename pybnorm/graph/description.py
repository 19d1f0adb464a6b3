"""The description of a graph: its data types, tensors and nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
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
from pybnorm.graph.rules import _Node
from pybnorm.graph.serialization import from_json, to_json

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
        attributes = self._attributes(attributes, BatchnormAttributes)
        inputs: dict[str, Any] = {"x": x, "scale": scale, "bias": bias}
        outputs = ["y", "mean", "inv_variance"]
        running = {
            "prev_running_mean": attributes.get_prev_running_mean(),
            "prev_running_variance": attributes.get_prev_running_variance(),
            "momentum": attributes.get_momentum(),
        }
        scalars = {"epsilon": attributes.get_epsilon()}
        if any(value is not None for value in running.values()):
            scalars["momentum"] = running.pop("momentum")
            inputs |= running
            outputs += ["next_running_mean", "next_running_variance"]
        made = self._add("batchnorm", attributes, inputs, outputs, scalars)
        y, mean, inv_variance = made[:3]
        following = made[3:]
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
        attributes = self._attributes(attributes, BatchnormInferenceAttributes)
        inputs = {"x": x, "mean": mean, "inv_variance": inv_variance, "scale": scale, "bias": bias}
        return self._add("batchnorm_inference", attributes, inputs, ["y"])[0]

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
        attributes = self._attributes(attributes, BatchnormInferenceAttributesVarianceExt)
        inputs = {"x": x, "mean": mean, "variance": variance, "scale": scale, "bias": bias}
        scalars = {"epsilon": _scalar(epsilon, "epsilon")}
        return self._add("batchnorm_inference_variance_ext", attributes, inputs, ["y"], scalars)[0]

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
        attributes = self._attributes(attributes, BatchnormBackwardAttributes)
        inputs: dict[str, Any] = {"dy": dy, "x": x, "scale": scale}
        pair = {"mean": attributes.get_mean(), "inv_variance": attributes.get_inv_variance()}
        scalars = {}
        if any(value is not None for value in pair.values()):
            inputs |= pair
        else:
            scalars["epsilon"] = attributes.get_epsilon()
        dx, dscale, dbias = self._add("batchnorm_backward", attributes, inputs, ["dx", "dscale", "dbias"], scalars)
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
        attributes = self._attributes(rest[-1], PointwiseAttributes)
        inputs = {"in_0": in_0}
        if len(rest) == 2:
            inputs["in_1"] = rest[0]
        return self._add("pointwise", attributes, inputs, ["out_0"])[0]

    def relu(self, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``max(input, 0)``, as cuDNN's Python has it."""
        return self.pointwise(input, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_FWD))

    def relu_backward(self, loss: TensorAttributes, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``loss where input > 0, else 0``, as cuDNN's Python has it."""
        return self.pointwise(input, loss, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_BWD))

    def add(self, a: TensorAttributes, b: TensorAttributes, name: str = "") -> TensorAttributes:
        """``a + b``, as cuDNN's Python has it."""
        return self.pointwise(a, b, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.ADD))

    def _attributes(self, given: Any, kind: type[Any]) -> Any:
        """A copy, as C++ passes attributes by value, with a name."""
        _arguments.instance(given, kind, "attributes", f"a {kind.__name__}")
        attributes = copy.copy(given)
        if not attributes.get_name():
            attributes.set_name(f"{kind.__name__.replace('Attributes', '')}_{len(self._nodes)}")
        return attributes

    def _add(
        self,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        scalars: Mapping[str, Any] | None = None,
    ) -> list[TensorAttributes]:
        name = attributes.get_name()
        for role, tensor in {**inputs, **(scalars or {})}.items():
            if tensor is not None:  # validate reports missing ones
                _tensor(tensor, role)
        for role, tensor in inputs.items():
            if tensor is not None and not tensor.get_name():
                tensor.set_name(f"{name}::{role.upper()}")
        made = {role: self._tensor_type().set_name(f"{name}::{role.upper()}").set_is_virtual(True) for role in outputs}
        self._nodes.append(_Node(kind, attributes, dict(inputs), made, dict(scalars or {})))
        self._stage = 0
        return list(made.values())
