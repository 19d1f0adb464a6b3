"""The function, the modules and the switch for PyTorch, against PyTorch in float64 and against its own modules."""

import copy
import subprocess
import sys

import numpy as np
import pytest

import pybnorm
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand

SHAPES = {1: (6, 5, 9), 2: (4, 5, 6, 7), 3: (3, 5, 4, 3, 2)}


def tensor(torch, values, device, dtype="float32"):
    return torch.tensor(values.tolist(), dtype=getattr(torch, dtype), device=device)


def randn(torch, shape, device, layout="first", seed=0):
    made = tensor(torch, np.random.default_rng(seed).normal(0.5, 1.5, shape), device)
    if layout == "last":
        made = made.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return made


def close(got, right, scale=1.0):
    got, right = got.detach().double(), right.detach().double()
    return float((got - right).abs().max()) <= 2e-5 * max(1.0, float(right.abs().max())) * scale


# ---------------------------------------------------------------- the function


@pytest.mark.parametrize("line", ["f32,nchw,4x8x6x5", "f32,nhwc,4x8x6x5", "f32,nchw,16x9", "f32,nhwc,2x8x3x4x5"])
def test_gradients_are_within_the_bound_of_the_float64_reference(torch, ours, device, line):
    # The saved statistics of a backward problem are not x's own; those of autograd are, so the problem saves none.
    (problem,) = expand(f"backward,spatial,{line},fill=randn,kappa=2,saved=0")
    inputs = generate(problem)
    expected = bounds.expect(problem, inputs)
    order = sorted(range(len(problem.dims)), key=lambda axis: -problem.strides[axis])

    def data(values):
        dense = tensor(torch, np.ascontiguousarray(values.transpose(order)), device)
        return dense.permute([order.index(axis) for axis in range(values.ndim)])

    weight = tensor(torch, np.asarray(inputs.scale).ravel(), device)
    leaves = [t.requires_grad_() for t in (data(inputs.x), weight, torch.zeros_like(weight))]
    y = ours.batch_norm(leaves[0], None, None, *leaves[1:], training=True, eps=problem.epsilon)
    y.backward(data(inputs.dy))
    for name, leaf in zip(("dx", "dscale", "dbias"), leaves, strict=True):
        values = np.from_dlpack(leaf.grad.cpu().contiguous()).reshape(np.shape(expected.outputs[name]))
        verdict = bounds.judge(expected, name, values)
        assert verdict.status in ((Status.PASS,) if device == "cpu" else (Status.PASS, Status.WARN)), (name, verdict)


def test_only_what_is_asked_for_has_a_gradient(torch, ours, device):
    x, weight = randn(torch, SHAPES[2], device), randn(torch, (5,), device)
    for training in (True, False):
        for of in range(3):
            leaves = [x.clone(), weight.clone(), weight.clone()]
            leaves[of].requires_grad_()
            mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
            ours.batch_norm(leaves[0], mean, variance, *leaves[1:], training).sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [n == of for n in range(3)]
        leaf = x.clone().requires_grad_()
        assert not ours.batch_norm(x, mean, variance, weight, None, training).requires_grad
        with torch.no_grad():
            assert not ours.batch_norm(leaf, mean, variance, weight, None, training).requires_grad
        ours.batch_norm(leaf, mean, variance, None, None, training).square().sum().backward()
        assert leaf.grad is not None
        bias = weight.clone().requires_grad_()
        ours.batch_norm(x, mean, variance, None, bias, training).sum().backward()
        assert close(bias.grad, torch.full((5,), 4.0 * 6 * 7, device=device))


def test_inputs_and_gradients_in_any_order_of_memory(torch, ours, device):
    x = randn(torch, SHAPES[2], device)
    weight = torch.ones(5, device=device)
    right = ours.batch_norm(x, None, None, weight, None, True)
    views = [
        torch.stack([x, x], dim=-1)[..., 0],
        x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        x.contiguous(memory_format=torch.channels_last),
    ]
    for view in views:
        leaf = view.detach().requires_grad_()
        y = ours.batch_norm(leaf, None, None, weight, None, True)
        assert close(y, right)
        y.sum().backward()  # its dy has strides of 0
        assert leaf.grad.abs().max() < 1e-4
    assert y.is_contiguous(memory_format=torch.channels_last)
    spread = x[:1].expand(4, 5, 6, 7)
    assert close(ours.batch_norm(spread, None, None, weight, None, True), torch.nn.functional.batch_norm(
        spread, None, None, weight, None, True))  # fmt: skip


