"""Bad input to the calls: an error that names the argument, before the vendor sees anything, outputs untouched."""

import numpy as np
import pytest
from place import device_of
from tables import table

import pybnorm
from pybnorm import errors
from pybnorm._arrays import Buffer
from pybnorm.enums import Mode

DIMS = (4, 3, 5, 6)


class Set:
    """Good arguments of the three array calls, and what outputs held before."""

    def __init__(self, handle):
        self.handle = handle
        self.device = device_of(handle)
        rng = np.random.default_rng(3)
        x, one = rng.standard_normal(DIMS).astype(np.float32), np.ones(3, np.float32)
        place = self.device.from_numpy
        self.x, self.y, self.dy, self.dx = (place(v) for v in (x, 0 * x + 7, x + 1, 0 * x + 7))
        self.scale, self.bias, self.mean, self.variance = (place(one) for _ in range(4))
        self.running_mean, self.running_variance, self.saved_mean, self.saved_inv_variance = (
            place(one * 7) for _ in range(4)
        )
        self.dscale, self.dbias = place(one * 7), place(one * 7)

    def array(self, value):
        return self.device.from_numpy(value)

    def training(self, **changes):
        good = {n: getattr(self, n) for n in ("x", "scale", "bias", "y")}
        good |= {n: getattr(self, n) for n in ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")}
        self.handle.forward_training(**(good | changes))

    def inference(self, **changes):
        good = {n: getattr(self, n) for n in ("x", "scale", "bias", "y")}
        self.handle.forward_inference(
            **(good | {"running_mean": self.mean, "running_variance": self.variance} | changes)
        )

    def backward(self, **changes):
        good = {n: getattr(self, n) for n in ("x", "dy", "scale", "dx", "dscale", "dbias")}
        self.handle.backward(**(good | {"saved_mean": self.mean, "saved_inv_variance": self.variance} | changes))

    def untouched(self):
        self.device.synchronize()
        for name in (
            "y",
            "dx",
            "running_mean",
            "running_variance",
            "saved_mean",
            "saved_inv_variance",
            "dscale",
            "dbias",
        ):
            assert (self.device.to_numpy(getattr(self, name)) == 7).all(), name


@pytest.fixture
def good(handle):
    return Set(handle)


def refuse(good, call, argument, kind=pybnorm.ArgumentError, **changes):
    with pytest.raises(kind) as info:
        getattr(good, call)(**changes)
    assert info.value.argument == argument, info.value
    assert argument in str(info.value)
    assert info.value.allowed
    good.untouched()
    return info.value


CALLS = ["training", "inference", "backward"]


def test_the_good_arguments_are_good(good):
    for call in CALLS:
        getattr(good, call)()
    with pytest.raises(AssertionError):
        good.untouched()


@table("call", CALLS)
@table("value", [None, 3, "x", [1.0], object(), 1.0])
def test_not_an_array(good, call, value):
    refuse(good, call, "x", pybnorm.ArgumentTypeError, x=value)


@table("call", CALLS)
@table("dtype", [np.int32, np.int8, np.complex64, np.bool_])
def test_dtypes_that_no_backend_has(good, call, dtype):
    if good.handle.library.device_type != 1:
        pytest.skip(f"{good.handle.backend}: the device module has no arrays of {np.dtype(dtype)}")
    refuse(good, call, "x", pybnorm.ArgumentTypeError, x=np.ones(DIMS, dtype))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dims", [(3,), (4, 3, 5, 6, 1, 1, 1, 1, 1)])
def test_rank(good, call, dims):
    refuse(good, call, "x", x=good.array(np.ones(dims, np.float32)))


def test_the_order_of_inference_is_said(good):
    error = refuse(good, "inference", "y", y=good.mean)
    assert "x, scale, bias, running_mean, running_variance, y" in error.allowed


@pytest.mark.parametrize("call", CALLS)
def test_empty(good, call):
    empty = good.x._replace(dims=(0, 3, 5, 6))
    refuse(good, call, "x", x=empty)


@pytest.mark.parametrize(
    ("call", "name"), [("training", "y"), ("inference", "y"), ("backward", "dy"), ("backward", "dx")]
)
def test_shape_and_dtype_of_the_other_data(good, call, name):
    refuse(good, call, name, **{name: good.array(np.ones((4, 3, 6, 5), np.float32))})
    refuse(good, call, name, pybnorm.ArgumentTypeError, **{name: good.array(np.ones(DIMS, np.float16))})


PARAMETERS = {
    "training": ["scale", "bias", "running_mean", "running_variance", "saved_mean", "saved_inv_variance"],
    "inference": ["scale", "bias", "running_mean", "running_variance"],
    "backward": ["scale", "dscale", "dbias", "saved_mean", "saved_inv_variance"],
}
EACH_PARAMETER = [(call, name) for call, names in PARAMETERS.items() for name in names]


@table(("call", "name"), EACH_PARAMETER)
def test_parameters(good, call, name):
    refuse(good, call, name, **{name: good.array(np.ones(4, np.float32))})
    refuse(good, call, name, **{name: good.array(np.ones((1, 3, 5, 6), np.float32))})
    refuse(good, call, name, pybnorm.ArgumentTypeError, **{name: good.array(np.ones(3, np.float16))})
    refuse(good, call, name, pybnorm.ArgumentTypeError, **{name: good.array(np.ones(3, np.float64))})
    refuse(good, call, name, **{name: good.array(np.ones(6, np.float32)[::2])})


@table(("call", "name"), EACH_PARAMETER)
def test_null_where_required_and_one_of_a_pair(good, call, name):
    refuse(good, call, name, **{name: None})


@table("call", CALLS)
@table("epsilon", [-1e-5, 1e-50, 1e39, float("nan"), float("inf"), -float("inf"), "1e-5", None])
def test_epsilon(good, call, epsilon):
    refuse(good, call, "epsilon", epsilon=epsilon)


@table("factor", [-0.1, 1.1, 1e-46, float("nan"), float("inf"), "0.1", None])
def test_factor(good, factor):
    refuse(good, "training", "exponential_average_factor", exponential_average_factor=factor)


@table(
    ("call", "name"),
    [(c, n) for c in ("training", "inference") for n in ("alpha", "beta")]
    + [("backward", n) for n in ("alpha", "beta", "alpha_param", "beta_param")],
)
@table("value", [float("nan"), float("inf"), 1e39, -1e-50, "1", None])
def test_scalars(good, call, name, value):
    refuse(good, call, name, **{name: value})


@table("call", CALLS)
@table("mode", [3, -1, "batch", None, 1.5])
def test_mode(good, call, mode):
    refuse(good, call, "mode", mode=mode)


@table("call", CALLS)
@table("strides", [(0, 30, 6, 1), (90, 30, 6, 0), (90, 30, 5, 1), (90, -30, 6, 1), (2**31, 30, 6, 1)])
def test_strides(good, call, strides):
    refuse(good, call, "x", x=good.x._replace(strides=strides))


@table(
    ("call", "output", "destroyed"),
    [
        ("training", "running_mean", "scale"),
        ("training", "running_mean", "running_variance"),
        ("training", "saved_inv_variance", "saved_mean"),
        ("training", "saved_mean", "running_mean"),
        ("backward", "dx", "x"),
        ("backward", "dscale", "scale"),
        ("backward", "dscale", "dbias"),
        ("backward", "dbias", "saved_mean"),
    ],
)
def test_aliasing(good, call, output, destroyed):
    actual = {"saved_mean": good.mean} if call == "backward" else {}
    with pytest.raises(pybnorm.ArgumentError, match="overlaps") as info:
        getattr(good, call)(**{output: actual.get(destroyed, getattr(good, destroyed))})
    assert {info.value.argument, info.value.value.rsplit(" ", 1)[-1]} == {output, destroyed}
    good.untouched()


def test_partial_overlap(good):
    half = good.x._replace(pointer=good.x.pointer + 4)
    refuse(good, "training", "y", y=half)


def test_wrong_device(good):
    own = good.handle.library.device_type
    other = {1: 2, 2: 1, 10: 1}[own]
    for name in ("x", "y", "scale", "running_mean"):
        elsewhere = getattr(good, name)._replace(device_type=other)
        refuse(good, "training", name, **{name: elsewhere})
    if good.handle.device is not None:
        refuse(good, "training", "x", x=good.x._replace(device_id=good.handle.device + 1))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("training", "y"),
        ("training", "running_mean"),
        ("training", "saved_inv_variance"),
        ("inference", "y"),
        ("backward", "dx"),
        ("backward", "dscale"),
    ],
)
def test_read_only_outputs(good, call, name):
    refuse(good, call, name, **{name: getattr(good, name)._replace(writable=False)})


