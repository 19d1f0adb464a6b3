"""The description of a graph as JSON, in hipDNN's words: tensors by uid, nodes by the names of their attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import TensorAttributes
from pybnorm.graph.validation import _CLIPS, _FORMS, _MISSING, _Node, _with_uids

_WORDS = {  # of a data type and of a value of it
    None: ("unset", ""),
    DataType.FLOAT32: ("float", "Float32Value"),
    DataType.FLOAT16: ("half", "Float16Value"),
    DataType.BFLOAT16: ("bfloat16", "BFloat16Value"),
    DataType.FLOAT64: ("double", "Float64Value"),
}
_TYPES = {word: dtype for dtype, (word, _) in _WORDS.items()} | {"not_set": None}
_DEFAULTS = ("compute", "intermediate", "io")
_UNUSED = ("axis_tensor_uid", "in_2_tensor_uid", "swish_beta", "elu_alpha", "softplus_beta")
_KINDS = {form.attributes.__name__: kind for kind, form in _FORMS.items()}
_OPTIONAL = {*_MISSING, "in_1", "next_running_mean", "next_running_variance"}


def to_json(name: str, dtypes: Sequence[DataType | None], nodes: Sequence[_Node]) -> str:
    """The text; `dtypes` are those of computation, of virtual tensors and of others."""
    for node in nodes:
        for role, tensor in (*node.inputs.items(), *node.scalars.items()):
            if tensor is None and role not in _OPTIONAL:
                raise ArgumentError(f"{role} of {node.name}", None, "a tensor")
    return json.dumps(
        {
            "name": name,
            **{f"{of}_data_type": _WORDS[dtype][0] for of, dtype in zip(_DEFAULTS, dtypes, strict=True)},
            "tensors": [_tensor_out(t) for t in _with_uids(nodes)],
            "nodes": [_node_out(node) for node in nodes],
        },
        indent=1,
    )


def _tensor_out(tensor: TensorAttributes) -> dict[str, Any]:
    dtype, value = tensor.get_data_type(), tensor.get_value()
    made = {
        "uid": tensor.get_uid(),
        "name": tensor.get_name(),
        "data_type": _WORDS[dtype][0],
        "dims": tensor.get_dim(),
        "strides": tensor.get_stride(),
        "virtual": tensor.get_is_virtual(),
        "is_runtime_pass_by_value": False,
    }
    return made if value is None else {**made, "value_type": _WORDS[dtype][1], "value": value}


def _node_out(node: _Node) -> dict[str, Any]:
    form, held = _FORMS[node.kind], {**node.inputs, **node.scalars, **node.outputs}

    def uids(roles: Sequence[str]) -> dict[str, Any]:
        return {f"{role}_tensor_uid": tensor.get_uid() if (tensor := held.get(role)) else None for role in roles}

    inputs = uids((*form.inputs, *form.scalars))
    if node.kind == "pointwise":
        mode, clips = node.mode, node.attributes._slots
        inputs |= {"operation": "unset" if mode is None else mode.name.lower()}
        inputs |= {clip: clips.get(clip) for clip in _CLIPS} | dict.fromkeys(_UNUSED)
    elif hasattr(node.attributes, "get_peer_stats"):
        inputs["peer_stats_tensor_uid"] = [t.get_uid() for t in node.attributes.get_peer_stats()]
        if node.kind == "batchnorm" and not node.attributes.get_unbiased():
            inputs["unbiased"] = False  # no word of hipDNN's
    return {
        "name": node.name,
        "type": form.attributes.__name__,
        "compute_data_type": _WORDS[node.attributes.get_compute_data_type()][0],
        "inputs": inputs,
        "outputs": uids(form.outputs),
    }


def from_json(text: str | bytes) -> tuple[str, tuple[DataType | None, ...], list[_Node]]:
    """The argument of `to_json`."""
    try:
        graph = json.loads(text)
    except Exception as error:  # also the object's own
        raise ArgumentError("text", f"{type(text).__name__}: {error}", "the JSON of a graph") from None
    name = _get(graph, "name", str, "the graph")
    dtypes = [_data_type(graph, f"{of}_data_type", "the graph") for of in _DEFAULTS]
    tensors: dict[int, TensorAttributes] = {}
    for entry in _get(graph, "tensors", list, "the graph"):
        tensor = _tensor_in(entry)
        if tensors.setdefault(tensor.get_uid(), tensor) is not tensor:
            raise ArgumentError("uid", tensor.get_uid(), "one tensor for each")
    return name, tuple(dtypes), [_node_in(entry, tensors) for entry in _get(graph, "nodes", list, "the graph")]


def _get(entry: Any, name: str, kind: type, where: str, *default: Any) -> Any:
    """A member of a JSON object; `default` where it is null or missing."""
    if type(entry) is not dict:
        raise ArgumentError(where, f"a JSON {type(entry).__name__}", "a JSON object")
    value = entry.get(name)
    if value is None and default:
        return default[0]
    if type(value) is not kind:
        raise ArgumentError(f"{name} of {where}", value, f"a JSON value of type {kind.__name__}")
    return value


def _data_type(entry: Any, name: str, where: str) -> DataType | None:
    word = _get(entry, name, str, where, "unset").lower()
    if word not in _TYPES:
        raise ArgumentError(f"{name} of {where}", word, ", ".join(_TYPES))
    return _TYPES[word]


def _tensor_in(entry: Any) -> TensorAttributes:
    tensor = TensorAttributes().set_uid(_get(entry, "uid", int, "a tensor"))
    where = f"tensor {tensor.get_uid()}"
    tensor.set_name(_get(entry, "name", str, where, "")).set_is_virtual(_get(entry, "virtual", bool, where, False))
    dtype = _data_type(entry, "data_type", where)
    if entry.get("value") is not None:
        return tensor.set_value(entry["value"], DataType.FLOAT64 if dtype is None else dtype)
    for name, setter in (("dims", tensor.set_dim), ("strides", tensor.set_stride)):
        if sizes := _get(entry, name, list, where, []):
            setter(sizes)
    return tensor if dtype is None else tensor.set_data_type(dtype)


def _node_in(entry: Any, tensors: Mapping[int, TensorAttributes]) -> _Node:
    word = _get(entry, "type", str, "a node")
    if word not in _KINDS:
        raise ArgumentError("type of a node", word, ", ".join(_KINDS))
    kind, name = _KINDS[word], _get(entry, "name", str, "a node", "")
    form, where = _FORMS[kind], f"node {name!r}"
    inputs, outputs = _get(entry, "inputs", dict, where), _get(entry, "outputs", dict, where)

    def found(uid: Any, role: str) -> TensorAttributes:
        if type(uid) is not int or uid not in tensors:
            raise ArgumentError(f"{role} of {where}", f"uid {uid!r}", "a tensor of the graph")
        return tensors[uid]

    def held(roles: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
        uids = {role: given.get(f"{role}_tensor_uid") for role in roles}
        return {r: None if uid is None and r in _OPTIONAL - needed else found(uid, r) for r, uid in uids.items()}

    needed = {"epsilon"} if kind != "batchnorm_backward" else set()
    attributes = form.attributes().set_name(name)
    compute = _data_type(entry, "compute_data_type", where)
    if compute is not None:
        attributes.set_compute_data_type(compute)
    if kind == "pointwise":
        operation = _get(inputs, "operation", str, where, "unset")
        if operation != "unset":
            attributes.set_mode(operation)
        for clip in _CLIPS:
            if inputs.get(clip) is not None:
                getattr(attributes, f"set_{clip}")(inputs[clip])
    peers = [found(uid, "peer_stats") for uid in _get(inputs, "peer_stats_tensor_uid", list, where, [])]
    if peers:
        attributes.set_peer_stats(peers)
    if kind == "batchnorm":
        attributes.set_unbiased(_get(inputs, "unbiased", bool, where, True))
    given = held((*form.inputs, *form.scalars), inputs)
    made = {role: tensor for role, tensor in held(form.outputs, outputs).items() if tensor is not None}
    return _Node.of(kind, attributes, given, made)
