"""Batch norm, an addition and ReLU as one call of a module: what they compute apart, and when they are not joined."""

import copy
import threading

import pytest


@pytest.fixture
def calls(device, monkeypatch):
    """The calls that take ReLU in, as they are made, and those that the kernels in C leave to Python."""
    from pybnorm.torch import operators

    made, forward, backward = [], operators._update_and_normalize, operators._backward

    def normalize(*given):
        if given[9]:
            made.append("train" if given[5] else "infer")
        return forward(*given)

    def differentiate(*given):
        if given[11] is not None:
            made.append("differentiate")
        return backward(*given)

    monkeypatch.setattr(operators, "_update_and_normalize", normalize)
    monkeypatch.setattr(operators, "_backward", differentiate)
    for name, function in list(operators.BY_CALLS.items()):
        monkeypatch.setitem(operators.BY_CALLS, name, lambda *given, f=function: made.append("python") or f(*given))
    return made


def right(torch, module, x, residual, dy):
    """y, the gradients and the running statistics in float64; and how near ReLU's corner each result is."""
    wide = torch.nn.BatchNorm2d(x.shape[1], module.eps, module.momentum).to(x.device, torch.float64)
    wide._check_input_dim = lambda x: None
    wide.load_state_dict(module.state_dict())
    given = [t.detach().double().requires_grad_() for t in (x, *([] if residual is None else [residual]))]
    total = wide(given[0]) if residual is None else wide(given[0]) + given[1]
    near = total.detach().abs() < 1e-2
    y = total.relu()
    y.backward(torch.where(near, 0, dy.double()))
    gradients = [given[0].grad, wide.weight.grad, wide.bias.grad, *(t.grad for t in given[1:])]
    return [y.detach(), *gradients, wide.running_mean, wide.running_var], near


def seen(module, x, residual, dy):
    given = [t.detach().requires_grad_() for t in (x, *([] if residual is None else [residual]))]
    y = module(given[0], activation="relu", residual=given[1] if len(given) > 1 else None)
    y.backward(dy)
    gradients = [given[0].grad, module.weight.grad, module.bias.grad, *(t.grad for t in given[1:])]
    return [y.detach(), *gradients, module.running_mean, module.running_var]


def drawn(torch, device, dtype, shape=(8, 32, 7, 9), seed=1):
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device=device).to(dtype, memory_format=torch.channels_last)
        for _ in range(3)
    ]


def norm_of(torch, ours, device, channels=32):
    torch.manual_seed(5)
    module = ours.BatchNorm2d(channels).to(device)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
        module.bias.uniform_(-0.5, 0.5)
    return module


@pytest.mark.parametrize("residual", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_call_computes_what_three_do(torch, ours, device, calls, dtype, residual):
    for shape, eps in (((8, 32, 7, 9), 1e-5), ((8, 32, 7, 9), 0.3), ((4, 512, 4, 4), 1e-5), ((16, 64, 28, 28), 1e-5)):
        calls.clear()
        x, z, dy = drawn(torch, device, getattr(torch, dtype), shape)
        z = z if residual else None
        module = norm_of(torch, ours, device, shape[1])
        module.eps = eps
        wanted, near = right(torch, module, x, z, dy)
        found = seen(module, x, z, torch.where(near, 0, dy))
        assert calls == ["train", "differentiate"]
        unit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
        for one, other in zip(found, wanted, strict=True):
            assert (one.double() - other).abs().max() <= unit * (1 + other.abs().max())
            assert one.dim() == 1 or (one.dtype == x.dtype and one.stride() == x.stride())


def test_a_second_derivative_is_right(torch, ours, device, calls):
    x, z, dy = drawn(torch, device, torch.float32)
    module = norm_of(torch, ours, device)
    wide = torch.nn.BatchNorm2d(32).to(device).double()
    wide.load_state_dict(module.state_dict())
    results = []
    for norm, kind in ((module, torch.float32), (wide, torch.float64)):
        given = [t.detach().to(kind).requires_grad_() for t in (x, z)]
        options = {"activation": "relu", "residual": given[1]} if norm is module else {}
        y = norm(given[0], **options)
        y = y if norm is module else (y + given[1]).relu()
        first = torch.autograd.grad((y.square() * dy.to(kind)).sum(), given, create_graph=True)
        results.append(torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), given[0])[0])
    assert calls[0] == "train"
    assert set(calls) <= {"train", "differentiate"}
    far = (results[0].double() - results[1]).abs() > 1e-4 * (1 + results[1].abs().max())
    assert far.double().mean() < 1e-3  # where float32 and float64 are on two sides of ReLU's corner


def test_without_a_derivative_and_in_evaluation(torch, ours, device, calls):
    x, z, _ = drawn(torch, device, torch.bfloat16)
    module = norm_of(torch, ours, device)
    with torch.no_grad():
        for training in (True, False):
            calls.clear()
            module.train(training)
            wide = torch.nn.BatchNorm2d(32).to(device).double().train(training)
            wide.load_state_dict(module.state_dict())
            y = module(x, activation="relu", residual=z)
            assert calls == ["train" if training else "infer"]
            assert (y.double() - (wide(x.double()) + z.double()).relu()).abs().max() < 0.04
    module.eval()
    calls.clear()
    module(x.requires_grad_(), activation="relu").float().sum().backward()
    assert calls == ["infer", "differentiate", "python"]  # which masks, and leaves the rest to a kernel without ReLU


