"""Lowering: from the nodes of a graph to calls of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import PointwiseMode, TensorAttributes
from pybnorm.graph.rules import _clips_of, _dtype_of, _Node, _Record, _scalar_of
from pybnorm.operations import activated
from pybnorm.operations.elementwise import RELU
from pybnorm.operations.preparation import Recipe, prepare
from pybnorm.operations.program import RECIPES, Prepared
from pybnorm.sync import SyncBatchNorm


class _Vector(NamedTuple):
    """A parameter tensor, passed to an operation as a flat vector."""

    record: _Record


def _filled(of: Any, made: Callable[[_Record], Any]) -> Any:
    """The array that `made` makes of a record, a parameter's as a flat vector; any other argument as it is."""
    if not isinstance(of, _Vector):
        return made(of) if isinstance(of, _Record) else of
    whole = made(of.record)
    return whole._replace(dims=(math.prod(whole.dims),), strides=(1,)) if type(whole) is Buffer else whole


class _Step(NamedTuple):
    """One call of `pybnorm.operations`, or if `joined` of `SyncBatchNorm`, with records in place of arrays."""

    node: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    joined: bool = False

    @property
    def recipe(self) -> Recipe:
        """The operation's."""
        return (RECIPES | activated.RECIPES)[self.function]

    def places(self) -> list[_Record | None]:
        """The tensor of each array argument; None for one that is not given."""
        arguments, options = self.bound(lambda record: record)
        if self.joined:
            return [of for of in (*arguments, *options.values()) if isinstance(of, _Record)]
        recipe = self.recipe
        values = recipe.bind(arguments, options)
        return [value for value, name in zip(values, recipe.arrays, strict=True) if name is not None]

    def checked(self, handle: Handle) -> Prepared:
        """The operation, checked and ready to run at any addresses."""
        recipe = self.recipe
        return prepare(handle, recipe, recipe.bind(*self.bound(lambda r: r.at(0, handle.library.device_type))))[0]

    def bound(self, made: Callable[[_Record], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with what `made` makes of records."""
        options = {name: _filled(option, made) for name, option in self.options.items()}
        return tuple([_filled(of, made) for of in self.arguments]), options


_STAGES = ("described", "validated", "operation graph built", "execution plans created", "support checked", "built")


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Lowering:
    """Chooses the calls of a graph, and checks that they honour the data types of virtual tensors."""

    def __init__(self, nodes: Sequence[_Node], records: Mapping[int, _Record]) -> None:
        self.nodes = nodes
        self.records = records
        self.producer = {id(t): i for i, node in enumerate(nodes) for t in node.outputs.values()}
        self.consumers: dict[int, list[tuple[_Node, str]]] = {}
        for node in nodes:
            for role, tensor in node.inputs.items():
                self.consumers.setdefault(id(tensor), []).append((node, role))
        self.fused = self._find_fused()

    def record(self, tensor: TensorAttributes) -> _Record:
        """The record of a tensor."""
        return self.records[id(tensor)]

    def wanted(self, tensor: TensorAttributes) -> bool:
        """Say whether the caller or another node uses the tensor."""
        return not self.record(tensor).virtual or id(tensor) in self.consumers

    # -------- additions that are fused into the batch norm before them

    def _find_fused(self) -> dict[int, tuple[TensorAttributes, TensorAttributes]]:
        """Batch norms (by index) whose y only one addition uses, with the other summand and the sum."""
        fused: dict[int, tuple[TensorAttributes, TensorAttributes]] = {}
        for index, node in enumerate(self.nodes):
            if "y" not in node.outputs or not self.record(node.outputs["y"]).virtual:
                continue
            consumers = self.consumers.get(id(node.outputs["y"]), [])
            if len(consumers) != 1 or _mode(consumers[0][0]) != PointwiseMode.ADD:
                continue
            addition, role = consumers[0]
            if id(addition) in {id(self.nodes[self.producer[id(total)]]) for _, total in fused.values()}:
                continue
            other = addition.inputs["in_1" if role == "in_0" else "in_0"]
            if self.producer.get(id(other), -1) < index:
                fused[index] = other, addition.outputs["out_0"]
        return fused

    # -------- data types

    def unfaithful(self) -> Iterator[TensorAttributes]:
        """Virtual tensors whose storage type changes results."""
        for node in self.nodes:
            for tensor in node.outputs.values():
                record = self.record(tensor)
                differs = record.virtual and _dtype_of(tensor) != record.dtype
                if differs and not self._exact(tensor) and not self._late(tensor):
                    yield tensor

    def _exact(self, tensor: TensorAttributes) -> bool:
        """Say whether the storage type holds all values of the tensor exactly."""
        index = self.producer.get(id(tensor))
        if index is None or not self.record(tensor).virtual:
            return True
        mode = _mode(self.nodes[index])
        if _is_clipped(self.nodes[index]):
            return False
        if mode == PointwiseMode.RELU_FWD:
            return self._exact(self.nodes[index].inputs["in_0"])
        if mode == PointwiseMode.RELU_BWD:
            return self._exact(self.nodes[index].inputs["in_1"])
        return False

    def _late(self, tensor: TensorAttributes) -> bool:
        """Say whether rounding before the tensor's consumers gives the same as rounding after them."""
        if id(tensor) in {id(self.nodes[i].outputs["y"]) for i in self.fused}:
            return True  # never stored
        for node, role in self.consumers.get(id(tensor), []):
            mode = _mode(node)
            if _is_clipped(node):
                return False
            if mode == PointwiseMode.RELU_BWD and role == "in_0":
                continue
            if mode not in (PointwiseMode.RELU_FWD, PointwiseMode.RELU_BWD):
                return False
            out = node.outputs["out_0"]
            if _dtype_of(out) != self.record(out).dtype and not self._late(out):
                return False
        return True

    # -------- calls

    def steps(self) -> tuple[list[_Step], list[tuple[int, _Record, _Record]]]:
        """The calls; and which of them copy previous to next running statistics, with the two records."""
        steps: list[_Step] = []
        copies: list[tuple[int, _Record, _Record]] = []
        sums = {id(total) for _, total in self.fused.values()}
        for index, node in enumerate(self.nodes):
            if node.kind == "pointwise":
                if id(node.outputs["out_0"]) not in sums:
                    steps += self._pointwise(node)
                continue
            if node.kind == "batchnorm_backward":
                steps.append(self._backward(node))
                continue
            blend = {}
            y = self.record(node.outputs["y"])
            if index in self.fused:
                other, total = self.fused[index]
                y, blend = self.record(total), {"beta": 1.0}
                steps.append(_Step(node.name, "axpby", (1.0, self.record(other), 0.0, y), {}))
            if node.kind == "batchnorm":
                made, copied = self._training(node, y, blend, len(steps))
                steps += made
                copies += copied
            else:
                steps.append(self._inference(node, y, blend))
        return steps, copies

    def _vector(self, tensor: TensorAttributes) -> _Vector:
        return _Vector(self.record(tensor))

    def _training(
        self, node: _Node, y: _Record, blend: dict[str, float], place: int
    ) -> tuple[list[_Step], list[tuple[int, _Record, _Record]]]:
        steps: list[_Step] = []
        copies: list[tuple[int, _Record, _Record]] = []
        options: dict[str, Any] = {"epsilon": _scalar_of(node, "epsilon"), **blend}
        if any(self.wanted(node.outputs[role]) for role in ("mean", "inv_variance")):
            options["saved_mean"] = self._vector(node.outputs["mean"])
            options["saved_inv_variance"] = self._vector(node.outputs["inv_variance"])
        pair = ("running_mean", "running_variance")
        if "momentum" in node.scalars and any(self.wanted(node.outputs[f"next_{name}"]) for name in pair):
            options["exponential_average_factor"] = _scalar_of(node, "momentum")
            options["unbiased"] = node.attributes.get_unbiased()
            for name in pair:
                prev, following = self.record(node.inputs[f"prev_{name}"]), self.record(node.outputs[f"next_{name}"])
                if prev.dtype == following.dtype:
                    if not prev.virtual and not following.virtual:
                        copies.append((place + len(steps), prev, following))
                    arguments: tuple[Any, ...] = (1.0, _Vector(prev), 0.0, _Vector(following))
                    steps.append(_Step(node.name, "axpby", arguments, {}))
                else:
                    steps.append(_Step(node.name, "convert", (_Vector(prev), _Vector(following)), {}))
                options[name] = _Vector(following)
        vectors = [self._vector(node.inputs[role]) for role in ("scale", "bias")]
        arguments = (self.record(node.inputs["x"]), *vectors, y)
        joined = bool(node.attributes.get_peer_stats())
        steps.append(_Step(node.name, "forward" if joined else "forward_training", arguments, options, joined))
        return steps, copies

    def _inference(self, node: _Node, y: _Record, blend: dict[str, float]) -> _Step:
        x = self.record(node.inputs["x"])
        given = node.kind == "batchnorm_inference"
        function = "forward_inference_inv_variance" if given else "forward_inference"
        roles = ("scale", "bias", "mean", "inv_variance" if given else "variance")
        options: dict[str, float] = dict(blend)
        if not given:
            options["epsilon"] = _scalar_of(node, "epsilon")
        return _Step(node.name, function, (x, *[self._vector(node.inputs[r]) for r in roles], y), options)

    def _backward(self, node: _Node) -> _Step:
        options: dict[str, Any] = {}
        if "mean" in node.inputs:
            options["saved_mean"] = self._vector(node.inputs["mean"])
            options["saved_inv_variance"] = self._vector(node.inputs["inv_variance"])
        else:
            options["epsilon"] = _scalar_of(node, "epsilon")
        outputs: list[Any] = [
            (self.record(t) if role == "dx" else self._vector(t)) if self.wanted(t) else None
            for role, t in node.outputs.items()
        ]
        if not any(outputs) or node.attributes.get_peer_stats():  # sync writes dx always
            outputs[0] = self.record(node.outputs["dx"])
        arguments = (self.record(node.inputs["x"]), self.record(node.inputs["dy"]), self._vector(node.inputs["scale"]))
        joined = bool(node.attributes.get_peer_stats())
        return _Step(node.name, "backward", (*arguments, *outputs), options, joined)

    def _pointwise(self, node: _Node) -> list[_Step]:
        inputs = [self.record(t) for t in node.inputs.values()]
        out = self.record(node.outputs["out_0"])
        mode = _mode(node)
        if mode == PointwiseMode.ADD:
            return [
                _Step(node.name, "axpby", (1.0, inputs[0], 0.0, out), {}),
                _Step(node.name, "axpby", (1.0, inputs[1], 1.0, out), {}),
            ]
        function, clips = ("relu" if mode == PointwiseMode.RELU_FWD else "relu_backward"), _clips_of(node)
        if clips == RELU:
            return [_Step(node.name, function, (*inputs, out), {})]
        return [_Step(node.name, function.replace("relu", "activation"), (*inputs, out), {"limits": clips})]


def _is_clipped(node: _Node) -> bool:
    return node.kind == "pointwise" and _clips_of(node) != RELU


def _mode(node: _Node) -> PointwiseMode | None:
    """The elementwise operation of a node; None for batch norm."""
    return node.attributes.get_mode() if node.kind == "pointwise" else None


class _Exchange:
    """A call that is ready to run any number of times, on arrays at any addresses; see `Prepared`."""

    copies = ()

    def __init__(self, handle: Handle, communicator: Any, step: _Step) -> None:
        x: _Record = step.arguments[0]
        self._handle, self._step = handle, step
        self._layer = SyncBatchNorm(handle, communicator, x.dims[1], x.dtype)
        self.calls = (f"SyncBatchNorm.{step.function}",)
        kind = handle.library.device_type
        places = {record: ALIGNMENT * i for i, record in enumerate(step.places(), 1)}
        arguments, options = step.bound(lambda record: record.at(places[record], kind))
        self.nbytes = self._layer.workspace_size(step.function, *arguments, **options)

    def execute(self, handle: Handle, _function: str, addresses: tuple[int, ...], scratch: Any) -> None:
        """Run it; `addresses` has the workspace's, which is not used, then one for each of the step's places."""
        if handle is not self._handle:
            raise ArgumentError("handle", "another", "the one that the graph was built with, as its peer_stats need")
        kind = handle.library.device_type
        places = dict(zip(self._step.places(), addresses[1:], strict=True))
        arguments, options = self._step.bound(lambda record: record.at(places[record], kind))
        getattr(self._layer, self._step.function)(*arguments, workspace=scratch, **options)
