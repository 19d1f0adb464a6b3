"""Lowering: from the nodes of a graph to calls of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pybnorm._arguments import ALIGNMENT
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import PointwiseMode, TensorAttributes
from pybnorm.graph.validation import _dtype_of, _Node, _Record, _scalar_of
from pybnorm.operations import activated
from pybnorm.operations.elementwise import RELU
from pybnorm.operations.preparation import Recipe, prepare
from pybnorm.operations.program import RECIPES, Prepared
from pybnorm.sync import SyncBatchNorm

_STAGES = ("described", "validated", "operation graph built", "execution plans created", "support checked", "built")
_RELUS = (PointwiseMode.RELU_FWD, PointwiseMode.RELU_BWD)
_SAVED = "saved_mean saved_inv_variance"
_SYNCHRONIZED = {  # in place of these operations
    "forward_training": Recipe(
        "forward", SyncBatchNorm.forward, f"x scale bias y running_mean running_variance {_SAVED}", {}
    ),
    "backward": Recipe("backward", SyncBatchNorm.backward, f"x dy scale dx dscale dbias {_SAVED}", {}),
}


class _Step(NamedTuple):
    """One call of `pybnorm.operations` or `SyncBatchNorm`, with records in place of arrays."""

    node: str
    recipe: Recipe
    values: tuple[Any, ...]
    places: list[_Record | None]
    """The tensor of each array argument; None for one that is not given."""

    def bound(self, made: Callable[[_Record], Any]) -> tuple[Any, ...]:
        """The values, with what `made` makes of records."""
        return tuple([made(value) if isinstance(value, _Record) else value for value in self.values])

    def ready(self, handle: Handle, communicator: Any) -> Prepared | _Exchange:
        """The call, checked and ready to run at any addresses."""
        if self.recipe in _SYNCHRONIZED.values():
            return _Exchange(handle, communicator, self)
        return prepare(handle, self.recipe, self.bound(lambda r: r.at(0, handle.library.device_type)))[0]


class _Lowering:
    """Chooses the calls of a graph, and checks that they honour the data types of virtual tensors."""

    def __init__(self, nodes: Sequence[_Node], records: Mapping[TensorAttributes, _Record]) -> None:
        self.nodes = nodes
        self.records = records
        self.producer = {t: i for i, node in enumerate(nodes) for t in node.outputs.values()}
        self.consumers: dict[TensorAttributes, list[tuple[_Node, str]]] = {}
        for node in nodes:
            for role, tensor in node.inputs.items():
                self.consumers.setdefault(tensor, []).append((node, role))
        self.fused = self._find_fused()
        self.steps: list[_Step] = []
        self.in_place: list[tuple[int, _Record, _Record]] = []
        """Steps that copy previous to next running statistics, with the two records."""

    # -------- additions that are fused into the batch norm before them

    def _find_fused(self) -> dict[int, tuple[TensorAttributes, TensorAttributes]]:
        """Batch norms (by index) whose y only one addition uses, with the other summand and the sum."""
        fused: dict[int, tuple[TensorAttributes, TensorAttributes]] = {}
        for index, node in enumerate(self.nodes):
            y = node.outputs.get("y")
            consumers = self.consumers.get(y, []) if y is not None and self.records[y].virtual else []
            if len(consumers) != 1 or consumers[0][0].mode != PointwiseMode.ADD:
                continue
            addition, role = consumers[0]
            other, total = addition.inputs["in_1" if role == "in_0" else "in_0"], addition.outputs["out_0"]
            if self.producer.get(other, -1) < index and all(total is not taken for _, taken in fused.values()):
                fused[index] = other, total
        return fused

    # -------- data types

    def unfaithful(self) -> Iterator[TensorAttributes]:
        """Virtual tensors whose storage type changes results."""
        for node in self.nodes:
            for tensor in node.outputs.values():
                record = self.records[tensor]
                differs = record.virtual and _dtype_of(tensor) != record.dtype
                if differs and not self._exact(tensor) and not self._late(tensor):
                    yield tensor

    def _exact(self, tensor: TensorAttributes) -> bool:
        """Say whether the storage type holds all values of the tensor exactly."""
        index = self.producer.get(tensor)
        if index is None or not self.records[tensor].virtual:
            return True
        node = self.nodes[index]
        if node.mode not in _RELUS or node.clips != RELU:
            return False
        return self._exact(node.inputs["in_0" if node.mode == PointwiseMode.RELU_FWD else "in_1"])

    def _late(self, tensor: TensorAttributes) -> bool:
        """Say whether rounding before the tensor's consumers gives the same as rounding after them."""
        if any(tensor is self.nodes[i].outputs["y"] for i in self.fused):
            return True  # never stored
        for node, role in self.consumers.get(tensor, []):
            if node.mode not in _RELUS or node.clips != RELU:
                return False
            out = node.outputs["out_0"]
            is_mask = node.mode == PointwiseMode.RELU_BWD and role == "in_0"
            if not is_mask and _dtype_of(out) != self.records[out].dtype and not self._late(out):
                return False
        return True

    # -------- calls

    def lower(self) -> None:
        """Fill `steps` and `in_place`."""
        sums = {total for _, total in self.fused.values()}
        for index, node in enumerate(self.nodes):
            of = {role: self.records[tensor] for role, tensor in node.tensors()}
            used = {r for r, t in node.outputs.items() if not self.records[t].virtual or t in self.consumers}
            if node.kind == "pointwise":
                if node.outputs["out_0"] not in sums:
                    self._pointwise(node, list(of.values()))
            elif node.kind == "batchnorm_backward":
                self._backward(node, of, used)
            else:
                blend: dict[str, Any] = {}
                if index in self.fused:
                    other, total = self.fused[index]
                    of["y"], blend = self.records[total], {"beta": 1.0}
                    self._then(node, "axpby", 1.0, self.records[other], 0.0, of["y"])
                (self._training if node.kind == "batchnorm" else self._inference)(node, of, used, blend)

    def _then(self, node: _Node, function: str, *arguments: Any, **options: Any) -> None:
        joined = function in _SYNCHRONIZED and node.attributes.get_peer_stats()
        recipe = _SYNCHRONIZED[function] if joined else (RECIPES | activated.RECIPES)[function]
        values = recipe.bind(arguments, options)
        places = [value for value, name in zip(values, recipe.arrays, strict=True) if name is not None]
        self.steps.append(_Step(node.name, recipe, values, places))

    def _training(self, node: _Node, of: dict[str, _Record], used: set[str], blend: dict[str, Any]) -> None:
        options: dict[str, Any] = {"epsilon": _scalar_of(node, "epsilon"), **blend}
        if used & {"mean", "inv_variance"}:
            options |= {"saved_mean": of.get("mean"), "saved_inv_variance": of.get("inv_variance")}
        if used & {"next_running_mean", "next_running_variance"}:
            options["exponential_average_factor"] = _scalar_of(node, "momentum")
            options["unbiased"] = node.attributes.get_unbiased()
            for name in ("running_mean", "running_variance"):
                prev, following = of[f"prev_{name}"], of[f"next_{name}"]
                same = prev.dtype == following.dtype
                if same and not prev.virtual and not following.virtual:
                    self.in_place.append((len(self.steps), prev, following))
                if same and prev.parameter == following.parameter:
                    self._then(node, "axpby", 1.0, prev, 0.0, following)
                else:
                    self._then(node, "convert", prev, following)
                options[name] = following
        self._then(node, "forward_training", of["x"], of["scale"], of["bias"], of["y"], **options)

    def _inference(self, node: _Node, of: dict[str, _Record], _used: set[str], blend: dict[str, Any]) -> None:
        front = of["x"], of["scale"], of["bias"], of["mean"]
        if "inv_variance" in of:
            self._then(node, "forward_inference_inv_variance", *front, of["inv_variance"], of["y"], **blend)
        else:
            epsilon = _scalar_of(node, "epsilon")
            self._then(node, "forward_inference", *front, of["variance"], of["y"], **blend, epsilon=epsilon)

    def _backward(self, node: _Node, of: dict[str, _Record], used: set[str]) -> None:
        if "mean" in of:
            options: dict[str, Any] = {"saved_mean": of["mean"], "saved_inv_variance": of["inv_variance"]}
        else:
            options = {"epsilon": _scalar_of(node, "epsilon")}
        if node.attributes.get_peer_stats() or not used:  # sync writes dx always
            used = used | {"dx"}
        outputs = [of[role] if role in used else None for role in ("dx", "dscale", "dbias")]
        self._then(node, "backward", of["x"], of["dy"], of["scale"], *outputs, **options)

    def _pointwise(self, node: _Node, arrays: list[_Record]) -> None:
        if node.mode == PointwiseMode.ADD:
            first, second, out = arrays
            self._then(node, "axpby", 1.0, first, 0.0, out)
            self._then(node, "axpby", 1.0, second, 1.0, out)
            return
        suffix = "" if node.mode == PointwiseMode.RELU_FWD else "_backward"
        if node.clips == RELU:
            self._then(node, f"relu{suffix}", *arrays)
        else:
            self._then(node, f"activation{suffix}", *arrays, limits=node.clips)


