"""Every public name of hipDNN's own Python is here with its signature, or is refused by a sentence.

The names are those of projects/hipdnn/python in ROCm/rocm-libraries as it was on 2026-11-23.
"""

import inspect

import numpy as np
import pytest
from tables import table

from pybnorm import ArgumentError, ArgumentTypeError, hipdnn

# Of each class the methods with hipDNN's names of arguments; "/" where it gives none: then they go by position.
COMMON = {"set_name": "name, /", "get_name": "", "set_compute_data_type": "data_type, /", "get_compute_data_type": ""}


def pairs(*roles):
    return {name: spec for role in roles for name, spec in ((f"set_{role}", "t, /"), (f"get_{role}", ""))}


METHODS = {
    "BatchnormAttributes": {
        **COMMON,
        **pairs("x", "scale", "bias", "epsilon", "peer_stats", "prev_running_mean", "prev_running_variance"),
        **pairs("momentum", "y", "mean", "inv_variance", "next_running_mean", "next_running_variance"),
        "set_previous_running_stats": "mean, variance, momentum, /",
    },
    "BatchnormBackwardAttributes": {
        **COMMON,
        **pairs("dy", "x", "scale", "mean", "inv_variance", "dx", "dscale", "dbias", "peer_stats"),
        "set_saved_mean_and_inv_variance": "mean, inv_variance, /",
    },
    "BatchnormInferenceAttributes": {**COMMON, **pairs("x", "mean", "inv_variance", "scale", "bias", "y")},
    "BatchnormInferenceAttributesVarianceExt": {
        **COMMON,
        **pairs("x", "mean", "variance", "scale", "bias", "epsilon", "y"),
    },
    "PointwiseAttributes": {
        **COMMON,
        **pairs("mode", "relu_lower_clip", "relu_upper_clip", "relu_lower_clip_slope"),
        **pairs("input_0", "input_1", "input_2", "output_0"),
    },
    "Tensor": {
        **pairs("uid", "name", "data_type", "stride", "dim", "is_virtual", "is_pass_by_value"),
        **{"create": "dims, data_type", "set_output": "output, /", "set_value": "value, data_type=None"},
        **{"get_is_runtime_pass_by_value": "", "get_volume": "", "has_uid": "", "clear_uid": "", "validate": ""},
    },
    "Error": {"get_message": "", "get_code": "", "is_good": "", "is_bad": ""},
    "Handle": {
        **{"get": "", "set_stream": "stream", "get_stream": "", "get_loaded_engine_plugin_paths": ""},
        **{"get_engine_info": "engine_id", "engine_id_to_name": "engine_id"},
        **{"__int__": "", "__index__": "", "__repr__": ""},
    },
    "DeviceBuffer": {
        **{"copy_from_host": "data", "copy_to_host": "", "zeros": "", "size": "", "ptr": "", "__repr__": ""},
    },
    "Graph": {
        **{"validate": "", "checkNoDuplicateTensorIds": "", "topologicallySortGraph": "", "check_support": ""},
        **{"build_operation_graph": "handle", "create_execution_plans": "modes=()", "build_plans": "policy=0"},
        **{"create_execution_plan_ext": "engine_id, knob_settings=()", "get_execution_plan_engine_id": ""},
        **{"get_ranked_engine_ids": "modes=()", "get_behavior_notes_for_engine": "engine_id"},
        **{"get_workspace_size": "", "get_execution_plan_count": "", "get_autotune_workspace_size": ""},
        **{"execute": "handle, variant_pack, workspace=0", "get_plan_name": "", "build_plan_at_index": "plan_index"},
        "execute_plan_at_index": "handle, variant_pack, workspace, plan_index",
        **{"get_workspace_size_plan_at_index": "plan_index", "get_plan_name_at_index": "plan_index"},
        **{"get_knobs_for_engine": "engine_id", "get_knob_lookup_for_engine": "engine_id"},
        **{"set_name": "name, /", "get_name": "", "set_io_data_type": "t, /", "get_io_data_type": ""},
        **{"set_compute_data_type": "t, /", "get_compute_data_type": ""},
        **{"set_intermediate_data_type": "t, /", "get_intermediate_data_type": ""},
        **{"batchnorm": "x, scale, bias, attributes, /", "batchnorm_backward": "dy, x, scale, attributes, /"},
        "batchnorm_inference": "x, mean, inv_variance, scale, bias, attributes",
        "batchnorm_inference_variance_ext": "x, mean, variance, scale, bias, epsilon, attributes, /",
        "pointwise": ("in_0, attributes, /", "in_0, in_1, attributes, /", "in_0, in_1, in_2, attributes, /"),
        **{"set_preferred_engine_id_ext": "engineId=None", "get_preferred_engine_id_ext": ""},
        **{"tensor": "tensor", "tensor_like": "tensor, name=''"},
        **{"to_json": "", "to_binary": "", "from_json": ("handle, json_string", "json_string")},
        "from_binary": ("handle, data", "data"),
        **{"to_compiled_plan_binary": "", "from_compiled_plan_binary": "handle, data"},  # of its C++
    },
}
FUNCTIONS = {
    "create_handle": ("", "stream"),
    "destroy_handle": "handle",
    "set_stream": "handle, stream",
    "get_stream": "handle",
    "get_loaded_engine_plugin_paths": "handle",
    "engine_id_to_name": "engine_id",
    "get_dtype_size": "dtype",
    "Handle": ("", "stream"),
    "DeviceBuffer": "size_bytes",
    "Error": ("", "code, err_msg, /"),
    **dict.fromkeys((*METHODS,)[:6], ""),
    "Graph": "",
}
MEMBERS = {
    "DataType": "NOT_SET FLOAT HALF BFLOAT16 DOUBLE",
    "PointwiseMode": "ADD RELU_BWD RELU_FWD",
    "HeuristicMode": "FALLBACK",
    "BuildPlanPolicy": "HEURISTICS_CHOICE ALL",
    "BehaviorNote": (
        "RUNTIME_COMPILATION REQUIRES_LAYOUT_TRANSFORM SUPPORTS_GRAPH_CAPTURE EXTERNAL_LIBRARY_DEPENDENCY "
        "SUPPORTS_EXECUTION_PLAN_SERIALIZATION"
    ),
    "ErrorCode": (
        "OK INVALID_VALUE HIPDNN_BACKEND_ERROR ATTRIBUTE_NOT_SET GRAPH_NOT_SUPPORTED SHAPE_DEDUCTION_FAILED "
        "INVALID_TENSOR_NAME INVALID_VARIANT_PACK GRAPH_EXECUTION_PLAN_CREATION_FAILED GRAPH_EXECUTION_FAILED "
        "HEURISTIC_QUERY_FAILED UNSUPPORTED_GRAPH_FORMAT CUDA_API_FAILED CUDNN_BACKEND_API_FAILED INVALID_CUDA_DEVICE "
        "HANDLE_ERROR NVRTC_COMPILATION_FAILED"
    ),
    "EngineInfo": "engine_id engine_name plugin_name version type",
}
REFUSED_MEMBERS = {"DataType": "UINT8 FP8_E4M3 BOOLEAN", "PointwiseMode": "NOT_SET MUL SIGMOID_FWD"}
ABSENT = "Knob ConvFpropAttributes set_engine_plugin_paths Graph.matmul PointwiseAttributes.set_axis DataTypes"


