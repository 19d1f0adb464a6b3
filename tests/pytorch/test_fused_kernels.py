"""Kernels in C of the operators with ReLU: what they compute, what they leave to Python, and what they hold."""

import threading

import pytest

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own

SHAPE = 4, 16, 5, 6
QUESTION = 0.25, 1e-5, False, True  # factor, epsilon, fallback, deterministic


@pytest.fixture
def joined(torch, operators, device, monkeypatch):
    """The module of the operators, with kernels in C.

    The CPU's run a plan of oneDNN without ReLU, which oneDNN's plans do not have: forward as the batch norm alone.
    """
    from pybnorm.torch import fused, fused_operators, installation

    handle = pybnorm.Handle("onednn") if device == "cpu" else None
    if handle is not None:
        monkeypatch.setattr(fused, "fits", lambda x, vectors: True)
        monkeypatch.setattr(fused, "_plans_of", lambda x, *call, known: plans_of(fused, handle, x, *call))
    monkeypatch.setattr(fused_operators, "_absent", set())
    monkeypatch.setattr(fused, "ready", type(fused.ready)())
    monkeypatch.setattr(fused_operators, "_JOINED", fused_operators._JOINED._replace(ready=fused.ready))
    before = dict(installation._joined)
    fused_operators.kernels(device.upper())
    if device.upper() not in installation._joined:
        pytest.skip("this PyTorch has no kernels in C")
    yield fused_operators
    installation._joined.clear()
    installation._joined.update(before)
    with installation._lock:
        pybnorm._core.remove_torch_kernels()
        installation._registered.clear()
        installation._register()
    if handle is not None:
        handle.close()


def plans_of(fused, handle, x, residual, training, running, factor, eps, deterministic):
    found = fused._Plans.__new__(fused._Plans)
    found.handle, found.lock, found.place, found.residual = handle, threading.RLock(), x.device, residual
    found.reserve_size = found.workspace = 0
    like = pybnorm.TensorDescriptor("onednn", pybnorm.DataType.FLOAT32, tuple(x.shape), x.stride())
    found.plan = found.handle.plan_forward_training(
        like, running=running, exponential_average_factor=factor, epsilon=eps
    )
    found.back = found.handle.plan_backward(like, epsilon=eps)
    return found


@pytest.fixture
def python(monkeypatch):
    """Names of what kernels in C left to those in Python."""
    from pybnorm.torch import installation

    names, own = [], installation._Host.own
    monkeypatch.setattr(installation._Host, "own", lambda *given: names.append(given[1]) or own(*given))
    return names


def drawn(torch, device, *shape, seed=0):
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return found.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else found


def given(torch, device):
    """x, weight, bias and running statistics."""
    vectors = [drawn(torch, device, SHAPE[1], seed=n) for n in (1, 2, 3, 4)]
    return drawn(torch, device, *SHAPE), *vectors[:3], vectors[3].abs() + 0.5


def odd(torch, tensor):
    """The same in memory that is aligned to its elements alone."""
    whole = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return whole[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


@pytest.mark.parametrize("running", [True, False])
def test_they_compute_the_training(torch, joined, python, device, running):
    x, weight, bias, mean, variance = given(torch, device)
    mean, variance = (mean, variance) if running else (None, None)
    kept = [None if v is None else v.clone() for v in (mean, variance)]
    y, *saved, reserve = joined.training(x, weight, bias, mean, variance, None, *QUESTION)
    wanted, *statistics = torch.native_batch_norm(x, weight, bias, *kept, True, *QUESTION[:2])
    wanted = wanted if device == "cpu" else wanted.relu()
    assert python == []
    assert y.stride() == x.stride()
    assert (reserve.dtype, reserve.numel()) == (torch.uint8, 0)
    for one, other in zip((y, *saved, mean, variance), (wanted, *statistics, *kept), strict=True):
        assert one is other is None or torch.allclose(one, other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("what", ["address", "layout", "statistic", "residual"])
def test_what_they_do_not_take_python_computes(torch, joined, python, device, what):
    x, weight, bias, mean, variance = given(torch, device)
    z = None
    if what == "address":
        x = odd(torch, x)
    elif what == "layout":
        x = drawn(torch, device, 2 * SHAPE[0], *SHAPE[1:])[::2]
    elif what == "statistic":
        mean, variance = mean.half(), variance.half()
    else:
        z = drawn(torch, device, *SHAPE, seed=5).contiguous()
        if device == "cpu":
            pytest.skip("a plan of oneDNN without ReLU has no residual")
    kept = [mean.float(), variance.float()]
    arguments = x, weight, bias, mean, variance, z, *QUESTION[:2], True, True
    y, *_ = joined.training(*arguments)
    wanted = torch.native_batch_norm(x, weight, bias, *kept, True, *QUESTION[:2])[0]
    wanted = wanted if z is None else wanted + z
    assert python == ["batch_norm_relu_training"]
    assert torch.allclose(y, wanted if device == "cpu" else wanted.relu(), atol=1e-5, rtol=1e-5)
    assert torch.allclose(mean.float(), kept[0], atol=2e-3, rtol=2e-3)


def test_an_error_is_told_and_nothing_is_held(torch, joined, device):
    x, weight, bias, mean, _ = given(torch, device)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="running_mean"):
            joined.training(x, weight, bias, mean, None, None, *QUESTION)
    assert [t._use_count() for t in (x, weight, bias, mean)] == [1] * 4


def test_nothing_is_held(torch, joined, python, device):
    x, weight, bias, mean, variance = given(torch, device)
    results = joined.training(x, weight, bias, mean, variance, None, *QUESTION)
    assert [t._use_count() for t in (x, weight, bias, mean, variance, *results)] == [1] * 9
    assert python == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("residual", [False, True])
def test_both_directions_are_those_of_python(torch, joined, python, device, residual, dtype):
    if device == "cpu":
        pytest.skip("oneDNN's plans have no ReLU")
    x, weight, bias, mean, variance = given(torch, device)
    x, dy, z = (drawn(torch, device, *SHAPE, seed=n).to(getattr(torch, dtype)) for n in (0, 6, 7))
    z = z if residual else None
    options = residual, True, *QUESTION
    results = []
    for forward, backward in ((joined._train, joined._differentiate), (joined.training, joined.backward)):
        running = mean.clone(), variance.clone()
        y, *saved, reserve = forward(x, weight, bias, *running, z, *QUESTION)
        found = backward(x, dy, weight, bias, y, *saved, reserve, *options)
        results.append((y, *saved, *running, *found))
    assert python == []
    for one, other in zip(*results, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert torch.equal(one, other)