def test_one_element_per_statistic_with_running_statistics(good):
    one = good.array(np.ones((1, 3, 1, 1), np.float32))
    other = good.array(np.ones((1, 3, 1, 1), np.float32))
    refuse(good, "training", "x", x=one, y=other)


def test_a_bad_axpby(good):
    for changes, argument in [
        ({"a": float("nan")}, "a"),
        ({"b": float("inf")}, "b"),
        ({"x": None}, "x"),
        ({"y": good.array(np.ones((4, 3), np.float32))}, "y"),
        ({"y": good.x}, "y"),
    ]:
        arguments = {"a": 1.0, "x": good.x, "b": 0.0, "y": good.y} | changes
        with pytest.raises(pybnorm.ArgumentError) as info:
            good.handle.axpby(**arguments)
        assert info.value.argument == argument
    good.untouched()


# ---------------------------------------------------------------- addresses and descriptors


class Low:
    """Good arguments of the three calls on addresses."""

    def __init__(self, good):
        backend = good.handle.backend
        x = pybnorm.TensorDescriptor(backend, "f32", DIMS)
        p = pybnorm.derive_bn_tensor_descriptor(x, 1)
        at = {n: b.pointer for n, b in vars(good).items() if isinstance(b, Buffer)}
        memory = good.device.empty_bytes(1 << 16)
        space = {"workspace": memory.pointer, "workspace_size": memory.nbytes}
        self.memory = memory
        self.calls = {
            "training": (
                pybnorm.batch_normalization_forward_training,
                {
                    "handle": good.handle, "mode": 1, "alpha": 1.0, "beta": 0.0, "x_desc": x, "x": at["x"],
                    "y_desc": x, "y": at["y"], "param_desc": p, "scale": at["scale"], "bias": at["bias"],
                    "exponential_average_factor": 0.1, "running_mean": at["running_mean"],
                    "running_variance": at["running_variance"], "epsilon": 1e-5, "saved_mean": at["saved_mean"],
                    "saved_inv_variance": at["saved_inv_variance"],
                } | space,
            ),
            "inference": (
                pybnorm.batch_normalization_forward_inference,
                {
                    "handle": good.handle, "mode": 1, "alpha": 1.0, "beta": 0.0, "x_desc": x, "x": at["x"],
                    "y_desc": x, "y": at["y"], "param_desc": p, "scale": at["scale"], "bias": at["bias"],
                    "running_mean": at["mean"], "running_variance": at["variance"], "epsilon": 1e-5,
                } | space,
            ),
            "backward": (
                pybnorm.batch_normalization_backward,
                {
                    "handle": good.handle, "mode": 1, "alpha": 1.0, "beta": 0.0, "alpha_param": 1.0,
                    "beta_param": 0.0, "x_desc": x, "x": at["x"], "dy_desc": x, "dy": at["dy"], "dx_desc": x,
                    "dx": at["dx"], "param_desc": p, "scale": at["scale"], "dscale": at["dscale"],
                    "dbias": at["dbias"], "epsilon": 1e-5, "saved_mean": at["mean"],
                    "saved_inv_variance": at["variance"],
                } | space,
            ),
        }  # fmt: skip


