"""A script in the words of hipDNN's own Python runs, and computes what the reference says; graphs survive as JSON."""

import json

import numpy as np
import pytest
from tables import table

import pybnorm
from pybnorm import ArgumentError, hipdnn, reference
from pybnorm.graph import Graph, serialization

DIMS = [4, 8, 6, 5]


def tensor(dims=DIMS, name=""):
    return hipdnn.Tensor.create(dims, hipdnn.DataType.FLOAT).set_name(name)


def vectors(*names):
    return [tensor([1, DIMS[1], 1, 1], name) for name in names]


def new_graph(name):
    made = hipdnn.Graph()
    made.set_name(name)
    made.set_io_data_type(hipdnn.DataType.FLOAT)
    made.set_intermediate_data_type(hipdnn.DataType.FLOAT)
    made.set_compute_data_type(hipdnn.DataType.FLOAT)
    return made


def outputs(*made):
    for one in made:
        one.set_output(True)
    return list(made)


def scalar(value):
    made = hipdnn.Tensor()
    made.set_value(value)
    return made


def training(running=True):
    made = new_graph("training")
    given = [tensor(name="x"), *vectors("scale", "bias", *(["mean", "variance"] if running else []))]
    attributes = hipdnn.BatchnormAttributes().set_name("bn").set_epsilon(scalar(1e-3))
    if running:
        attributes.set_previous_running_stats(*given[3:], scalar(0.25))
    return made, given, outputs(*(t for t in made.batchnorm(*given[:3], attributes) if t is not None))


def backward(saved=False):
    made, attributes = new_graph("backward"), hipdnn.BatchnormBackwardAttributes()
    given = [tensor(name="dy"), tensor(name="x"), *vectors("scale", *(["mean", "inv"] if saved else []))]
    if saved:
        attributes.set_saved_mean_and_inv_variance(*given[3:])
    return made, given, outputs(*made.batchnorm_backward(*given[:3], attributes))


def inference(variance=False):
    made, given = new_graph("inference"), [tensor(name="x"), *vectors("mean", "spread", "scale", "bias")]
    if variance:
        kind = hipdnn.BatchnormInferenceAttributesVarianceExt()
        return made, given, outputs(made.batchnorm_inference_variance_ext(*given, hipdnn.Tensor(1e-3), kind))
    return made, given, outputs(made.batchnorm_inference(*given, hipdnn.BatchnormInferenceAttributes()))


def residual():
    made, x, z = new_graph("residual"), tensor(name="x"), tensor(name="z")
    four = vectors("mean", "spread", "scale", "bias")
    y = made.batchnorm_inference(x, *four, hipdnn.BatchnormInferenceAttributes())
    added = made.pointwise(y, z, hipdnn.PointwiseAttributes().set_name("add").set_mode(hipdnn.PointwiseMode.ADD))
    attributes = hipdnn.PointwiseAttributes().set_mode(hipdnn.PointwiseMode.RELU_FWD).set_relu_lower_clip(0.0)
    return made, [x, z, *four], outputs(made.pointwise(added, attributes))


GRAPHS = {
    "training": training,
    "training, no running statistics": lambda: training(running=False),
    "backward": backward,
    "backward, saved": lambda: backward(saved=True),
    "inference": inference,
    "inference, variance": lambda: inference(variance=True),
    "residual": residual,
}


def values(given):
    rng = np.random.default_rng(7)
    return [rng.uniform(0.5, 2, t.get_dim()).astype(np.float32) for t in given]