def test_refusals_are_errors_or_by_request_pytorchs(torch, ours, device):
    weight = torch.ones(5, device=device)
    half = torch.ones(5, device=device, dtype=torch.float64)
    x = randn(torch, SHAPES[2], device)
    for call, match in [
        (lambda **o: ours.batch_norm(x, None, None, training=False, **o), "running_mean"),
        (lambda **o: ours.batch_norm(x[:1, :, :1, :1], weight, weight, training=True, **o), "more than one value"),
        (lambda **o: ours.batch_norm(x[:1, :1, :1, :1], None, None, training=True, **o), "more than one value"),
    ]:
        with pytest.raises(pybnorm.ArgumentError, match=match):
            call()
        with pytest.raises((ValueError, RuntimeError)):
            call(fallback=True)  # PyTorch refuses too
    with pytest.raises(pybnorm.ArgumentError, match="weight"):
        ours.batch_norm(x, None, None, half, half, training=True)
    with pytest.raises(pybnorm.ArgumentError, match="input"):
        ours.batch_norm(None, None, None)
    if device == "cpu":
        wide = x.double()
        y = ours.batch_norm(wide, None, None, half, half, training=True)
        torch.testing.assert_close(y, torch.nn.functional.batch_norm(wide, None, None, half, half, True))


# ---------------------------------------------------------------- modules


