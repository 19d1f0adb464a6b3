"""Kernels in C of the operators with ReLU: what they compute, what they leave to Python, and what they hold."""

import threading

import pytest

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own

SHAPE = 4, 16, 5, 6
QUESTION = 0.25, 1e-5, False, True  # factor, epsilon, fallback, deterministic


@pytest.fixture
def joined(torch, operators, device, anew, monkeypatch):
    """The module of the operators, with kernels in C.

    The CPU's run a plan of oneDNN without ReLU, which oneDNN's plans do not have: forward as the batch norm alone.
    """
    from pybnorm.torch import fused, fused_operators, installation

    handle = pybnorm.Handle("onednn") if device == "cpu" else None
    if handle is not None:
        monkeypatch.setattr(fused, "fits", lambda x, vectors: True)
        monkeypatch.setattr(fused, "_plans_of", lambda x, *call, known: plans_of(fused, handle, x, *call))
    monkeypatch.setattr(fused, "kernels", {})  # a later test has none whose operators are gone
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
    anew()
    if handle is not None:
        handle.close()


def plans_of(fused, handle, x, residual, training, running, factor, eps, deterministic):
    if residual:
        return None
    found = fused._Plans.__new__(fused._Plans)
    found.handle, found.lock, found.place, found.residual = handle, threading.RLock(), x.device, residual
    found.reserve_size = found.workspace = 0
    like = pybnorm.TensorDescriptor("onednn", pybnorm.DataType.FLOAT32, tuple(x.shape), x.stride())
    found.plan = found.handle.plan_forward_training(
        like, running=running, exponential_average_factor=factor, epsilon=eps
    )
    found.back = found.handle.plan_backward(like, epsilon=eps)  # refuses y: Python's kernel has what is next

    def backward(x, dy, weight, bias, y, saved, inverse, reserve):
        results = [t.detach().clone() for t in (x, weight, bias)]
        found.back(x.detach(), dy, weight.detach(), *results, saved, inverse, None)
        return *results, None

    found.backward = backward
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


# ---------------------------------------------------------------- with autograd in C++


@pytest.fixture
def tracked(torch, joined, device):
    """``relu(batch_norm(x) + residual)`` through PyTorch's overridable operator; on the CPU without ReLU, as above."""
    operator = joined.kernels(device.upper())[2]
    if operator is None:
        pytest.skip("this PyTorch's overridable operator is another one")
    return lambda x, weight, bias, mean, variance, residual: pybnorm._core.call_overridable(
        operator, x, weight, bias, mean, variance, residual, *QUESTION[:2], QUESTION[3]
    )


def wanted_of(torch, device, x, weight, bias, running, residual=None):
    y = torch.nn.functional.batch_norm(x, *running, weight, bias, True, *QUESTION[:2])
    y = y if residual is None else y + residual
    return y if device == "cpu" else y.relu()


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("needed", ["x", "weight bias", "x weight bias"])
def test_autograd_around_them_is_in_cpp(torch, tracked, python, device, running, needed):
    x, weight, bias, *statistics = given(torch, device)
    leaves = [t for t, name in ((x, "x"), (weight, "weight"), (bias, "bias")) if name in needed]
    for leaf in leaves:
        leaf.requires_grad_()
    statistics = statistics if running else [None, None]
    kept = [None if v is None else v.clone() for v in statistics]
    y = tracked(x, weight, bias, *statistics, None)
    wanted = wanted_of(torch, device, x, weight, bias, kept)
    dy = drawn(torch, device, *SHAPE, seed=8)
    found = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy)
    assert python == ([] if device == "cuda" else ["batch_norm_relu_backward"])  # oneDNN's plan refuses y
    assert "Overrideable" in y.grad_fn.name()
    for one, other in zip((y, *statistics, *found[0]), (wanted, *kept, *found[1]), strict=True):
        assert one is other is None or torch.allclose(one, other, atol=2e-5, rtol=2e-5)