def run(made, given, wanted, handle, backend, stages=True):
    """As hipDNN's own tests do it: memory by address."""
    if stages:
        assert made.validate().is_good()
        assert made.build_operation_graph(handle).is_good()
        assert made.create_execution_plans().is_good()
        assert made.check_support().is_good(), made.check_support().get_message()
        assert made.build_plans(hipdnn.BuildPlanPolicy.ALL).is_good()
    pack, buffers = {}, []
    for one, array in [*zip(given, values(given), strict=True), *((t, np.zeros(t.get_dim(), "f4")) for t in wanted)]:
        buffer = hipdnn.DeviceBuffer(array.nbytes, backend=backend)
        address = buffer.ptr()
        buffer.copy_from_host(array.tobytes())
        assert (buffer.ptr(), buffer.size()) == (address, array.nbytes)
        pack[one.get_uid()] = address
        buffers.append(buffer)
    size = made.get_workspace_size()
    workspace = hipdnn.DeviceBuffer(size, backend=backend) if size else None
    error = made.execute_plan_at_index(handle, pack, workspace.ptr() if workspace else 0, 0)
    assert error.is_good(), error.get_message()
    kept = buffers[len(given) :]
    return [np.frombuffer(b.copy_to_host(), "f4").reshape(t.get_dim()) for t, b in zip(wanted, kept, strict=True)]


@pytest.fixture
def named(handle):
    """hipDNN's handle of the backend under test."""
    made = hipdnn.create_handle(backend=handle.backend)
    yield made
    hipdnn.destroy_handle(made)


def test_a_copy_to_the_host_waits_for_every_stream(named, handle, monkeypatch):
    """The handle's stream is not that of the memory's device."""
    buffer, waits = hipdnn.DeviceBuffer(64, backend=handle.backend), []
    monkeypatch.setattr(type(buffer._device), "synchronize_all", lambda device: waits.append(device), raising=True)
    buffer.copy_to_host()
    assert waits == [buffer._device]