def pair(torch, ours, rank, device, **options):
    """PyTorch's module and ours, of equal state that is not the initial one."""
    name = f"BatchNorm{rank}d"
    theirs, mine = (getattr(package, name)(5, **options).to(device) for package in (torch.nn, ours))
    with torch.no_grad():
        for number, value in enumerate([*theirs.parameters(), *(b for b in theirs.buffers() if b.dim())]):
            value.copy_(randn(torch, (5,), device, seed=20 + number).abs() + 0.25)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False},
        {"affine": False, "momentum": None, "track_running_stats": False},
        {"eps": 0.01, "momentum": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_modules_behave_as_pytorchs_over_steps(torch, ours, device, rank, options, layout):
    if layout == "last" and rank == 1:
        pytest.skip("three axes have no such layout")
    theirs, mine = pair(torch, ours, rank, device, **options)
    for step, training in enumerate([True, True, False, True, False, True]):
        x = randn(torch, SHAPES[rank], device, layout, seed=step)
        dy = randn(torch, SHAPES[rank], device, layout, seed=100 + step)
        results = []
        for module in (theirs, mine):
            module.train(training)
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(dy)
            results.append([y, leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()])
        for right, got in zip(*results, strict=True):
            assert close(got, right), step
        assert results[1][0].stride() == x.stride()
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    if options.get("track_running_stats", True):
        assert int(mine.num_batches_tracked) == int(theirs.num_batches_tracked) == 4


def test_statistics_that_are_tracked_no_longer_stay(torch, ours, device):
    results = []
    for module in pair(torch, ours, 2, device):
        module.track_running_stats = False
        before = [value.clone() for value in module.buffers()]
        x = randn(torch, SHAPES[2], device)
        results += [module(x), module.eval()(x)]  # which still takes them
        assert all(torch.equal(now, then) for now, then in zip(module.buffers(), before, strict=True))
    assert close(results[2], results[0])
    assert close(results[3], results[1])


def test_state_goes_to_pytorchs_modules_and_back(torch, ours, device):
    theirs, mine = pair(torch, ours, 2, device)
    mine(randn(torch, SHAPES[2], device))
    theirs.load_state_dict(mine.state_dict())
    other = ours.BatchNorm2d(5).to(device)
    other.load_state_dict(theirs.state_dict())
    for key, value in mine.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    x = randn(torch, SHAPES[2], device, seed=3)
    assert close(other.eval()(x), theirs.eval()(x))
    assert repr(mine) == repr(theirs)
    assert type(copy.deepcopy(mine)) is ours.BatchNorm2d


def test_ranks_are_checked(torch, ours, device):
    for rank in (1, 2, 3):
        module = getattr(ours, f"BatchNorm{rank}d")(5).to(device)
        with pytest.raises(ValueError, match="input"):
            module(randn(torch, SHAPES[rank % 3 + 1], device))
    assert ours.BatchNorm1d(5).to(device)(randn(torch, (6, 5), device)).shape == (6, 5)


def test_convert_switches_a_model_and_keeps_all_else(torch, ours, device):
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Conv2d(6, 4, 1), torch.nn.BatchNorm2d(4, momentum=None), torch.nn.Flatten())
    first = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6, eps=1e-3)
    theirs = torch.nn.Sequential(*first, inner, torch.nn.BatchNorm1d(64, affine=False)).to(device)
    theirs[1].weight.requires_grad_(False)
    theirs[2][1].eval()
    mine = copy.deepcopy(theirs)
    seen = []
    mine[1].register_forward_hook(lambda module, given, result: seen.append(type(module)))
    before = {name: id(value) for name, value in [*mine.named_parameters(), *mine.named_buffers()]}
    modes = [m.training for m in mine.modules()]
    assert ours.convert(mine) is mine
    assert {name: id(value) for name, value in [*mine.named_parameters(), *mine.named_buffers()]} == before
    assert [m.training for m in mine.modules()] == modes
    assert [type(m) for m in mine.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)] == [
        ours.BatchNorm2d, ours.BatchNorm2d, ours.BatchNorm1d,
    ]  # fmt: skip
    x = randn(torch, (5, 3, 6, 6), device)
    assert close(mine(x), theirs(x), 50)
    assert seen == [ours.BatchNorm2d]
    assert not mine[1].weight.requires_grad
    for (name, right), got in zip(theirs.state_dict().items(), mine.state_dict().values(), strict=True):
        assert close(got, right, 50), name
    plain = torch.nn.BatchNorm2d(3)
    assert type(ours.convert(plain)) is ours.BatchNorm2d
    assert ours.convert(plain, fallback=True).fallback
    assert not ours.convert(plain).fallback


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_convert_leaves_subclasses_alone_and_names_bad_arguments(torch, ours):
    class Own(torch.nn.BatchNorm2d):
        pass

    kept = torch.nn.Sequential(Own(3), torch.nn.LazyBatchNorm2d(), torch.nn.GroupNorm(1, 3))
    types = [type(m) for m in kept]
    assert [type(m) for m in ours.convert(kept)] == types
    for bad in (None, [torch.nn.BatchNorm2d(3)], torch.nn.BatchNorm2d):
        with pytest.raises(pybnorm.ArgumentTypeError, match="model"):
            ours.convert(bad)
    with pytest.raises(pybnorm.ArgumentTypeError, match="fallback"):
        ours.convert(torch.nn.BatchNorm2d(3), fallback=1)


# ---------------------------------------------------------------- what PyTorch does around it


def test_autocast_leaves_the_dtype_of_the_input(torch, ours, device):
    module = ours.BatchNorm2d(5).to(device)
    x = randn(torch, SHAPES[2], device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert module(x).dtype == torch.float32
        y = module(x.bfloat16().requires_grad_())
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert module.weight.grad.dtype == torch.float32
    right = torch.nn.functional.batch_norm(x.bfloat16().float(), None, None, None, None, True)
    assert (y.float() - right).abs().max() < 0.05


def test_nothing_else_imports_pytorch(tmp_path):
    code = "import sys, pybnorm, pybnorm.functional, pybnorm.operations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_is_left_to_pytorch(torch, ours, device, training):
    weight, bias = torch.full((5,), 1.5, device=device), torch.full((5,), -0.5, device=device)
    results = []
    for call in (ours.batch_norm, torch.nn.functional.batch_norm):
        running = torch.full((5,), 0.25, device=device), torch.full((5,), 2.0, device=device)
        leaves = [t.clone().requires_grad_() for t in (torch.empty(0, 5, 6, 7, device=device), weight, bias)]
        y = call(leaves[0], *running, *leaves[1:], training=training)
        y.sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves), *running])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