def takes(function, spec, bound):
    """Whether calls of hipDNN's signature reach the function: by position, and by each name that hipDNN gives."""
    own = inspect.signature(function)
    theirs = inspect.signature(eval(f"lambda {spec}: 0"))  # a constant of this file
    names = list(theirs.parameters)
    own.bind(*[None] * bound, *names)
    if "/" not in spec:
        own.bind(*[None] * bound, **{name: None for name in names})
    required = [p for p in theirs.parameters.values() if p.default is p.empty]
    own.bind(*[None] * bound, *required)


def specs(spec):
    return spec if isinstance(spec, tuple) else (spec,)


@table(("owner", "name"), [(owner, name) for owner in METHODS for name in METHODS[owner]])
def test_a_method_is_here_with_its_signature(owner, name):
    kind = getattr(hipdnn, owner)
    bound = 0 if isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod)) else 1
    for spec in specs(METHODS[owner][name]):
        takes(getattr(kind, name), spec, bound)


@table("name", FUNCTIONS)
def test_a_name_of_the_module_is_here_with_its_signature(name):
    assert name in hipdnn.__all__
    for spec in specs(FUNCTIONS[name]):
        takes(getattr(hipdnn, name), spec, 0)


def test_members_are_here_and_others_are_refused_by_a_sentence():
    for name, members in MEMBERS.items():
        assert all(hasattr(getattr(hipdnn, name), member) for member in members.split()), name
    for name, members in REFUSED_MEMBERS.items():
        for member in members.split():
            with pytest.raises(AttributeError, match=rf"hipdnn\.{name}\.{member} is not here; these are: .*, "):
                getattr(getattr(hipdnn, name), member)
    for name in ABSENT.split():
        owner, _, method = name.rpartition(".")
        with pytest.raises(AttributeError, match=rf"pybnorm\.hipdnn\.{name} is not here: .*batch norm.*plugins"):
            getattr(getattr(hipdnn, owner)() if owner else hipdnn, method)
        assert not hasattr(hipdnn, name)


