"""Every transform of torch.func and torch.autograd.functional, and pairs of them, against autograd of the formula in
float64. A cell is right, or it is an error; none is a wrong number."""

import unittest.mock

import pytest

import pybnorm

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*functorch:UserWarning"),
]
SHAPES = [(4, 2), (3, 2, 2), (2, 2, 1, 3)]


def formula(torch, x, weight, bias, mean=None, variance=None):
    """Batch norm by operations that PyTorch differentiates."""
    axes, shape = [a for a in range(x.dim()) if a != 1], [1, -1, *[1] * (x.dim() - 2)]
    if mean is None:
        mean, variance = x.mean(axes), x.var(axes, unbiased=False)
    y = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + 1e-5)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


class Case:
    """A batch norm of one kind, and the formula for it in float64."""

    def __init__(self, torch, ours, kind, training, parameters, dtype, number):
        torch.manual_seed(number)
        shape = SHAPES[number % len(SHAPES)]
        self.torch, self.kind = torch, kind
        self.x, self.u, self.v = (torch.randn(shape, dtype=dtype) for _ in range(3))
        weight, bias = (torch.randn(2, dtype=dtype) for _ in range(2))
        mean, variance = torch.randn(2, dtype=dtype), torch.rand(2, dtype=dtype) + 0.5
        if parameters == "none":
            weight = bias = None
        self.given = [None if t is None else t.double() for t in (weight, bias)]
        self.statistics = (None, None) if training else (mean.double(), variance.double())
        self.rectified = kind == "fused"
        if kind == "function":
            running = (None, None) if training else (mean, variance)
            self.call = lambda x: ours.batch_norm(x, *running, weight, bias, training)
            return
        family = torch.nn if kind in ("fused", "installed") else ours
        made = family.SyncBatchNorm if kind == "sync" else getattr(family, f"BatchNorm{max(1, len(shape) - 2)}d")
        module = made(2, affine=weight is not None, track_running_stats=not training, dtype=dtype).train(training)
        with torch.no_grad():
            if weight is not None:
                module.weight.copy_(weight), module.bias.copy_(bias)
                module.requires_grad_(parameters == "leaves")
            if not training:
                module.running_mean.copy_(mean), module.running_var.copy_(variance)
        self.call = ours.convert(torch.nn.Sequential(module, torch.nn.ReLU()), fuse=True) if kind == "fused" else module

    def loss(self, x):
        return (self.call(x).pow(3) * self.v).sum()

    def right(self, x):
        y = formula(self.torch, x, *self.given, *self.statistics)
        return ((y.relu() if self.rectified else y).pow(3) * self.v.double()).sum()


def transforms(torch):
    """By name: a value of a function of x, a direction u and a batch of both."""
    func, functional = torch.func, torch.autograd.functional

    def double_backward(f, x, u):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad((first * u).sum(), leaf)[0]

    def batched(f, x, u):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first, leaf, torch.stack([u, x]), is_grads_batched=True)[0]

    def third(f, x, u):
        second = func.grad(lambda t: (func.grad(f)(t) * u).sum())
        return func.grad(lambda t: second(t).pow(2).sum())(x)

    return {
        "grad": lambda f, x, u: func.grad(f)(x),
        "vjp": lambda f, x, u: func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
        "jacrev": lambda f, x, u: func.jacrev(f)(x),
        "vmap": lambda f, x, u: func.vmap(f)(torch.stack([x, u])),
        "vmap of grad": lambda f, x, u: func.vmap(func.grad(f))(torch.stack([x, u])),
        "grad of vmap": lambda f, x, u: func.grad(lambda t: func.vmap(f)(torch.stack([t, u])).sum())(x),
        "vjp of grad": lambda f, x, u: func.vjp(func.grad(f), x)[1](u)[0],
        "grad of grad": lambda f, x, u: func.grad(lambda t: (func.grad(f)(t) * u).sum())(x),
        "jacrev of grad": lambda f, x, u: func.jacrev(func.grad(f))(x),
        "jacrev of jacrev": lambda f, x, u: func.jacrev(func.jacrev(f))(x),
        "vmap of vjp of grad": lambda f, x, u: func.vmap(lambda d: func.vjp(func.grad(f), x)[1](d)[0])(
            torch.stack([u, x])
        ),
        "third": third,
        "double backward": double_backward,
        "batched backward": batched,
        "functional.vjp": lambda f, x, u: functional.vjp(f, x)[1],
        "functional.hessian": lambda f, x, u: functional.hessian(f, x),
        "functional.hessian vectorized": lambda f, x, u: functional.hessian(f, x, vectorize=True),
        "functional.jacobian vectorized": lambda f, x, u: functional.jacobian(f, x, vectorize=True),
        "functional.vhp": lambda f, x, u: functional.vhp(f, x, u)[1],
        "functional.hvp": lambda f, x, u: functional.hvp(f, x, u)[1],
        "functional.jvp": lambda f, x, u: functional.jvp(f, x, u)[1],
    }


NAMES = list(transforms(unittest.mock.Mock()))