class _Exchange:
    """A call that is ready to run any number of times, on arrays at any addresses; see `Prepared`."""

    copies = ()

    def __init__(self, handle: Handle, communicator: Any, step: _Step) -> None:
        x: _Record = step.values[0]
        self._handle, self._step = handle, step
        self._layer = SyncBatchNorm(handle, communicator, x.dims[1], x.dtype)
        self.calls = (f"SyncBatchNorm.{step.recipe.name}",)
        arguments = self._at([ALIGNMENT * i for i, _ in enumerate(step.places, 1)])
        self.nbytes = self._layer.workspace_size(step.recipe.name, **arguments)

    def _at(self, addresses: Sequence[int]) -> dict[str, Any]:
        """The step's arguments, with its places at these addresses."""
        places = dict(zip(self._step.places, addresses, strict=True))
        values = self._step.bound(lambda record: record.at(places[record], self._handle.library.device_type))
        return dict(zip(self._step.recipe.names, values, strict=True))

    def execute(self, handle: Handle, _function: str, addresses: tuple[int, ...], scratch: Any) -> None:
        """Run it; `addresses` has the workspace's, which is not used, then one for each of the step's places."""
        if handle is not self._handle:
            raise ArgumentError("handle", "another", "the one that the graph was built with, as its peer_stats need")
        self._step.recipe.make(self._layer, **self._at(addresses[1:]), workspace=scratch)
