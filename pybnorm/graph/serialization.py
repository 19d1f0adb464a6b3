"""The description of a graph as JSON, in hipDNN's words: tensors by uid, nodes by the names of their attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    PointwiseAttributes,
    TensorAttributes,
)
from pybnorm.graph.rules import _CLIPS, _MISSING, _Node
from pybnorm.graph.validation import _peers, _with_uids

_WORDS = {  # of a data type and of a value of it
    DataType.FLOAT32: ("float", "Float32Value"),
    DataType.FLOAT16: ("half", "Float16Value"),
    DataType.BFLOAT16: ("bfloat16", "BFloat16Value"),
    DataType.FLOAT64: ("double", "Float64Value"),
}
_TYPES = {word: dtype for dtype, (word, _) in _WORDS.items()} | {"unset": None, "not_set": None}
_DEFAULTS = ("compute", "intermediate", "io")
_UNUSED = ("axis_tensor_uid", "in_2_tensor_uid", "swish_beta", "elu_alpha", "softplus_beta")


class _Form(NamedTuple):
    """The written form of one kind of node."""

    kind: str
    attributes: type[Any]
    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    outputs: tuple[str, ...]


_RUNNING = ("prev_running_mean", "prev_running_variance")
_FORMS = {
    form.attributes.__name__: form
    for form in (
        _Form(
            "batchnorm",
            BatchnormAttributes,
            ("x", "scale", "bias", *_RUNNING),
            ("epsilon", "momentum"),
            ("y", "mean", "inv_variance", "next_running_mean", "next_running_variance"),
        ),
        _Form(
            "batchnorm_backward",
            BatchnormBackwardAttributes,
            ("dy", "x", "scale", "mean", "inv_variance"),
            ("epsilon",),  # hipDNN has none
            ("dx", "dscale", "dbias"),
        ),
        _Form(
            "batchnorm_inference",
            BatchnormInferenceAttributes,
            ("x", "mean", "inv_variance", "scale", "bias"),
            (),
            ("y",),
        ),
        _Form(
            "batchnorm_inference_variance_ext",
            BatchnormInferenceAttributesVarianceExt,
            ("x", "mean", "variance", "scale", "bias"),
            ("epsilon",),
            ("y",),
        ),
        _Form("pointwise", PointwiseAttributes, ("in_0", "in_1"), (), ("out_0",)),
    )
}
_NAMES = {form.kind: name for name, form in _FORMS.items()}
_OPTIONAL = {*_MISSING, "in_1", "next_running_mean", "next_running_variance"}


def _word(dtype: DataType | None) -> str:
    return "unset" if dtype is None else _WORDS[dtype][0]


def to_json(name: str, dtypes: Sequence[DataType | None], nodes: Sequence[_Node]) -> str:
    """The text; `dtypes` are those of computation, of virtual tensors and of others."""
    for node in nodes:
        for role, tensor in (*node.inputs.items(), *node.scalars.items()):
            if tensor is None and role not in _OPTIONAL:
                raise ArgumentError(f"{role} of {node.name}", None, "a tensor")
    tensors, by_value = _with_uids(nodes)
    return json.dumps(
        {
            "name": name,
            **dict(
                zip(("compute_data_type", "intermediate_data_type", "io_data_type"), map(_word, dtypes), strict=True)
            ),
            "tensors": [_tensor_out(t) for t in (*tensors, *by_value, *_peers(nodes))],
            "nodes": [_node_out(node) for node in nodes],
        },
        indent=1,
    )


def _tensor_out(tensor: TensorAttributes) -> dict[str, Any]:
    value = tensor.get_value()
    made = {
        "uid": tensor.get_uid(),
        "name": tensor.get_name(),
        "data_type": _word(tensor.get_data_type()),
        "dims": tensor.get_dim(),
        "strides": tensor.get_stride(),
        "virtual": tensor.get_is_virtual(),
        "is_runtime_pass_by_value": False,
    }
    if value is None:
        return made
    dtype = tensor.get_data_type()
    assert dtype is not None
    return {**made, "value_type": _WORDS[dtype][1], "value": value}


def _node_out(node: _Node) -> dict[str, Any]:
    form = _FORMS[_NAMES[node.kind]]

    def uids(roles: Sequence[str], held: Mapping[str, TensorAttributes | None]) -> dict[str, Any]:
        return {f"{role}_tensor_uid": tensor.get_uid() if (tensor := held.get(role)) else None for role in roles}

    inputs = uids((*form.inputs, *form.scalars), {**node.inputs, **node.scalars})
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
        "type": _NAMES[node.kind],
        "compute_data_type": _word(node.attributes.get_compute_data_type()),
        "inputs": inputs,
        "outputs": uids(form.outputs, node.outputs),
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
    kind = _get(entry, "type", str, "a node")
    if kind not in _FORMS:
        raise ArgumentError("type of a node", kind, ", ".join(_FORMS))
    form, name = _FORMS[kind], _get(entry, "name", str, "a node", "")
    where = f"node {name!r}"
    inputs, outputs = _get(entry, "inputs", dict, where), _get(entry, "outputs", dict, where)

    def found(uid: Any, role: str) -> TensorAttributes:
        if type(uid) is not int or uid not in tensors:
            raise ArgumentError(f"{role} of {where}", f"uid {uid!r}", "a tensor of the graph")
        return tensors[uid]

    def held(roles: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for role in roles:
            uid = given.get(f"{role}_tensor_uid")
            if uid is not None or role not in _OPTIONAL or (role == "epsilon" and form.kind != "batchnorm_backward"):
                made[role] = found(uid, role)
        return made

    attributes = form.attributes().set_name(name)
    compute = _data_type(entry, "compute_data_type", where)
    if compute is not None:
        attributes.set_compute_data_type(compute)
    if form.kind == "pointwise":
        operation = _get(inputs, "operation", str, where, "unset")
        if operation != "unset":
            attributes.set_mode(operation)
        for clip in _CLIPS:
            if inputs.get(clip) is not None:
                getattr(attributes, f"set_{clip}")(inputs[clip])
    peers = [found(uid, "peer_stats") for uid in _get(inputs, "peer_stats_tensor_uid", list, where, [])]
    if peers:
        attributes.set_peer_stats(peers)
    if form.kind == "batchnorm":
        attributes.set_unbiased(_get(inputs, "unbiased", bool, where, True))
    made = held(form.inputs, inputs), held(form.outputs, outputs), held(form.scalars, inputs)
    for role, tensor in {**made[0], **made[2]}.items():
        if role in ("epsilon", "momentum", *_RUNNING) or (form.kind == "batchnorm_backward" and role in _MISSING):
            getattr(attributes, f"set_{role}")(tensor)
    return _Node(form.kind, attributes, *made)
