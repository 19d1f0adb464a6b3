"""Batch norm with a fused activation: judged where the library has it, refused by name where it has not.

MIOpen 3.5 added the calls; CI runs this file on it in the rig (ci/rocm-rig.sh). The last tests run it again in a child
process on a double of libMIOpen that has them, and on one that has not: `tests/doubles/miopen_computes.h`.
"""

import ctypes
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_calls
from place import device_of
from tables import table

import pybnorm
from pybnorm import (
    Activation,
    ArgumentError,
    Capability,
    DataType,
    Layout,
    Mode,
    Operation,
    UnsupportedError,
    _arguments,
    miopen,
    operations,
)
from pybnorm.check.language import calls
from pybnorm.miopen import ActivationMode

TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
OPERATIONS = (TRAIN, INFER, BACKWARD)
DIMS = (4, 3, 4, 5)
ACTIVATIONS = {
    "relu": {"activation": Activation.RELU},
    "clipped": {"activation": Activation.CLIPPED_RELU, "high": 0.75},
    "clamp": {"activation": Activation.CLAMP, "low": -0.5, "high": 0.625},
}
MODES = (Mode.SPATIAL, Mode.PER_ACTIVATION)
BLENDS = [(1.0, 0.0, 1.0, 0.0), (-2.0, 0.0, 1.0, 0.0), (0.5, -1.5, -2.0, 3.0)]
MIOPEN_API = Path(__file__).parents[2] / "pybnorm" / "backends" / "miopen" / "api.h"
HERE = "not onednn and not native"
CHILD = "PYBNORM_TEST_ACTIVATION_CHILD"  # what the double has: "with", "without" or "plain"


class Case(test_calls.Case):
    """A case with an activation."""

    def __init__(self, handle, operation, mode, activation, blend=BLENDS[0], saved=True):
        options = dict(zip(("alpha", "beta", "alpha_param", "beta_param"), blend, strict=True))
        options |= {"fill": "randn", "eps": 1e-3, "factor": 0.25, "saved": saved, **ACTIVATIONS.get(activation, {})}
        layout = Layout.CHANNELS_FIRST
        super().__init__(handle, test_calls.problem_of(operation, mode, DataType.FLOAT32, layout, DIMS, **options))

    @property
    def arrays(self):
        return {**self.given, **self.made}

    def call(self, **changes):
        method = getattr(self.handle, calls.METHODS[self.problem.operation])
        method(**{**self.arrays, **calls.options(self.problem), **changes})

    def refuses(self, error, call, argument=None):
        """The error of a call that writes nothing."""
        with pytest.raises(error) as caught:
            call()
        self.device.synchronize()
        self.unchanged(self.arrays)
        if argument:
            assert (caught.value.argument, bool(caught.value.allowed)) == (argument, True)
        return caught.value


def fuses(handle, operation, mode=Mode.SPATIAL):
    bits, _ = pybnorm.capability(handle.backend, operation, mode, DataType.FLOAT32, 0, len(DIMS))
    return Capability.ACTIVATION in bits


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_the_activation_comes_before_the_blend(handle, operation, mode, activation):
    for blend, saved in itertools.product(BLENDS, [True, False]):
        case = Case(handle, operation, mode, activation, blend, saved)
        if fuses(handle, operation, mode):
            case.run_arrays()
            case.judge()
        else:
            for attempt in (lambda case=case: case.workspace(case.descriptors()), case.call):
                text = case.refuses(UnsupportedError, attempt).text
                assert "activation" in text or "ReLU" in text