def test_autograd_around_them_with_a_residual(torch, tracked, python, device):
    x, weight, bias, mean, variance = given(torch, device)
    z = drawn(torch, device, *SHAPE, seed=5)
    leaves = [t.requires_grad_() for t in (x, weight, bias, z)]
    kept = [mean.clone(), variance.clone()]
    y = tracked(x, weight, bias, mean, variance, z)
    wanted = wanted_of(torch, "cuda", x, weight, bias, kept, z) if device == "cuda" else None
    if wanted is None:  # a plan of oneDNN has no residual: Python's kernels, which do have ReLU, take the call
        assert python == ["batch_norm_relu_training"]
        wanted = wanted_of(torch, "cuda", x, weight, bias, kept, z)
    dy = drawn(torch, device, *SHAPE, seed=8)
    found = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, leaves, dy)
    for one, other in zip((y, mean, variance, *found[0]), (wanted, *kept, *found[1]), strict=True):
        assert torch.allclose(one, other, atol=2e-5, rtol=2e-5)


def test_a_changed_result_is_seen_by_autograd(torch, tracked, device):
    x, weight, bias, *statistics = given(torch, device)
    y = tracked(x.requires_grad_(), weight, bias, *statistics, None)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_derivative_of_them(torch, tracked, device):
    x, weight, bias, *statistics = given(torch, device)
    bias = bias + 9  # oneDNN's plans have no ReLU, the derivative in Python does: no result is negative
    dy, direction = (drawn(torch, device, *SHAPE, seed=n) for n in (8, 9))
    both = []
    for kind, call in ((torch.float32, tracked), (torch.float64, None)):
        leaves = [t.to(kind).requires_grad_() for t in (x, weight, bias)]
        y = call(*leaves, *statistics, None) if call else wanted_of(torch, device, *leaves, [None, None])
        first = torch.autograd.grad(y, leaves[0], dy.to(kind), create_graph=True)[0]
        both.append(torch.autograd.grad(first, leaves[:2], direction.to(kind)))
    for one, other in zip(*both, strict=True):
        assert torch.allclose(one.double(), other, atol=2e-4, rtol=2e-4)


def test_what_holds_saved_tensors_holds_theirs(torch, tracked, device):
    x, weight, bias, *statistics = given(torch, device)
    x.requires_grad_()
    dy = drawn(torch, device, *SHAPE, seed=8)
    wanted = torch.autograd.grad(tracked(x, weight, bias, *statistics, None), x, dy)[0]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = tracked(x, weight, bias, *statistics, None)
    assert packed
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], wanted)


def test_what_autograd_kept_is_freed(torch, tracked, device):
    x, weight, bias, *statistics = given(torch, device)
    x.requires_grad_()
    for _ in range(3):
        tracked(x, weight, bias, *statistics, None).backward(x.detach())
        tracked(x, weight, bias, *statistics, None)
    x.grad = None
    assert [t._use_count() for t in (x, weight, bias, *statistics)] == [1] * 5


def test_the_overridable_operator_is_nobody_elses(torch, tracked, device):
    x, weight, bias, *statistics = given(torch, device)
    operator = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    with pytest.raises(RuntimeError, match="not implemented for this device"):
        operator(x, weight, bias, None, 0.5, False, False, scale=1e-5)
    tracked(x, weight, bias, *statistics, None)
    with pytest.raises(RuntimeError, match="not implemented for this device"):
        operator(x, weight, bias, None, 0.5, False, False, scale=1e-5)


def test_another_overridable_operator_is_left_alone(torch, joined, device, monkeypatch):
    from pybnorm.torch import installation

    monkeypatch.setattr(installation, "_SCHEMAS", (installation._SCHEMAS[0] + " ", installation._SCHEMAS[1]))
    monkeypatch.setattr(installation, "overridable", installation.overridable.__wrapped__)
    assert joined.kernels(device.upper())[2] is None
