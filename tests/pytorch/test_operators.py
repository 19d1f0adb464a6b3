"""What compilers, exporters and function transforms see, second derivatives, and what models do, against PyTorch's."""

import copy
import threading

import numpy as np
import pytest

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own


def made(torch, device, *shape, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(0.5, 1.5, shape)
    return torch.tensor(values.tolist(), dtype=getattr(torch, dtype), device=device)


def network(torch, device):
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4, momentum=None)
    ).to(device)


def step(torch, model, x):
    """Everything that a step changes: y, gradients, buffers."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    (y.float() ** 3).sum().div(32).backward()  # the sum of squares behind a batch norm is constant
    return [y.detach(), leaf.grad, *[p.grad for p in model.parameters()], *model.buffers()]


def same(torch, got, wanted, tolerance=2e-4):
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


# ---------------------------------------------------------------- compilers and exporters


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_finds_no_break_in_training_and_evaluation(torch, ours, operators, device):
    theirs = network(torch, device)
    mine = ours.convert(copy.deepcopy(theirs))
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    for number, training in enumerate([True, True, False]):
        x = made(torch, device, 4, 3, 8, 8, seed=number)
        theirs.train(training), mine.train(training)
        same(torch, step(torch, compiled, x), step(torch, theirs, x))
    assert int(mine[1].num_batches_tracked) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_inductor_lowers_the_operators(torch, ours, operators, device, layout, dtype):
    """Alone: without another operation there is nothing that would need Triton or a compiler of C++."""
    x = made(torch, device, 4, 5, 6, 7, dtype=dtype).contiguous(memory_format=getattr(torch, layout))
    dy = made(torch, device, 4, 5, 6, 7, seed=1, dtype=dtype).contiguous(memory_format=getattr(torch, layout))
    given = [made(torch, device, 5, seed=n) for n in (2, 3, 4)] + [made(torch, device, 5, seed=5).abs() + 0.5]
    compiled = torch.compile(ours.batch_norm, backend="inductor", fullgraph=True)
    tolerance = 2e-5 if dtype == "float32" else 0.01  # the bits of a backward need not repeat
    for training in (True, False):
        results = []
        for call in (compiled, ours.batch_norm):
            leaf, weight, bias, *running = [t.clone().requires_grad_(n < 3) for n, t in enumerate((x, *given))]
            y = call(leaf, *running, weight, bias, training)
            y.backward(dy)
            assert y.stride() == leaf.grad.stride() == x.stride()
            results.append([y.detach(), leaf.grad, weight.grad, bias.grad, *running])
        same(torch, *results, tolerance)
        with torch.no_grad():
            same(torch, *([call(x, *given[2:], *given[:2])] for call in (compiled, ours.batch_norm)), tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "fuse"), [("default", True), ("reduce-overhead", False)])
def test_a_compiled_model_makes_the_steps_of_the_plain_one(torch, ours, operators, device, mode, fuse):
    """As training does it: channels last, autocast; as often as CUDA graphs take to be captured and repeated."""
    plain = ours.convert(network(torch, device).to(memory_format=torch.channels_last), fuse=fuse)
    mine = ours.convert(ours.unconvert(copy.deepcopy(plain)), fuse=fuse)
    compiled = torch.compile(mine, fullgraph=True, mode=mode)
    for number, training in enumerate([True, True, True, False, False, False]):
        x = made(torch, device, 4, 3, 8, 8, seed=number).contiguous(memory_format=torch.channels_last)
        plain.train(training), mine.train(training)
        with torch.autocast(device, dtype=torch.bfloat16):
            if training:
                got, right = step(torch, compiled, x), step(torch, plain, x)
            else:
                with torch.no_grad():
                    got, right = [compiled(x)], [plain(x)]
        same(torch, got, right, 0.03)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", ["training", "inference", "backward", "frozen", "running", "updating"])
def test_operators_are_registered_as_they_behave(torch, operators, device, operation):
    def leaf(*shape, seed):
        return made(torch, device, *shape, seed=seed).requires_grad_()

    x = leaf(3, 4, 2, 3, seed=1).detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias, mean = (leaf(4, seed=n) for n in (2, 3, 4))
    mean, variance = mean.detach(), mean.detach().abs() + 0.5
    dy = made(torch, device, 3, 4, 2, 3)
    call, given = {
        "training": (operators.batch_norm_training, (x, weight, bias, dy, 1e-5, True, False)),
        "inference": (operators.batch_norm_inference, (x, weight, bias, None, mean, variance, 1e-5, False, False)),
        "backward": (operators.batch_norm_backward, (dy, x.detach(), weight.detach(), None, None, mean, variance, True,
                     1e-5, [True, False, True], bias.detach(), dy, False, False)),
        "frozen": (operators.batch_norm_backward, (dy, x.detach(), weight.detach(), mean, variance, None, None, False,
                   1e-5, [True, False, True], None, None, False, False)),
        "updating": (operators.batch_norm_, (x.detach(), weight.detach(), bias.detach(), mean, variance, True, 0.1,
                     1e-5, dy, True, False)),
        "running": (operators.update_running, (mean, variance, mean.clone(), variance.clone(), 0.1)),
    }[operation]  # fmt: skip
    assert set(torch.library.opcheck(call.default, given).values()) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 3, 2, 2, 2, 2)], ids=str)
def test_layouts_are_those_that_shapes_alone_tell(torch, operators, device, shape):
    """Channels last is of four and five axes, as PyTorch has it: others are copied."""
    x = made(torch, device, *shape).transpose(1, -1).contiguous().transpose(1, -1)
    weight, bias, mean, variance = (made(torch, device, 3, seed=n).abs() for n in range(4))
    back = 1e-5, [True] * 3, None, None, False, False
    for call, given in (
        (operators.batch_norm_, (x, weight, bias, mean, variance, True, 0.1, 1e-5, x.clone(), True, False)),
        (operators.batch_norm_backward, (x.clone(), x, weight, None, None, mean, variance, True, *back)),
    ):
        assert set(torch.library.opcheck(call.default, given, test_utils="test_faketensor").values()) == {"SUCCESS"}
        assert call(*given)[0].is_contiguous()


def test_a_slice_keeps_its_layout(torch, ours, device):
    whole = made(torch, device, 2, 8, 4, 6).contiguous(memory_format=torch.channels_last)
    for x in (whole[:, :4], whole[..., ::2], whole[:, :, 1:3], whole[:1], whole[..., :1], whole.contiguous()[:, :4]):
        theirs = torch.nn.functional.batch_norm(x, None, None, training=True)
        assert ours.batch_norm(x, None, None, training=True).stride() == theirs.stride()


def test_errors_behind_the_dispatcher_keep_their_class(torch, ours, device):
    x = made(torch, device, 4, 3, 5)
    for call in (ours.batch_norm, lambda *given, **options: ours.BatchNorm1d(3, eps=1e-300)(x, activation="relu")):
        with pytest.raises(pybnorm.ArgumentError, match=r"^(eps|epsilon): got 1e-300"):
            call(x, None, None, training=True, eps=1e-300)
    if device == "cpu":
        odd = torch.frombuffer(bytearray(97), dtype=torch.float32, offset=1, count=24).view(2, 3, 4)
        with pytest.raises(pybnorm.ArgumentError, match=r"^(input|x): "):
            ours.batch_norm(odd, None, None, training=True)
        y = ours.batch_norm(made(torch, device, 2, 3, 4).requires_grad_(), None, None, training=True)
        with pytest.raises(pybnorm.ArgumentError, match=r"^dy: "):
            y.backward(odd)


def test_threads_without_parameters(torch, ours, device):
    """What takes their place lives as long as each call, whoever made it."""
    for channels in range(50001, 50021):
        barrier, wrong = threading.Barrier(4), []
        x = made(torch, device, 4, channels)
        wanted = torch.nn.functional.batch_norm(x, None, None, training=True)

        def run(barrier=barrier, wrong=wrong, x=x, wanted=wanted):
            barrier.wait()
            found = ours.batch_norm(x, None, None, training=True)
            wrong.append(bool((found - wanted).abs().max() > 1e-4))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == [False] * 4


# ---------------------------------------------------------------- function transforms


def loss(torch, function, bias):
    return lambda x, weight: (function(x, None, None, weight, bias, True) ** 3).sum()


def test_vmap_over_a_residual_of_other_strides(torch, ours, device):
    module = ours.BatchNorm1d(3, track_running_stats=False).to(device)
    x, residuals = made(torch, device, 4, 3, 5), made(torch, device, 2, 4, 5, 3, seed=1).transpose(2, 3)
    found = torch.vmap(lambda r: module(x, activation="relu", residual=r))(residuals)
    same(torch, found, [module(x, activation="relu", residual=r) for r in residuals])


def test_vmap_takes_each_as_if_alone(torch, ours, operators, device):
    x, weights, bias = made(torch, device, 3, 4, 5, 2, 3), made(torch, device, 3, 5, seed=1), made(torch, device, 5)
    mean, variance = made(torch, device, 3, 5, seed=2), made(torch, device, 3, 5, seed=3).abs() + 0.5
    native = torch.nn.functional.batch_norm
    for training in (True, False):
        kept, results = [], []
        for function in (ours.batch_norm, native):
            running = mean.clone(), variance.clone()
            results.append(
                torch.vmap(lambda x, m, v, w, f=function, t=training: f(x, m, v, w, bias, t), in_dims=(1, 0, 0, 0))(
                    x.movedim(0, 1), *running, weights
                )
            )
            kept.append(running)
        same(torch, results[:1], results[1:])
        same(torch, kept[0], kept[1])
    for mapped in ((None, None), (0, None), (None, 0)):
        running = [r if axis == 0 else r[0] for axis, r in zip(mapped, (mean, variance), strict=True)]
        with pytest.raises(pybnorm.ArgumentError, match="vmap"):
            torch.vmap(lambda *given: ours.batch_norm(*given, training=True), (0, *mapped))(x, *running)
    found, wanted = (
        torch.vmap(torch.func.grad(loss(torch, f, bias), (0, 1)), (0, None))(x, weights[0])
        for f in (ours.batch_norm, native)
    )
    same(torch, found, wanted, 2e-3)


# ---------------------------------------------------------------- second derivatives


@pytest.mark.parametrize("training", [True, False])
def test_a_second_derivative_is_that_of_pytorch_in_float64(torch, ours, device, training):
    shape = (4, 5, 6, 7)
    x, direction = made(torch, device, *shape, seed=1), made(torch, device, *shape, seed=2).double()
    weight, bias, mean = (made(torch, device, 5, seed=n) for n in (3, 4, 5))
    variance = made(torch, device, 5, seed=6).abs() + 0.5

    def second(function, dtype):
        leaves = [t.to(dtype).clone().requires_grad_() for t in (x, weight, bias)]
        y = function(leaves[0], mean.to(dtype).clone(), variance.to(dtype).clone(), *leaves[1:], training)
        first = torch.autograd.grad((y**3).mean(), leaves, create_graph=True)
        return torch.autograd.grad((first[0] * direction).sum() + sum(f.pow(2).sum() for f in first[1:]), leaves)

    for got, right in zip(second(ours.batch_norm, torch.float32), second(torch.nn.functional.batch_norm, torch.float64),
                          strict=True):  # fmt: skip
        assert (got - right).abs().max() <= 1e-5 * right.abs().max()


def test_a_second_derivative_where_dy_is_a_constant(torch, ours, device):
    x, w, b = (t.to(device).requires_grad_() for t in (torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)))
    dy = torch.randn(4, 3, 5, 5).to(device)

    def second(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
        y = function(leaves[0], None, None, leaves[1], leaves[2], True)
        first = torch.autograd.grad(y, leaves, dy.to(dtype), create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), leaves[:2])

    found, right = second(ours.batch_norm, torch.float32), second(torch.nn.functional.batch_norm, torch.float64)
    for one, other in zip(found, right, strict=True):
        assert (one.double() - other).abs().max() <= 1e-4 * (1 + other.abs().max())


# ---------------------------------------------------------------- what models do


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_16_bits_throughout(torch, ours, device, dtype, monkeypatch):
    if device == "cpu" and int(torch.__version__.split(".")[0]) < 2:
        pytest.skip("this PyTorch has no batch norm with parameters of 16 bits on the CPU to compare with")
    kind = getattr(torch, dtype)
    theirs = torch.nn.BatchNorm2d(5).to(device)
    mine = ours.convert(copy.deepcopy(theirs)).to(kind)
    if ours.calls.compiled:  # evaluation's gradients, too, are kernels in C
        for name in ("train", "infer", "differentiate"):
            monkeypatch.delattr(ours.calls, name)
    for number, training in enumerate([True, True, False]):
        x = made(torch, device, 4, 5, 6, 7, seed=number, dtype=dtype)
        theirs.train(training), mine.train(training)
        got, right = step(torch, mine, x), step(torch, theirs, x.float())
        assert {value.dtype for value in got} == {kind, torch.int64}
        same(torch, [g.to(r.dtype) for g, r in zip(got, right, strict=True)], right, 0.03)
    with torch.no_grad():  # of evaluation: nothing is written
        torch.testing.assert_close(mine(x).float(), right[0], atol=0.03, rtol=0.03)
        running, batch = made(torch, device, 2, 99, dtype=dtype), made(torch, device, 2, 99, seed=1)
        rounded_once = (running.float() * 0.75 + batch * 0.25).to(kind)
        torch.ops.pybnorm.update_running(*running, *batch, 0.25)
        assert torch.equal(running, rounded_once)
        statistics = torch.zeros(5, device=device), torch.ones(5, device=device)
        back = torch.ops.pybnorm.batch_norm_backward
        options = 1e-5, [True] * 3, None, None, False, False
        found = back(x, x, mine.weight, None, None, *statistics, True, *options)
        assert [gradient.dtype for gradient in found] == [kind] * 4


def test_a_slice_of_16_bits_between_two_words(torch, ours, device):
    whole = made(torch, device, 1 + 4 * 5 * 6, dtype="bfloat16")
    x = whole[1:].view(4, 5, 6)
    assert x.data_ptr() % 4 == 2
    module = ours.BatchNorm1d(5).to(device)
    same(torch, step(torch, module, x)[:3], step(torch, ours.BatchNorm1d(5).to(device), x.clone())[:3], 0)


def test_gradients_of_any_layout(torch, ours, device):
    x = made(torch, device, 4, 5, 6, 8)
    for dy in (
        torch.ones(1, 1, 1, 1, device=device).expand(4, 5, 6, 8),
        made(torch, device, 4, 5, 6, 16)[..., ::2],
        made(torch, device, 8, 6, 5, 4).permute(3, 2, 1, 0),
        made(torch, device, 4, 5, 6, 8).contiguous(memory_format=torch.channels_last),
    ):
        found = []
        for function in (ours.batch_norm, torch.nn.functional.batch_norm):
            leaf = x.clone().requires_grad_()
            function(leaf, None, None, None, None, True).backward(dy)
            found.append(leaf.grad)
        same(torch, found[:1], found[1:], 2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("momentum", [0.25, None])
def test_a_checkpoint_counts_batches_as_pytorch_does(torch, ours, device, momentum, reentrant, stops):
    """Both of its runs; the second may stop where batch norm, the last there, saves for backward."""
    checkpoints = torch.utils.checkpoint
    theirs = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5, momentum=momentum)).to(device)
    found = []
    for model in (theirs, ours.convert(copy.deepcopy(theirs))):
        for number in range(3):
            x = made(torch, device, 4, 3, 8, 8, seed=number).requires_grad_()
            with checkpoints.set_checkpoint_early_stop(stops):
                (checkpoints.checkpoint(model, x, use_reentrant=reentrant) ** 2).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    same(torch, found[1], found[0], 2e-4)
    assert int(found[1][-1]) == 6


def step_of(torch, call, x, **how):
    """The result of a training, its gradient, and an inference."""
    leaf = x.clone().requires_grad_()
    y = call(leaf, None, None, training=True, **how)
    (y**3).sum().backward()
    statistics = torch.zeros_like(x[0, :, 0, 0]), torch.ones_like(x[0, :, 0, 0])
    return y.detach(), leaf.grad, call(x, *statistics, **how)


def test_bits_repeat(torch, ours, device):
    x = made(torch, device, 8, 64, 28, 28)
    first, *others = [step_of(torch, ours.batch_norm, x) for _ in range(3)]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_what_is_refused_pytorch_computes_if_it_may(torch, ours, device, python, monkeypatch, request):
    """As where a GPU's compiler is not here: a vendor computes then, which may not repeat its bits."""
    from pybnorm import functional

    def refused(*arrays, deterministic, **options):
        assert deterministic
        text = "deterministic=True: the bits of miopen's batch norms are not known to repeat by any of its ways"
        raise pybnorm.UnsupportedError(
            backend="miopen", function="f", status=-1, status_name="PBN_E_UNSUPPORTED", text=text
        )

    for operation in ("training", "inference", "backward"):
        monkeypatch.setattr(functional, f"batch_norm_{operation}", refused)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    x = made(torch, device, 8, 5, 6, 7)
    for training in (True, False):
        with pytest.raises(RuntimeError, match="not known to repeat"):  # PyTorch's own class
            ours.batch_norm(x, torch.zeros(5, device=device), torch.ones(5, device=device), training=training)
    wanted = step_of(torch, torch.nn.functional.batch_norm, x)
    for mine, theirs in zip(step_of(torch, ours.batch_norm, x, fallback=True), wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    for kind in (torch.float32, torch.float16):
        made_by = []
        for kinds in (torch.nn.BatchNorm2d, ours.BatchNorm2d):
            module = kinds(5, device=device, dtype=kind)
            module.fallback = True
            made_by.append(step(torch, module, x.to(kind)))
        assert [t.dtype for t in made_by[1]] == [t.dtype for t in made_by[0]]
        same(torch, *made_by, 1e-5 if kind == torch.float32 else 0.03)