@table(("changes", "argument"), [
    ({"activation": 4}, "activation"), ({"activation": "tanh"}, "activation"), ({"activation": None}, "activation"),
    ({"activation": True}, "activation"),
    ({"activation": "relu", "activation_low": 0.0}, "activation_low"),
    ({"activation": "relu", "activation_high": 6.0}, "activation_high"),
    ({"activation": "none", "activation_high": 6.0}, "activation_high"),
    ({"activation": "clipped_relu"}, "activation_high"),
    ({"activation": "clipped_relu", "activation_low": 0.0, "activation_high": 6.0}, "activation_low"),
    ({"activation": "clipped_relu", "activation_high": 0.0}, "activation_high"),
    ({"activation": "clipped_relu", "activation_high": float("nan")}, "activation_high"),
    ({"activation": "clipped_relu", "activation_high": 1e39}, "activation_high"),
    ({"activation": "clamp", "activation_high": 1.0}, "activation_low"),
    ({"activation": "clamp", "activation_low": 1.0}, "activation_high"),
    ({"activation": "clamp", "activation_low": 1.0, "activation_high": 1.0 + 1e-9}, "activation_high"),
    ({"activation": "clamp", "activation_low": float("-inf"), "activation_high": 1.0}, "activation_low"),
    ({"activation": "clamp", "activation_low": "0", "activation_high": 1.0}, "activation_low"),
])  # fmt: skip
@table("operation", OPERATIONS)
def test_bad_activations_are_refused_by_name(handle, operation, changes, argument):
    case = Case(handle, operation, Mode.SPATIAL, None)
    x = case.descriptors()["x"]
    for call in (lambda: case.call(**changes), lambda: handle.workspace_size(operation, x, **changes)):
        case.refuses(ArgumentError, call, argument)


def test_backward_takes_the_bias_with_an_activation_only(handle):
    case = Case(handle, BACKWARD, Mode.SPATIAL, "relu")
    for changes in ({"bias": None}, {"activation": Activation.NONE}):
        case.refuses(ArgumentError, lambda changes=changes: case.call(**changes), "bias")


def test_axpby_has_no_activation(handle):
    with pytest.raises(ArgumentError, match="activation"):
        handle.workspace_size("axpby", pybnorm.TensorDescriptor(handle.backend, "f32", DIMS), activation="relu")


def test_the_calls_on_addresses_take_it_too(handle):
    case = Case(handle, BACKWARD, Mode.SPATIAL, "clamp")
    if not fuses(handle, BACKWARD):
        pytest.skip(f"{handle.backend}: no fused activation; refusals are tested on arrays")
    arguments = {**case.addresses(), **calls.options(case.problem)}
    bad = arguments | {"bias": None}
    case.refuses(ArgumentError, lambda: pybnorm.batch_normalization_backward(handle, **bad), "bias")
    case.run_addresses()
    case.judge()


def test_bfloat16_takes_no_alpha_behind_an_activation(handle):
    if handle.backend != "miopen" or not fuses(handle, TRAIN):
        pytest.skip(f"{handle.backend}: only MIOpen's fused calls go through miopenOpTensor")
    described = pybnorm.TensorDescriptor("miopen", "bf16", DIMS)
    assert handle.workspace_size(TRAIN, described, activation="relu") == 0
    for blend in ({"alpha": 2.0}, {"beta": 1.0}):
        with pytest.raises(UnsupportedError, match="bfloat16"):
            handle.workspace_size(TRAIN, described, activation="relu", **blend)
    assert handle.workspace_size(TRAIN, described, alpha=2.0) > 0


# ---------------------------------------------------------------- by MIOpen's names

DESCRIPTORS = {
    "relu": miopen.ActivationDescriptor(ActivationMode.RELU, 5.0, -5.0),  # its bounds are not read
    "clipped": miopen.ActivationDescriptor(ActivationMode.CLIPPEDRELU, 0.75),
    "clamp": miopen.ActivationDescriptor(10, -0.5, 0.625),
}
MIOPENS = {
    "scale": "bn_scale", "bias": "bn_bias", "dscale": "result_bn_scale_diff", "dbias": "result_bn_bias_diff",
    TRAIN: {"running_mean": "result_running_mean", "running_variance": "result_running_variance",
            "saved_mean": "result_save_mean", "saved_inv_variance": "result_save_inv_variance"},
    INFER: {"running_mean": "estimated_mean", "running_variance": "estimated_variance"},
    BACKWARD: {"alpha": "alpha_data_diff", "beta": "beta_data_diff"},
    "alpha_param": "alpha_param_diff",
    "beta_param": "beta_param_diff", "mode": "bn_mode", "exponential_average_factor": "exp_avg_factor",
}  # fmt: skip
FUNCTIONS = {
    TRAIN: miopen.batch_norm_forward_training_activation,
    INFER: miopen.batch_norm_forward_inference_activation,
    BACKWARD: miopen.batch_norm_backward_activation,
}