@pytest.fixture
def low(good):
    return Low(good)


def low_refuse(good, low, call, name, value, kind=pybnorm.ArgumentError, argument=None):
    function, arguments = low.calls[call]
    with pytest.raises(kind) as info:
        function(**(arguments | {name: value}))
    assert info.value.argument == (argument or name), info.value
    good.untouched()


def test_the_good_addresses_are_good(good, low):
    for function, arguments in low.calls.values():
        function(**arguments)
    with pytest.raises(AssertionError):
        good.untouched()


@table("call", CALLS)
@table("value", [-1, 2**64, "0x10", 1.5, True, object()])
def test_bad_addresses(good, low, call, value):
    for name in [
        n for n, v in low.calls[call][1].items() if isinstance(v, int) and n not in ("mode", "workspace_size")
    ]:
        low_refuse(good, low, call, name, value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [0, None])
def test_null_addresses(good, low, call, value):
    for name in [
        n for n, v in low.calls[call][1].items() if isinstance(v, int) and n not in ("mode", "workspace_size")
    ]:
        low_refuse(good, low, call, name, value)


@pytest.mark.parametrize("call", CALLS)
def test_bad_handles(good, low, call):
    for value in (None, 0, good.handle.pointer, "cudnn"):
        low_refuse(good, low, call, "handle", value, pybnorm.ArgumentTypeError)