def test_backward_takes_hipdnns_epsilon(named, handle):
    made, given, wanted = backward()
    dx, dscale, dbias = run(made, given, wanted, named, handle.backend)
    dy, x, scale = values(given)
    want = reference.backward(x.astype("f8"), dy.astype("f8"), scale.reshape(-1).astype("f8"), epsilon=1e-5)
    for got, right in zip((dx, dscale, dbias), want, strict=True):
        np.testing.assert_allclose(got.reshape(np.shape(right)), right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_graph_survives_as_json_and_computes_the_same_bits(named, handle, kind):
    made, given, wanted = GRAPHS[kind]()
    expected = run(made, given, wanted, named, handle.backend)
    restored = hipdnn.Graph()
    assert restored.from_json(named, made.to_json()).is_good()
    assert restored.to_json() == made.to_json()
    assert restored.get_name() == made.get_name()
    assert restored.get_io_data_type() == hipdnn.DataType.FLOAT
    assert restored.create_execution_plans().is_good()
    assert restored.build_plan_at_index(0).is_good()
    assert restored.get_plan_name_at_index(0) == made.get_plan_name()
    for one, other in zip(expected, run(restored, given, wanted, named, handle.backend, stages=False), strict=True):
        np.testing.assert_array_equal(one, other)
    again = hipdnn.Graph()
    assert again.from_compiled_plan_binary(named, made.to_compiled_plan_binary()).is_good()
    assert again.get_workspace_size_plan_at_index(0) == made.get_workspace_size()
    document = json.loads(made.to_json())
    assert document["io_data_type"] == document["compute_data_type"] == "float"
    uids = {t["uid"]: t for t in document["tensors"]}
    assert {t.get_uid() for t in (*given, *wanted)} <= set(uids)
    assert uids[given[0].get_uid()] | {"uid": 0} == {
        "uid": 0, "name": given[0].get_name(), "data_type": "float", "dims": DIMS, "strides": [240, 30, 5, 1],
        "virtual": False, "is_runtime_pass_by_value": False,
    }  # fmt: skip
    kinds = {"float": "Float32Value", "double": "Float64Value"}
    assert all(t["value_type"] == kinds[t["data_type"]] for t in uids.values() if "value" in t)
    for node in document["nodes"]:
        assert node["type"] in serialization._KINDS
        ends = [v for k, v in {**node["inputs"], **node["outputs"]}.items() if k.endswith("_uid") and type(v) is int]
        assert set(ends) <= set(uids)
        assert len(ends) >= 2


def test_what_is_wrong_is_returned(named):
    made = hipdnn.Graph()
    error = made.validate()
    assert (error.is_bad(), error.get_code()) == (True, hipdnn.ErrorCode.INVALID_VALUE)
    assert "no nodes" in error.get_message()
    for early in (made.create_execution_plans, made.check_support, made.build_plans):
        assert early().is_bad()
    assert made.build_operation_graph(named).is_bad()
    assert made.build(named).is_bad()
    assert made.execute(named, {}).is_bad()
    assert made.from_json("{").is_bad()
    assert made.create_execution_plan_ext(1).is_bad()
    with pytest.raises(ArgumentError):
        made.to_compiled_plan_binary()
    made, given, _ = training()
    given[1].set_uid(5)
    given[2].set_uid(5)
    assert made.checkNoDuplicateTensorIds().is_bad()
    assert made.build_operation_graph("no handle").is_bad()
    hipdnn.destroy_handle(named)
    with pytest.raises(ArgumentError, match="destroyed"):
        named.get()


def test_plan_queries(named, handle):
    made, given, _ = inference()
    assert made.set_preferred_engine_id_ext("anything").get_preferred_engine_id_ext() == "anything"
    with pytest.raises(ArgumentError):
        made.get_plan_name()
    assert made.validate().is_good()
    assert made.topologicallySortGraph().is_good()
    assert made.build_operation_graph(named).is_good()
    assert made.get_ranked_engine_ids() == [0]
    assert made.create_execution_plan_ext(0).is_good()
    assert made.get_execution_plan_engine_id() == 0
    assert made.get_behavior_notes_for_engine(0) == []
    assert made.get_plan_name() == f"{handle.backend}: forward_inference_inv_variance"
    for index in (-1, 1, "0"):
        assert made.build_plan_at_index(index).is_bad()
        assert made.execute_plan_at_index(named, {}, 0, index).is_bad()
    assert hipdnn.Graph.tensor(given[0]).get_dim() == DIMS
    assert given[0].get_is_pass_by_value() is False
    assert int(named) == named.get() != 0
    named.set_stream(0)
    assert hipdnn.get_stream(named) == named.get_stream()


@table(
    ("change", "named_in_error"),
    [
        (lambda d: d | {"nodes": None}, "nodes"),
        (lambda d: d | {"nodes": [{"type": "ConvolutionFwdAttributes", "name": "", "inputs": {}, "outputs": {}}]},
         "type"),
        (lambda d: d | {"tensors": []}, "x"),
        (lambda d: d | {"io_data_type": "fp8_e4m3"}, "io_data_type"),
        (lambda d: d | {"tensors": d["tensors"] * 2}, "uid"),
        (lambda d: d | {"tensors": [d["tensors"][0] | {"dims": [0]}, *d["tensors"][1:]]}, "dim"),
        (lambda d: [d], "the graph"),
    ],
)  # fmt: skip
def test_json_that_is_not_a_graph_is_refused_by_name_and_changes_nothing(change, named_in_error):
    made, _, _ = training()
    before = made.to_json()
    plain = Graph()
    plain.from_json(before)
    with pytest.raises(ArgumentError, match=named_in_error):
        plain.from_json(json.dumps(change(json.loads(before))))
    assert plain.to_json() == before


def test_the_first_backend_that_works(monkeypatch, load_library):
    load_library("onednn")
    tried = []

    def opened(name):
        tried.append(name)
        if name != "onednn":
            raise pybnorm.errors.LibraryNotFoundError("not here", backend=name)
        return real(name)

    real = pybnorm.Handle
    monkeypatch.setattr(pybnorm, "Handle", opened)
    handle = hipdnn.create_handle()
    assert tried == ["miopen", "cudnn", "onednn"]
    monkeypatch.setattr(pybnorm, "Handle", real)
    hipdnn.destroy_handle(handle)
