"""`batch_norm` with PyTorch's autograd in C++ around kernels in C: when it is, what it computes, what it holds."""

import subprocess
import sys
import threading

import pytest

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own

SHAPE = 4, 16, 5, 6
NODE = "MiopenBatchNormBackward0"


@pytest.fixture(autouse=True)
def lent(torch, ours, device):
    """PyTorch's operator, where it can be had."""
    from pybnorm.torch import autograd

    if autograd._lent() is None:
        pytest.skip("this PyTorch has no kernels in C, or MIOpen's own")


@pytest.fixture
def python(ours, monkeypatch):
    """Names of what kernels in C left to those in Python."""
    from pybnorm.torch import installation

    names, own = [], installation._Host.own
    monkeypatch.setattr(installation._Host, "own", lambda *given: names.append(given[1]) or own(*given))
    return names


def given(torch, device, dtype="float32", layout="last"):
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(SHAPE, generator=generator).to(device, getattr(torch, dtype)) for _ in range(2))
    if layout == "last":
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    weight, bias, mean, variance = (torch.rand(SHAPE[1], generator=generator).to(device) + 0.5 for _ in range(4))
    return x, dy, weight, bias, mean, variance


def step(torch, call, x, dy, weight, bias, mean, variance, kind=None, **options):
    x, weight, bias = (t.detach().clone().to(kind or t.dtype).requires_grad_() for t in (x, weight, bias))
    running = [None if t is None else t.clone().to(kind or t.dtype) for t in (mean, variance)]
    y = call(x, *running, weight, bias, True, 0.25, 1e-3, **options)
    name = y.grad_fn.name()
    y.backward(dy.to(y.dtype))
    return name, [t for t in (y.detach(), x.grad, weight.grad, bias.grad, *running) if t is not None]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("running", [True, False])
def test_results_are_those_in_float64(torch, ours, device, python, dtype, layout, running):
    tensors = given(torch, device, dtype, layout)
    if not running:
        tensors = *tensors[:4], None, None
    name, found = step(torch, ours.batch_norm, *tensors)
    _, wanted = step(torch, torch.nn.functional.batch_norm, *tensors, kind=torch.float64)
    assert name == NODE
    assert python == []
    assert found[0].stride() == found[1].stride() == tensors[0].stride()
    error = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() <= error * (1 + other.abs().max())


@pytest.mark.parametrize("option", [{"fallback": True}, {"deterministic": True}, {"prefer": "fastest"}])
def test_what_is_asked_for_by_an_option_has_its_derivative_in_python(torch, ours, device, option):
    name, found = step(torch, ours.batch_norm, *given(torch, device), **option)
    _, wanted = step(torch, ours.batch_norm, *given(torch, device))
    assert name != NODE
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


def test_a_gradient_in_another_order_of_memory(torch, ours, device, python):
    tensors = list(given(torch, device))
    tensors[1] = tensors[1].contiguous()
    _, found = step(torch, ours.batch_norm, *tensors)
    _, wanted = step(torch, torch.nn.functional.batch_norm, *tensors)
    assert set(python) <= {"miopen_batch_norm_backward"}  # PyTorch 2.10 gives it in the order of x
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


def test_its_result_may_be_written_over(torch, ours, device):
    x, dy, *_ = given(torch, device)
    module = ours.BatchNorm2d(SHAPE[1], device=device)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    assert y.grad_fn.name() == NODE
    y.relu_().backward(dy)
    other = x.clone().requires_grad_()
    torch.nn.functional.batch_norm(other, None, None, module.weight, module.bias, True).relu().backward(dy)
    assert torch.allclose(leaf.grad, other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("float16", 2e-3), ("bfloat16", 1e-2)])
def test_a_second_derivative(torch, ours, device, dtype, error):
    """Of sums that float16 could not hold."""
    generator = torch.Generator().manual_seed(3)
    shape, results, kept = (4, 3, 150, 151), [], getattr(torch, dtype)
    data = [(torch.randn(shape, generator=generator) + mean).to(device, kept) for mean in (0, 3, 0)]
    weight = torch.rand(3, generator=generator).to(device) + 0.5
    for call, kind in ((ours.batch_norm, None), (torch.nn.functional.batch_norm, torch.float64)):
        x, dy, direction = (t.to(kind or t.dtype) for t in data)
        leaves = [x.requires_grad_(), dy.requires_grad_(), weight.to(kind or weight.dtype).requires_grad_()]
        y = call(x, None, None, leaves[2], torch.zeros_like(leaves[2]), True)
        assert kind is not None or y.grad_fn.name() == NODE
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        results.append(torch.autograd.grad(first, leaves, direction))
    for one, other in zip(*results, strict=True):
        assert (one.double() - other).abs().max() <= error * other.abs().max()


def test_running_statistics_may_change_before_backward(torch, ours, device):
    x, dy, weight, bias, mean, variance = given(torch, device)
    x.requires_grad_()
    mean.requires_grad_()
    y = ours.batch_norm(x, mean.detach(), variance, weight, bias, True)
    mean.data.zero_()
    variance.fill_(9)
    y.backward(dy)
    other = x.detach().clone().requires_grad_()
    torch.nn.functional.batch_norm(other, None, None, weight, bias, True).backward(dy)
    assert torch.allclose(x.grad, other.grad, atol=1e-5, rtol=1e-5)