@pytest.mark.parametrize("call", CALLS)
def test_bad_descriptors(good, low, call):
    backend = good.handle.backend
    other_shape = pybnorm.TensorDescriptor(backend, "f32", (4, 3, 6, 5))
    other_dtype = pybnorm.TensorDescriptor(backend, "f16", DIMS)
    closed = pybnorm.TensorDescriptor(backend, "f32", DIMS)
    closed.close()
    for name in [n for n in low.calls[call][1] if n.endswith("_desc")]:
        low_refuse(good, low, call, name, None, pybnorm.ArgumentTypeError)
        low_refuse(good, low, call, name, DIMS, pybnorm.ArgumentTypeError)
        low_refuse(good, low, call, name, closed, pybnorm.ClosedError)
        if name == "x_desc":
            continue
        short = name if name == "param_desc" else name.removesuffix("_desc")
        low_refuse(good, low, call, name, other_shape, argument=short)
        low_refuse(good, low, call, name, other_dtype, argument=short)


def test_a_descriptor_of_another_backend(good, low):
    others = [b for b in pybnorm.backends() if b != good.handle.backend]
    loadable = [b for b in others if loads(b)]
    if not loadable:
        pytest.skip(f"{good.handle.backend}: no other backend's library is on this machine")
    foreign = pybnorm.TensorDescriptor(loadable[0], "f32", DIMS)
    for call in CALLS:
        for name in [n for n in low.calls[call][1] if n.endswith("_desc")]:
            low_refuse(good, low, call, name, foreign)


def loads(backend):
    try:
        pybnorm.load(backend)
    except errors.LibraryError:
        return False
    return True


def test_a_parameter_descriptor_of_the_other_mode(good, low):
    per_activation = pybnorm.derive_bn_tensor_descriptor(low.calls["training"][1]["x_desc"], Mode.PER_ACTIVATION)
    for call in CALLS:
        low_refuse(good, low, call, "param_desc", per_activation)


def test_aliasing_addresses(good, low):
    for call, output, destroyed in [("training", "y", "bias"), ("backward", "dx", "x"), ("inference", "y", "bias")]:
        low_refuse(good, low, call, output, low.calls[call][1][destroyed])


def test_a_workspace_that_overlaps_an_array(good, low):
    for call in CALLS:
        function, arguments = low.calls[call]
        with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
            function(**(arguments | {"workspace": arguments["x"] // 64 * 64, "workspace_size": 4096}))
    good.untouched()


def test_unsupported_names_the_descriptors(good):
    """The message of a refusal has the reason and what was asked for."""
    backend = good.handle.backend
    if backend in ("cudnn", "native"):
        pytest.skip(f"{backend}: has every dtype of this package")
    x = good.array(np.ones(DIMS, np.float64))
    y = good.array(np.full(DIMS, 7.0))
    one = good.array(np.ones(3))
    with pytest.raises(pybnorm.UnsupportedError) as info:
        good.handle.forward_inference(x, one, one, one, one, y)
    assert info.value.backend == backend
    assert info.value.text
    assert "f64" in str(info.value)
    assert str(DIMS) in str(info.value)
    assert info.value.library in str(info.value)
    assert (good.device.to_numpy(y) == 7.0).all()


def test_a_vendor_status_arrives_with_everything(good):
    """cuDNN refuses inference past N = 65535 in the spatial mode with its own status."""
    if good.handle.backend != "cudnn":
        pytest.skip(f"{good.handle.backend}: no case is known that passes our rules and gets a vendor status")
    x = good.array(np.ones((65536, 1, 1, 1), np.float32))
    y = good.array(np.full((65536, 1, 1, 1), 7, np.float32))
    one = good.array(np.ones(1, np.float32))
    with pytest.raises(pybnorm.NotSupportedError) as info:
        good.handle.forward_inference(x, one, one, one, one, y)
    error = info.value
    assert error.status == 3000
    assert "CUDNN_STATUS_NOT_SUPPORTED" in str(error)
    assert "(65536, 1, 1, 1)" in str(error)
    assert error.library in str(error)
    assert "batch_normalization_forward_inference" in str(error)
    assert (good.device.to_numpy(y) == 7).all()