class Named(Case):
    """The same by MIOpen's names."""

    def call(self, descriptor=None, operation=None, **changes):
        operation = operation or self.problem.operation
        names, function = {**MIOPENS, **MIOPENS[operation]}, FUNCTIONS[operation]
        data = self.descriptors()["x"]
        derived = pybnorm.derive_bn_tensor_descriptor(data, self.problem.mode)
        parameters = inspect.signature(function).parameters
        arguments = dict.fromkeys(name for name, p in parameters.items() if p.default is p.empty)
        for name in arguments:
            if name.endswith("_desc"):
                arguments[name] = data if name in ("x_desc", "y_desc", "dy_desc", "dx_desc") else derived
        mine = {names.get(n, n): v for n, v in {**self.arrays, **calls.options(self.problem)}.items()}
        arguments |= {name: value for name, value in mine.items() if name in parameters}
        space = self.device.empty_bytes(1 << 20)
        arguments |= {"handle": self.handle, "activ_desc": descriptor, "workspace": (space.pointer, space.nbytes)}
        function(**(arguments | changes))
        self.device.synchronize()  # the workspace goes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_miopens_calls_are_fused_or_composed(handle, operation, mode, activation):
    for blend, saved in itertools.product(BLENDS, [True, False]):
        case = Named(handle, operation, mode, activation, blend, saved)
        case.call(DESCRIPTORS[activation])
        case.judge()