def test_the_module_lists_what_is_here():
    assert set(hipdnn.__all__) == {*FUNCTIONS, *MEMBERS, "TensorAttributes"}


# -------- behaviour that is hipDNN's and not of `pybnorm.graph`


@table("kind", [kind for kind in METHODS if kind.endswith(("Attributes", "Ext"))])
def test_attributes_keep_what_they_are_given(kind):
    """Each setter returns the attributes, and reaches its own getter only."""
    made = getattr(hipdnn, kind)()
    others = ("get_name", "get_compute_data_type", "get_mode", "get_peer_stats")
    roles = [name.removeprefix("get_") for name in METHODS[kind] if name.startswith("get_") and name not in others]
    tensors = {role: hipdnn.Tensor.create([1], hipdnn.DataType.HALF) for role in roles if "clip" not in role}
    given = tensors | {role: 0.25 + place for place, role in enumerate(roles) if "clip" in role}
    for role, value in given.items():
        assert getattr(made, f"get_{role}")() is None
        assert getattr(made, f"set_{role}")(value) is made
        if role in tensors:
            with pytest.raises(ArgumentError, match=r"in_0|inputs|output|" + role):
                getattr(made, f"set_{role}")(1j)
    for role, value in given.items():
        assert getattr(made, f"get_{role}")() == value
    assert made.set_compute_data_type(hipdnn.DataType.FLOAT).get_compute_data_type() == hipdnn.DataType.FLOAT
    if "get_peer_stats" in METHODS[kind]:
        assert made.set_peer_stats([given["x"]]).get_peer_stats() == [given["x"]]


def test_scalars_are_rounded_to_their_data_type():
    """As C++ stores them: without a data type FLOAT."""
    one = hipdnn.Tensor().set_value(1e-3)
    assert (one.get_value(), one.get_data_type()) == (float(np.float32(1e-3)), hipdnn.DataType.FLOAT)
    one = hipdnn.Tensor().set_value(1e-3, hipdnn.DataType.HALF)
    assert (one.get_value(), one.get_data_type()) == (float(np.float16(1e-3)), hipdnn.DataType.HALF)
    one = hipdnn.Tensor().set_data_type(hipdnn.DataType.BFLOAT16).set_value(data_type=None, value=0.3)
    assert (one.get_value(), one.get_data_type()) == (0.30078125, hipdnn.DataType.BFLOAT16)
    assert hipdnn.Tensor().set_value(1e-3, hipdnn.DataType.DOUBLE).get_value() == 1e-3
    for value, dtype in ((1e6, hipdnn.DataType.HALF), ("1", None), (1.0, "int8")):
        with pytest.raises(ArgumentError):
            hipdnn.Tensor().set_value(value, dtype)
    for value in (True, 1):
        with pytest.raises(ArgumentError, match="is_pass_by_value"):
            hipdnn.Tensor().set_is_pass_by_value(value)
    assert hipdnn.Tensor(2.0).set_is_pass_by_value(False).get_value() is None


