"""What oneDNN lacks and the adapter computes: statistics in the caller's form."""

import ml_dtypes
import numpy as np
import pytest
from tables import table

import pybnorm
from pybnorm import _core, reference
from pybnorm.enums import Mode

INVERSES = np.array([0.75, -1.25, 0.0, -0.5, 2.0, -0.0], "f4")


@pytest.fixture(scope="module")
def handle(load_library):
    load_library("onednn")
    with pybnorm.Handle("onednn") as opened:
        yield opened


@pytest.mark.parametrize("mode", [Mode.SPATIAL, Mode.PER_ACTIVATION])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("blend", [(1.0, 0.0), (-0.5, 2.0)], ids=["plain", "blended"])
def test_backward_takes_any_saved_inverse_standard_deviation(handle, mode, last, blend):
    """Zero and negative ones, too, with the sign that each gives dx and dscale."""
    rng = np.random.default_rng(5)
    x, dy, dx = rng.normal(size=(3, 4, 6, 2, 3)).astype("f4")
    shape = (1, 6, 1, 1) if mode == Mode.SPATIAL else (1, 6, 2, 3)
    scale, mean, dscale, dbias = rng.normal(size=(4, *shape)).astype("f4")
    inverse = np.resize(INVERSES, shape).astype("f4")
    alpha, beta = blend
    statistics = {"mode": mode, "saved_mean": mean, "saved_inv_variance": inverse}
    factors = {"alpha": alpha, "beta": beta, "alpha_param": alpha, "beta_param": beta}
    priors = {"prior_dx": dx, "prior_dscale": dscale, "prior_dbias": dbias}
    want = reference.backward(x, dy, scale, **statistics, **factors, **priors if beta else {})
    if last:
        x, dy, dx = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, dy, dx))
    handle.backward(x, dy, scale, dx, dscale, dbias, **statistics, **factors)
    for got, right in zip((dx, dscale, dbias), (want.dx, want.dscale, want.dbias), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [1e-25, -1e25, np.float32(2e-20)])
def test_backward_refuses_an_inverse_standard_deviation_without_a_float32_variance(handle, value):
    x, one = np.ones((2, 2, 3), "f4"), np.ones(2, "f4")
    dx = np.full_like(x, 7)
    with pytest.raises(pybnorm.UnsupportedError, match="saved_inv_variance"):
        handle.backward(
            x, x, one, dx, one.copy(), one.copy(), saved_mean=one, saved_inv_variance=np.array([1, value], "f4")
        )
    assert (dx == 7).all()