@pytest.mark.parametrize("descriptor", [None, miopen.ActivationDescriptor(ActivationMode.PASTHRU)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_pasthru_is_the_call_without(handle, operation, descriptor):
    case = Named(handle, operation, Mode.SPATIAL, None, BLENDS[-1])
    case.call(descriptor, **({"bn_bias": None} if operation == BACKWARD else {}))
    case.judge()


def test_inference_without_estimates_takes_an_activation(handle):
    case = Named(handle, TRAIN, Mode.SPATIAL, "relu")
    case.call(DESCRIPTORS["relu"], operation=INFER, estimated_mean=None, estimated_variance=None)
    case.expected.outputs = {"y": case.expected.outputs["y"]}
    case.judge()


@table(("descriptor", "argument"), [
    (ActivationMode.RELU, "activ_desc"), ("relu", "activ_desc"), ((3, 0.0, 0.0), "activ_desc"),
    (miopen.ActivationDescriptor(1), "activ_desc"), (miopen.ActivationDescriptor("relu"), "activ_desc"),
    (miopen.ActivationDescriptor(7), "activ_desc.alpha"), (miopen.ActivationDescriptor(7, None), "activ_desc.alpha"),
    (miopen.ActivationDescriptor(10, 1.0, 1.0), "activ_desc.beta"),
    (miopen.ActivationDescriptor(10, float("nan"), 1.0), "activ_desc.alpha"),
])  # fmt: skip
@table("operation", OPERATIONS)
def test_bad_descriptors_are_refused_in_miopens_words(handle, operation, descriptor, argument):
    case = Named(handle, operation, Mode.SPATIAL, "relu")
    case.refuses(ArgumentError, lambda: case.call(descriptor), argument)


# Values that are names of arrays stand for them. Of two outputs that are one either may be named.
@table(("operation", "name", "value"), [
    (BACKWARD, "bn_bias", None), (BACKWARD, "saved_mean", None), (BACKWARD, "result_bn_scale_diff", "scale"),
    (BACKWARD, "dx", "x"), (BACKWARD, "epsilon", -1.0), (BACKWARD, "alpha_data_diff", float("nan")),
    (TRAIN, "y", "x"), (TRAIN, "result_save_mean", "running_mean"), (TRAIN, "result_save_mean", "bias"),
    (TRAIN, "alpha", float("inf")), (TRAIN, "beta", "no"), (TRAIN, "exp_avg_factor", 2.0),
    (TRAIN, "workspace", (0, 64)),
])  # fmt: skip
def test_composed_calls_refuse_what_the_others_do(handle, operation, name, value):
    case = Named(handle, operation, Mode.SPATIAL, "relu")
    changes = {name: case.arrays.get(value, value) if type(value) is str else value}
    if name == "y":
        changes["beta"] = 0.5
    error = case.refuses(ArgumentError, lambda: case.call(DESCRIPTORS["relu"], **changes))
    assert name in str(error)
    assert error.argument in (name, "result_running_mean")


def test_the_modes_have_miopens_numbers():
    listed = dict(re.findall(r"C\(miopenActivation(\w+), (\d+)\)", MIOPEN_API.read_text()))
    assert {m.name: str(m.value) for m in ActivationMode if m} == listed


# ---------------------------------------------------------------- on doubles, in child processes

DOUBLES = Path(__file__).parents[1] / "doubles"


@pytest.fixture(scope="module")
def fused_library(tmp_path_factory):
    """`fused_library(without)`: environment of a child that finds doubles of libMIOpen and libamdhip64."""
    sys.path.insert(0, str(DOUBLES))
    try:
        import build
    finally:
        sys.path.remove(str(DOUBLES))
    doubles = build.Doubles(tmp_path_factory.mktemp("activation"))
    hip = doubles.plain("libamdhip64.so.6", (DOUBLES / "hip.c").read_text())

    def environment(without=()):
        library = doubles.build("miopen", version=3005001, defines=("DOUBLE_COMPUTES",), without=without)
        return os.environ | {
            "PYBNORM_LIB_MIOPEN": str(library),
            "PYBNORM_LIB_AMDHIP64": str(hip),
            "PYBNORM_REQUIRE": "miopen",
            "PYBNORM_REQUIRE_DEVICE": "miopen",
        }

    environment.newer = [s for s in doubles.symbols("miopen", "OPTIONAL") if s.endswith("Activation")]
    environment.inverse = [s for s in doubles.symbols("miopen", "OPTIONAL") if s.endswith("InvVariance")]
    environment.v2 = [s for s in doubles.symbols("miopen", "OPTIONAL") if s.endswith("_V2")]
    return environment


def run_again(environment, *arguments):
    # No plugins: they take longer to import than the tests, and pytest-benchmark fails under the variables of xdist.
    environment = {**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    return done.stdout


not_in_a_child = pytest.mark.skipif(CHILD in os.environ, reason="this is the child process of the doubles")


@pytest.mark.slow
@not_in_a_child
def test_a_library_with_the_calls(fused_library):
    assert len(fused_library.newer) == 3
    output = run_again(
        fused_library() | {CHILD: "with"}, "-k", f"(miopen or counted or the_inverse_deviation) and {HERE}"
    )
    assert "no fused activation" not in output


@pytest.mark.slow
@not_in_a_child
@pytest.mark.parametrize("missing", [slice(0, 3), slice(1, 3)], ids=["none", "training only"])
def test_a_library_without_them(fused_library, missing):
    output = run_again(fused_library(fused_library.newer[missing]) | {CHILD: "without"}, "-k", f"miopen and {HERE}")
    assert "no fused activation" in output


@pytest.mark.slow
@not_in_a_child
def test_a_library_without_v2_and_inference_from_the_inverse(fused_library):
    assert len(fused_library.inverse) == 1
    absent = fused_library.v2 + fused_library.inverse
    run_again(fused_library(absent) | {CHILD: "plain"}, "-k", "counted or the_inverse_deviation")


in_a_child = pytest.mark.skipif(CHILD not in os.environ, reason="only on the doubles that have the calls")


def counter(handle, name):
    return ctypes.c_int.in_dll(ctypes.CDLL(handle.library.path), f"double_{name}")


@in_a_child
def test_the_calls_are_counted():
    with pybnorm.Handle("miopen") as handle:
        preferred, other = ("plain", "v2") if os.environ[CHILD] == "plain" else ("v2", "plain")
        assert bool(pybnorm.has_symbol("miopen", "miopenBatchNormalizationBackward_V2")) == (preferred == "v2")
        for operation in OPERATIONS:  # per-activation kernels of MIOpen 3.5.1 leave the activation out
            assert [fuses(handle, operation, mode) for mode in MODES] == [True, False]
        before = counter(handle, f"{preferred}_calls").value
        for operation in OPERATIONS:
            case = Case(handle, operation, Mode.SPATIAL, None)
            case.run_arrays()
            case.judge()
        assert counter(handle, f"{preferred}_calls").value == before + 3
        assert counter(handle, f"{other}_calls").value == 0


@in_a_child
def test_the_vendors_descriptor_is_what_was_asked_for_and_counted():
    with pybnorm.Handle("miopen") as handle:
        count, live = counter(handle, "fused_calls"), counter(handle, "live_activations")
        seen = (ctypes.c_double * 4).in_dll(ctypes.CDLL(handle.library.path), "double_activation")
        for name, numbers in {"relu": (3, 0, 0, 0), "clipped": (7, 0.75, 0, 0), "clamp": (10, -0.5, 0.625, 0)}.items():
            for operation in OPERATIONS:
                before = count.value
                Case(handle, operation, Mode.SPATIAL, name).call()
                assert (count.value - before, live.value, tuple(seen)) == (1, 0, numbers)


@in_a_child
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (2.0, 0.5)])
def test_the_inverse_deviation_goes_to_the_call_that_takes_it(mode, alpha, beta):
    there = os.environ[CHILD] == "with"
    rng = np.random.default_rng(3)
    dims = (4, 3, 5, 6)
    axis = _arguments.kept_axes(4, mode)
    x, prior = rng.standard_normal((2, *dims)).astype(np.float32)
    scale, bias, mean, inverse = rng.uniform(0.5, 2, (4, *_arguments.derived_dims(dims, mode))).astype(np.float32)
    right = alpha * (scale * inverse * (x - mean) + bias) + beta * prior
    with pybnorm.Handle("miopen") as handle:
        bits, _ = pybnorm.capability("miopen", INFER, mode, "f32", "nchw", 4)
        assert (pybnorm.Capability.INVERSE in bits) == there
        assert not pybnorm.Capability.INVERSE & pybnorm.capability("miopen", TRAIN, mode, "f32", "nchw", 4)[0]
        device = device_of(handle)
        arrays = dict(
            zip(("x", "scale", "bias", "mean", "inv_variance", "y"),
                map(device.from_numpy, (x, scale, bias, mean, inverse, prior)), strict=True)
        )  # fmt: skip
        options = {"axis": axis, "alpha": alpha, "beta": beta}
        plan = operations.plan(handle, "forward_inference_inv_variance", **arrays, **options)
        assert any("of 1/sigma" in call for call in plan.calls) == there
        if there:
            assert len(plan.calls) == 1
        memory = device.empty_bytes(max(64, plan.nbytes))
        count = counter(handle, "inverse_calls")
        before = count.value
        operations.forward_inference_inv_variance(handle, **arrays, **options, workspace=memory)
        assert count.value - before == there
        np.testing.assert_allclose(device.to_numpy(arrays["y"]), right, rtol=1e-5, atol=1e-5)