@pytest.mark.parametrize(
    "what", ["channels first", "channels", "float64", "residual", "address", "sync", "rank", "weight"]
)
def test_other_layouts_and_what_is_not_joined_are_right_too(torch, ours, device, calls, what):
    kind = torch.float64 if what == "float64" else torch.float32
    x, z, dy = drawn(torch, device, kind, (8, 3 if what == "channels" else 32, 5, 5))
    module = norm_of(torch, ours, device, x.shape[1])
    if what == "channels first":
        x, z, dy = x.contiguous(), z.contiguous(), dy.contiguous()
    elif what == "residual":
        z = z.contiguous()
    elif what == "address":
        x = torch.empty(x.numel() + 1, device=device)[1:].as_strided(x.shape, x.stride()).copy_(x)
    elif what == "float64":
        module.double()
    elif what == "rank":
        x, z, dy = (t.unflatten(3, (1, 5)).contiguous() for t in (x, z, dy))
        module._check_input_dim = lambda x: None
    elif what == "weight":
        x, z, dy = x.contiguous(), z.contiguous(), dy.contiguous()  # in others PyTorch 2.13 takes it as contiguous
        module.weight, module.fallback = torch.nn.Parameter(torch.rand(64, device=device)[::2]), True
    elif what == "sync":
        module.__class__ = ours.SyncBatchNorm
        module.process_group = None
    wanted, near = right(torch, module, x, z, dy)
    found = seen(module, x, z, torch.where(near, 0, dy))
    wanted_calls = {"sync": [], "weight": ["differentiate", "python"]}
    wanted_calls["residual"] = ["train", "python", "train", "differentiate"]  # brought into the layout in between
    assert calls == wanted_calls.get(what, ["train", "differentiate"])
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * (1 + other.abs().max())


def test_streams_and_threads(torch, ours, device, calls):
    """Each call goes to the stream of the thread that makes it, with one handle for all."""
    if device == "cpu":
        pytest.skip("the CPU has no streams")
    module, wanted, failed = norm_of(torch, ours, device).eval(), {}, []
    data = {seed: drawn(torch, device, torch.float32, (64, 32, 56, 56), seed) for seed in range(4)}
    with torch.no_grad():
        for seed, (x, z, _) in data.items():
            wanted[seed] = (torch.nn.functional.batch_norm(
                x, module.running_mean, module.running_var, module.weight, module.bias) + z).relu()  # fmt: skip
    torch.cuda.synchronize()

    def work(seed):
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(30):
                x = data[seed][0].mul(0).add_(data[seed][0])  # ready in this stream's order alone
                y = module(x, activation="relu", residual=data[seed][1])
                if not torch.allclose(y, wanted[seed], atol=1e-5, rtol=1e-5):
                    failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.filterwarnings("ignore:The AccumulateGrad")  # the gradients' stream is that of the warm-up
@pytest.mark.parametrize("joined", [False, True])
def test_a_captured_step(torch, ours, device, calls, joined):
    if device == "cpu":
        pytest.skip("the CPU has no graphs")
    x, z, dy = drawn(torch, device, torch.float16)
    module = norm_of(torch, ours, device)
    leaves = [x.requires_grad_(), z.requires_grad_()][: 1 + joined]

    def step():
        y = module(x, **({"activation": "relu", "residual": z} if joined else {}))
        y.backward(dy)
        return y

    def found(y):
        return [t.detach().clone() for t in (y, *(leaf.grad for leaf in leaves), *module.buffers())]

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    x.grad = z.grad = None
    graph, state = torch.cuda.CUDAGraph(), copy.deepcopy(module.state_dict())
    with torch.cuda.graph(graph):
        y = step()
    with torch.no_grad():
        x.mul_(3).add_(1)
    module.load_state_dict(state)
    graph.replay()
    replayed = found(y)
    x.grad = z.grad = None
    module.load_state_dict(state)
    for one, other in zip(replayed, found(step()), strict=True):
        assert torch.equal(one, other)


def test_refusals_and_fallback_are_those_of_the_batch_norm_alone(torch, ours, device):
    import pybnorm

    x, z, dy = drawn(torch, device, torch.float32)
    module = norm_of(torch, ours, device)
    with pytest.raises(pybnorm.ArgumentError, match="more than one value per channel"):
        module(x[:1, :, :1, :1], activation="relu")
    module.momentum = 1.5
    with pytest.raises(pybnorm.ArgumentError, match=r"^momentum: got 1\.5"):
        module(x, activation="relu", residual=z)
    module.fallback = True
    wanted, near = right(torch, module, x, z, dy)
    for got, expected in zip(seen(module, x, z, torch.where(near, 0, dy)), wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    module.fallback, module.momentum, module.weight.data = False, 0.1, module.weight.half()
    with torch.no_grad(), pytest.raises(pybnorm.ArgumentError, match=r"^weight: got dtype f16"):
        module.eval()(x, activation="relu")