def test_a_tensor_is_validated():
    made = hipdnn.Tensor()
    for missing, add in (
        ("dim", lambda: made.set_dim([2, 3])),
        ("stride", lambda: made.set_stride([3])),
        ("stride", lambda: made.set_stride([3, 1])),
        ("data_type", lambda: made.set_data_type(hipdnn.DataType.HALF)),
    ):
        error = made.validate()
        assert (error.is_bad(), error.get_code()) == (True, hipdnn.ErrorCode.INVALID_VALUE)
        assert error.get_message().startswith(f"{missing}: got")
        add()
    assert made.validate().is_good()
    graph = hipdnn.Graph()
    y = graph.relu(made)
    assert type(y) is type(graph.tensor(made)) is type(hipdnn.Graph.tensor_like(made)) is hipdnn.Tensor
    assert y.validate().is_bad()


def test_states_are_runtime_errors_too():
    """As nanobind turns what C++ throws; wrong types are TypeErrors in both."""
    graph = hipdnn.Graph()
    calls = {
        **dict.fromkeys(("get_workspace_size", "get_autotune_workspace_size", "get_plan_name"), ()),
        **dict.fromkeys(("get_ranked_engine_ids", "get_execution_plan_engine_id", "to_compiled_plan_binary"), ()),
        **{"get_plan_name_at_index": (1,), "get_workspace_size_plan_at_index": (3,)},
        **{"get_behavior_notes_for_engine": (7,), "get_knobs_for_engine": (7,), "get_knob_lookup_for_engine": (7,)},
    }
    for name, arguments in calls.items():
        with pytest.raises(RuntimeError) as caught:
            getattr(graph, name)(*arguments)
        assert isinstance(caught.value, ArgumentError)
    with pytest.raises(ArgumentTypeError):
        graph.get_plan_name_at_index("0")


def test_memory_and_handles(load_library):
    load_library("onednn")
    handle = hipdnn.Handle(backend="onednn")
    assert "onednn at 0x" in repr(handle)
    info = handle.get_engine_info(engine_id=0)
    assert info.engine_id == 0
    assert info.engine_name == handle.engine_id_to_name(0) == "onednn"
    assert (info.plugin_name, info.version.count(".")) == ("oneDNN", 2)
    assert hipdnn.get_loaded_engine_plugin_paths(handle) == handle.get_loaded_engine_plugin_paths()
    assert "dnnl" in handle.get_loaded_engine_plugin_paths()[0]
    assert hipdnn.engine_id_to_name(0) == ""
    with pytest.raises(ArgumentError, match="engine_id"):
        handle.get_engine_info(1)
    buffer = hipdnn.DeviceBuffer(5, backend="onednn")
    buffer.copy_from_host(b"12345")
    assert (buffer.copy_to_host(), buffer.size(), repr(buffer)) == (b"12345", 5, "<DeviceBuffer of 5 bytes>")
    buffer.zeros()
    assert buffer.copy_to_host() == bytes(5)
    with pytest.raises(RuntimeError, match="6 bytes"):
        buffer.copy_from_host(b"123456")
    hipdnn.destroy_handle(handle)
    assert "destroyed" in repr(handle)
    with pytest.raises(RuntimeError, match="destroyed"):
        handle.get_stream()


def test_sizes_of_elements():
    sizes = {"float32": 4, "<f2": 2, "float64": 8, "<i4": 4, "uint8": 1, "int8": 1}
    assert {name: hipdnn.get_dtype_size(name) for name in sizes} == sizes
    assert hipdnn.get_dtype_size(np.dtype(np.float32)) == 4
    for wrong in ("int16", "complex64", object()):
        with pytest.raises(ArgumentError, match="dtype"):
            hipdnn.get_dtype_size(wrong)