@pytest.mark.parametrize("parameters", ["leaves", "constants", "none"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", ["function", "module", "sync", "fused", "installed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_transform_is_that_of_the_formula(torch, ours, name, kind, training, parameters):
    if kind == "function" and parameters == "leaves":
        pytest.skip("function: its parameters are given as constants")
    if kind == "installed" and name == "third" and training:
        pytest.skip(
            "installed: PyTorch's autograd of its own operator takes saved statistics as constants there, and errs"
        )
    number = NAMES.index(name)
    dtype = torch.float64 if number % 2 else torch.float32
    transform = transforms(torch)[name]
    case = Case(torch, ours, kind, training, parameters, dtype, number)
    if kind == "installed":
        with ours.install():
            got = transform(case.loss, case.x, case.u)
    else:
        got = transform(case.loss, case.x, case.u)
    wanted = transform(case.right, case.x.double(), case.u.double())
    got, wanted = got.detach(), wanted.detach()
    scale = float(wanted.abs().max()) + 1e-3
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    assert got.dtype == dtype
    assert float((got.double() - wanted).abs().max()) <= tolerance * scale


def test_forward_mode_is_an_error_or_pytorchs_where_it_is_installed(torch, ours):
    for kind in ("function", "module"):
        case = Case(torch, ours, kind, True, "constants", torch.float32, 1)
        for call in (
            lambda f, x, u: torch.func.jvp(f, (x,), (u,)),
            lambda f, x, u: torch.func.jacfwd(f)(x),
            lambda f, x, u: torch.func.linearize(f, x)[1](u),
        ):
            with pytest.raises((RuntimeError, NotImplementedError)):
                call(case.loss, case.x, case.u)
    case = Case(torch, ours, "installed", True, "constants", torch.float64, 1)
    with ours.install():
        got = torch.func.jvp(case.loss, (case.x,), (case.u,))[1]
    torch.testing.assert_close(got, torch.func.jvp(case.right, (case.x,), (case.u,))[1], atol=1e-9, rtol=1e-9)


def test_derivatives_by_weight_and_bias(torch, ours):
    """Of functional_call, mixed with x's."""
    case = Case(torch, ours, "module", True, "leaves", torch.float64, 2)
    parameters = {name: value.detach() for name, value in case.call.named_parameters()}

    def ours_of(parameters, x):
        return (torch.func.functional_call(case.call, parameters, (x,)).pow(3) * case.v).sum()

    def right_of(parameters, x):
        return (formula(torch, x, parameters["weight"], parameters["bias"]).pow(3) * case.v).sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1))(parameters, case.x),
        lambda f: torch.func.jacrev(torch.func.grad(f, 1))(parameters, case.x),
        lambda f: torch.func.vmap(torch.func.grad(f, 1), (None, 0))(parameters, torch.stack([case.x, case.u])),
        lambda f: torch.func.vmap(torch.func.grad(f), (0, None))(
            {name: torch.stack([value, value + 1]) for name, value in parameters.items()}, case.x
        ),
    ):
        torch.testing.assert_close(transform(ours_of), transform(right_of), atol=1e-9, rtol=1e-9)


def test_gradients_by_running_statistics(torch, ours):
    x, weight = torch.randn(4, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    mean, variance = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5

    def mine(mean, variance):
        return ours.batch_norm(x, mean, variance, weight, None, False).pow(3).sum()

    def right(mean, variance):
        return formula(torch, x, weight, None, mean, variance).pow(3).sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1))(mean, variance),
        lambda f: torch.func.grad(f, 1)(mean, variance),
        lambda f: torch.func.hessian(f, (0, 1))(mean, variance) if f is right else torch.func.jacrev(
            torch.func.jacrev(f, (0, 1)), (0, 1))(mean, variance),
        lambda f: torch.autograd.functional.hessian(f, (mean, variance)),
    ):  # fmt: skip
        torch.testing.assert_close(transform(mine), transform(right), atol=1e-9, rtol=1e-9)
    with pytest.raises(pybnorm.ArgumentError, match=r"running_mean.*detach"):
        ours.batch_norm(x, mean.requires_grad_(), variance, training=True)
    mean = mean.detach()

    def outer(f):
        return torch.func.grad(lambda m: torch.func.grad(lambda t: f(t, m).pow(3).sum())(x).sum())(mean)

    found = outer(lambda t, m: ours.batch_norm(t, m, variance))
    torch.testing.assert_close(found, outer(lambda t, m: formula(torch, t, None, None, m, variance)))

    def mapped(*given):
        return torch.vmap(lambda t, *statistics: ours.batch_norm(t, *statistics).pow(3).sum())(*given).sum()

    given = x.expand(3, 4, 2), mean.expand(3, 2), variance.expand(3, 2)
    for of in (1, 2):
        for call in (mapped, lambda *given: torch.func.grad(mapped)(*given).pow(2).sum()):
            with pytest.raises(pybnorm.ArgumentError, match=r"running_mean: got .* of an outer transform"):
                torch.func.grad(call, of)(*given)