def test_a_list_of_calls_has_its_workspace_or_is_refused(handle):
    """Too small, beside an address of 64 bytes, or none: of a list nobody else looks at it before the adapter."""
    rng = np.random.default_rng(6)
    x, scale, bias = rng.normal(size=(4, 3, 5)).astype("f4"), *rng.normal(size=(2, 1, 3, 1)).astype("f4")
    y = np.full_like(x, 7)
    size = handle.workspace_size("forward_training", handle.descriptor(x), running=False, saved=False)
    assert size > 0
    space = np.zeros(size + 128, np.uint8)
    start = -(-space.ctypes.data // 64) * 64
    named = {"x": x, "y": y, "scale": scale, "bias": bias}
    slots = {n: handle.buffer(v, n)._replace(pointer=i << _core.SLOT_BITS) for i, (n, v) in enumerate(named.items(), 1)}
    values = {"mode": Mode.SPATIAL, "alpha": 1.0, "beta": 0.0, "exponential_average_factor": 0.0, "epsilon": 1e-5}

    def run(offset, nbytes, first):
        calls = _core.CallList(handle)
        calls.append(handle, pybnorm.Operation.FORWARD_TRAINING, slots, (offset, nbytes), **values)
        calls.run(handle, (first, *(v.ctypes.data for v in named.values())))

    for refused in ((0, size - 1, start), (0, 0, start), (8, size, start), (0, size, start + 32), (0, size, 0)):
        with pytest.raises(pybnorm.errors.InternalError, match="aligned to 64 bytes"):
            run(*refused)
        assert (y == 7).all(), refused
    run(64, size, start)
    np.testing.assert_allclose(y, reference.forward_training(x, scale, bias).y, rtol=1e-4, atol=1e-5)


def test_a_list_of_calls_runs_with_any_handle(load_library):
    """Its plans belong to the handle that it was made for, of which the next one may have the address."""
    load_library("onednn")
    rng = np.random.default_rng(8)
    scale, bias, mean, variance = rng.uniform(1, 2, (4, 3)).astype("f4")
    arrays = {"x": rng.normal(size=(4, 3, 5)).astype("f4"), "scale": scale, "bias": bias}
    arrays |= {"running_mean": mean, "running_variance": variance, "y": np.empty((4, 3, 5), "f4")}
    values = {"mode": Mode.SPATIAL, "alpha": 1.0, "beta": 0.0, "epsilon": 1e-5}
    right = reference.forward_inference(arrays["x"], scale, bias, mean, variance).y

    def run(handle, calls):
        for _ in range(3):
            arrays["y"].fill(7)
            calls.run(handle, (0, *(v.ctypes.data for v in arrays.values())))
            np.testing.assert_allclose(arrays["y"], right, rtol=1e-4, atol=1e-5)

    with pybnorm.Handle("onednn") as first, pybnorm.Handle("onednn") as second:
        calls = _core.CallList(first)
        shaped = {n: v if v.ndim > 1 else v.reshape(1, 3, 1) for n, v in arrays.items()}
        slots = {
            n: first.buffer(v, n)._replace(pointer=i << _core.SLOT_BITS) for i, (n, v) in enumerate(shaped.items(), 1)
        }
        calls.append(first, pybnorm.Operation.FORWARD_INFERENCE, slots, (0, 0), **values)
        for handle in (second, first, second, first):
            run(handle, calls)
        for channels in range(4, 140):  # primitives that take the first one's place
            x, one = np.ones((2, channels, 2), "f4"), np.ones(channels, "f4")
            first.forward_inference(x, one, one, one, one, np.empty_like(x))
        run(first, calls)
    for _ in range(8):  # some of them at the address of the first one
        with pybnorm.Handle("onednn") as later:
            later.forward_inference(x, one, one, one, one, np.empty_like(x))
            run(later, calls)


@np.errstate(invalid="ignore")  # NumPy's conversion of NaN
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("a", [1.5, -1 / 3, 1 + 2.0**-40, 0.5 - 2.0**-40, 2.0**-12 + 2.0**-60, 2.0**-126])
def test_products_are_rounded_once_to_the_nearest_of_16_bits(handle, dtype, a):
    """Every number of the type; ties to even, also where a product lies beside one by less than float32 can tell."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    x = bits.view(dtype)
    y = np.empty_like(x)
    handle.axpby(a, x, 0.0, y)
    wide = x.astype("f8")
    exact = wide * a
    largest = float(ml_dtypes.finfo(dtype).max)
    plain = np.isfinite(wide) & (np.abs(exact) < largest)
    got = y.view(np.uint16)
    off = np.abs(y.astype("f8") - exact)[plain]
    for other in (got + np.uint16(1), got - np.uint16(1)):  # a wrap to NaN, at the ends, compares as not nearer
        distance = np.abs(other.view(dtype).astype("f8") - exact)[plain]
        assert not (distance < off).any()
        assert not (got[plain][distance == off] & 1).any()
    assert (np.signbit(y) == np.signbit(exact))[~np.isnan(wide)].all()
    assert (np.isnan(y) == np.isnan(wide)).all()
    assert np.isinf(y[np.isinf(wide)]).all()


@table("stride", [1, 2, 7, 11, 60, 10**6])
@table("axis", range(4))
def test_an_axis_of_one_element_has_any_stride(handle, axis, stride):
    """Also one that would lie between the elements of the other axes."""
    dims, strides = [4, 3, 5, 2], [120, 12, 2, 60]
    dims[axis], strides[axis] = 1, stride
    x, y = (
        np.lib.stride_tricks.as_strided(np.zeros(1000, "f4"), dims, [4 * s for s in strides], writeable=True)
        for _ in range(2)
    )
    x[...] = np.random.default_rng(7).normal(size=dims)
    one, zero = np.ones(dims[1], "f4"), np.zeros(dims[1], "f4")
    handle.forward_training(x, one, zero, y)
    np.testing.assert_allclose(y, reference.forward_training(x, one, zero).y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["onednn", "native"])
def test_a_factor_of_one_reads_no_running_statistics(load_library, backend):
    """They may be memory that nobody has set. So may y, dx, dscale and dbias where their beta is 0."""
    load_library(backend)
    x, dy = np.random.default_rng(8).normal(size=(2, 4, 3, 5, 2)).astype("f4")
    one, zero = np.ones(3, "f4"), np.zeros(3, "f4")
    y, dx = np.full((2, *x.shape), np.nan, "f4")
    running_mean, running_variance, dscale, dbias = np.full((4, 3), np.nan, "f4")
    with pybnorm.Handle(backend) as handle:
        handle.forward_training(
            x, one, zero, y, exponential_average_factor=1.0, running_mean=running_mean,
            running_variance=running_variance,
        )  # fmt: skip
        handle.backward(x, dy, one, dx, dscale, dbias)
    np.testing.assert_allclose(running_mean, x.mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(running_variance, x.var((0, 2, 3), ddof=1), rtol=1e-5)
    assert all(np.isfinite(array).all() for array in (y, dx, dscale, dbias))