def test_a_call_within_a_call(torch, ours, device):
    """By a hook of autograd's, which comes before the outer call's kernel has run."""
    x, _, weight, bias, *running = given(torch, device)
    x.requires_grad_()
    wanted, inner = ours.batch_norm(x, None, None, weight, bias, True), []

    def pack(tensor):
        if not inner:
            inner.append(None)
            inner[0] = ours.batch_norm(x.detach().clone().requires_grad_(), None, None, weight, bias, True)
        return tensor

    kept = [t.clone() for t in running]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ours.batch_norm(x, *running, weight, bias, True)
    assert torch.equal(y, wanted)
    assert torch.equal(inner[0], wanted)
    assert not torch.equal(running[0], kept[0])


def test_an_error_of_the_library_keeps_its_class(torch, ours, device, monkeypatch, anew):
    from pybnorm import functional
    from pybnorm.torch import installation

    def fail(*call):
        raise pybnorm.ExecutionError(backend="onednn", function="f", status=1, status_name="s", text="on purpose")

    x, _, weight, bias, *_ = given(torch, device)
    monkeypatch.setattr(installation._Host, "plan", staticmethod(fail))
    monkeypatch.setattr(functional, "_local", functional._Local())
    anew()
    with pytest.raises(pybnorm.ExecutionError, match="on purpose"):
        ours.batch_norm(x.requires_grad_(), None, None, weight, bias, True)


def test_other_kinds_of_numbers_are_looked_at_in_python(torch, ours, device):
    x, _, weight, bias, *_ = given(torch, device)
    with pytest.raises(pybnorm.ArgumentTypeError, match="momentum"):
        ours.batch_norm(x.requires_grad_(), None, None, weight, bias, True, None)
    assert ours.batch_norm(x, None, None, weight, bias, True, 1).grad_fn.name() != NODE


def test_training_at_the_end_of_the_process(ours, device):
    script = (
        "import atexit, torch\n"
        f"norm, x = torch.nn.BatchNorm2d(3).to({device!r}), torch.randn(2, 3, 4, 4, device={device!r})\n"
        "def step():\n"
        "    norm(x.clone().requires_grad_()).sum().backward()\n"
        "    print('done', norm.weight.grad is not None)\n"
        "atexit.register(step)\n"
        "import pybnorm.torch\n"
        "norm = pybnorm.torch.convert(norm)\n"
        "step()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["done", "True"] * 2, done.stderr


def test_errors_are_those_of_the_call(torch, ours, device):
    x, _, weight, bias, mean, variance = given(torch, device)
    x.requires_grad_()
    for _ in range(2):
        with pytest.raises(pybnorm.ArgumentError, match="weight"):
            ours.batch_norm(x, mean, variance, weight[:3], bias, True)
        with pytest.raises(pybnorm.ArgumentError, match="running"):
            ours.batch_norm(x, mean, None, weight, bias, True)
        with pytest.raises((pybnorm.UnsupportedError, pybnorm.ArgumentTypeError), match=r"f(loat)?64"):
            ours.batch_norm(x.double(), None, None, weight, bias, True)


def test_nothing_is_held(torch, ours, device):
    x, dy, *vectors = given(torch, device)
    x.requires_grad_()
    for _ in range(3):
        ours.batch_norm(x, *vectors[2:], *vectors[:2], True).backward(dy)
        ours.batch_norm(x, *vectors[2:], *vectors[:2], True)
    x.grad = None
    assert [t._use_count() for t in (x, dy, *vectors)] == [1] * 6


def test_other_threads_make_plans_of_their_own(torch, ours, device):
    tensors, found = given(torch, device), []
    _, wanted = step(torch, ours.batch_norm, *tensors)
    threads = [threading.Thread(target=lambda: found.append(step(torch, ours.batch_norm, *tensors))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in found] == [NODE] * 4
    for _, results in found:
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(results, wanted, strict=True))


def test_the_operator_is_nobody_elses(torch, ours, device):
    x, _, weight, bias, mean, variance = given(torch, device)
    ours.batch_norm(x.requires_grad_(), mean, variance, weight, bias, True)
    with pytest.raises(RuntimeError, match="not implemented for this device"):
        torch.ops.aten.miopen_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)


def test_without_it_the_derivative_is_in_python(torch, ours, device, monkeypatch):
    from pybnorm.torch import autograd

    monkeypatch.setattr(autograd, "_operator_lent", [None])
    name, found = step(torch, ours.batch_norm, *given(torch, device))
    monkeypatch.undo()
    other, wanted = step(torch, ours.batch_norm, *given(torch, device))
    assert (name == NODE, other == NODE) == (False, True)
    for one, two in zip(found, wanted, strict=True):
        assert torch.allclose(one, two, atol=1e-6, rtol=1e-6)
