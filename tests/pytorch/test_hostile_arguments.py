"""Calls that PyTorch refuses, or takes and we refuse: each is decided, and nothing is written by a refused one."""

import functools
import re

import pytest

import pybnorm

KINDS = {  # of a vector: what the error says of it, and how it is made
    "meta": (r"a tensor on meta, allowed: .*cpu, as input", lambda torch: torch.ones(3, device="meta")),
    "matrix": (r"shape \(1, 3\), allowed: shape \(C,\)", lambda torch: torch.ones(1, 3)),
    "column": (r"shape \(3, 1\), allowed: shape \(C,\)", lambda torch: torch.ones(3, 1)),
    "integer": ("torch.int64, allowed: .*floating-point", lambda torch: torch.ones(3, dtype=torch.int64)),
    "bool": ("torch.bool, allowed: .*floating-point", lambda torch: torch.ones(3, dtype=torch.bool)),
    "complex": ("torch.complex64, allowed: .*floating-point", lambda torch: torch.ones(3, dtype=torch.complex64)),
    "sparse": ("torch.sparse_coo, allowed: torch.strided", lambda torch: torch.ones(3).to_sparse()),
    "expanded": ("elements that share memory", lambda torch: torch.ones(1).expand(3)),
    "negated": ("lazily negated", lambda torch: torch._neg_view(-torch.ones(3))),
}
ROADS = {
    "function": None,
    "module": lambda torch: pybnorm.torch.BatchNorm1d(3),
    "sync": lambda torch: pybnorm.torch.SyncBatchNorm(3),
    "fused": lambda torch: pybnorm.torch.convert(
        torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU()), fuse=True
    ),
}
both = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
roads = pytest.mark.parametrize("road", ROADS)


def vectors(torch):
    zeros, ones = (lambda: torch.zeros(3)), (lambda: torch.ones(3))
    return {"running_mean": zeros(), "running_var": ones(), "weight": ones(), "bias": zeros()}


def refused(torch, road, x, tensors, training, match):
    """The call is an error, and no other running statistic is written."""
    before = {name: (t, t.tolist()) for name, t in tensors.items() if t.device.type == "cpu" and not t.is_sparse}
    if road == "function":
        call = functools.partial(pybnorm.torch.batch_norm, x, *tensors.values(), training)
    else:
        made = ROADS[road](torch)
        norm = made[0] if isinstance(made, torch.nn.Sequential) else made
        for name in ("weight", "bias"):
            del norm._parameters[name]
        for name, value in tensors.items():
            setattr(norm, name, value)
        call = functools.partial(made.train(training), x)
    with pytest.raises(pybnorm.ArgumentError, match=match), torch.no_grad():  # fused evaluation is one call only there
        call()
    assert all(t.tolist() == values for t, values in before.values())


@both
@roads
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_is_refused_by_name_and_nothing_is_written(torch, kind, road, training):
    for name in vectors(torch):
        if kind in ("expanded", "negated") and not (training and name.startswith("running")):
            continue  # read only: taken, or refused where memory is read
        message, make = KINDS[kind]
        x = torch.arange(24.0).view(4, 3, 2)
        refused(torch, road, x, vectors(torch) | {name: make(torch)}, training, f"^{name}: .*{message}")


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of what it means to change
@both
@roads
def test_inputs_of_other_kinds_are_refused_on_every_road(torch, road, training):
    """PyTorch has an "Internal error" for nested ones, and asks to be told; it computes with those of mkldnn."""
    inputs = {
        "a nested tensor.*to_padded_tensor": torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(3, 2)]),
        "torch.sparse_coo": torch.ones(4, 3, 2).to_sparse(),
        "torch.sparse_csr": torch.ones(4, 3).to_sparse_csr(),
        "torch.int64": torch.ones(4, 3, 2, dtype=torch.int64),
        "complex": torch.ones(4, 3, 2, dtype=torch.complex64),
        "quint8": torch.quantize_per_tensor(torch.ones(4, 3, 2), 0.1, 0, torch.quint8),
    }
    if torch.backends.mkldnn.is_available():
        inputs["torch._mkldnn"] = torch.ones(4, 3, 2).to_mkldnn()
    if road == "function":  # modules look at the rank before
        inputs |= {r"got .*shape \(\)": torch.tensor(1.0), r"got .*shape \(3,\)": torch.ones(3)}
    for text, x in inputs.items():
        refused(torch, road, x, vectors(torch), training, f"^input: .*({text})")


@both
def test_numbers_out_of_range_are_refused_and_epsilon_may_be_0(torch, training):
    """PyTorch takes a momentum of any value and an eps that is not finite, and refuses an eps of 0 in training."""
    x = torch.randn(4, 3, 2)

    def call(**numbers):
        return pybnorm.torch.batch_norm(x, torch.zeros(3), torch.ones(3), training=training, **numbers)

    for name, value in [("eps", v) for v in (-1e-5, float("nan"), float("inf"), 1e39, True, None)] + [
        ("momentum", v) for v in (-0.1, 1.5, float("nan"), True, None)
    ]:
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: got {re.escape(repr(value))}"):
            call(**{name: value})
    mean, variance = (x.mean((0, 2)), x.var((0, 2), unbiased=False)) if training else (torch.zeros(3), torch.ones(3))
    expected = (x - mean[:, None]) / variance[:, None].sqrt()
    torch.testing.assert_close(call(eps=0.0), expected)


def test_running_statistics_are_two_and_of_one_memory_each(torch):
    usual = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
    for name in usual:
        shared = usual | {name: torch.ones(1).expand(2)}
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: .*elements that share memory"):
            pybnorm.torch.batch_norm(torch.ones(4, 2), **shared, training=True)
        with pytest.raises(pybnorm.ArgumentError, match=r"^running_(var|mean): got .?None"):
            pybnorm.torch.batch_norm(torch.randn(4, 2), **usual | {name: None}, training=True)
    one = [made(1).as_strided((1,), (0,)) for made in (torch.zeros, torch.ones)]
    pybnorm.torch.batch_norm(torch.arange(4.0).view(4, 1), *one, training=True)


def test_no_channels_are_no_error(torch):
    for shape in [(4, 0), (4, 0, 2, 2)]:
        assert pybnorm.torch.batch_norm(torch.ones(shape), None, None, training=True).shape == shape


def test_a_module_of_another_precision_is_named(torch, ours):
    for module, x in (
        (ours.BatchNorm2d(2), torch.ones(2, 2, 3, 3).double()),
        (ours.BatchNorm2d(2).double(), torch.ones(2, 2, 3, 3)),
    ):
        text = r"running_mean: .*the precision of input, torch\.float\d\d"
        with pytest.raises(pybnorm.ArgumentTypeError, match=text):
            module(x)
        module.to(x.dtype)(x)


@both
def test_a_residual_that_is_not_plain_is_pytorchs_to_add_or_refuse(torch, training):
    class Summed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.relu = torch.nn.BatchNorm1d(3), torch.nn.ReLU()

        def forward(self, x, residual):
            return self.relu(self.norm(x) + residual)

    x, residual = torch.randn(4, 3, 2), torch.ones(4, 3, 2).to_sparse()
    fused, plain = pybnorm.torch.convert(Summed().train(training), fuse=True), Summed().train(training)
    with torch.no_grad():
        for given in (residual, residual.to_dense()):
            torch.testing.assert_close(fused(x, given), plain(x, residual))
        with pytest.raises(RuntimeError, match="device"):
            fused(x, residual.to_dense().to("meta"))


def test_an_average_of_batches_without_statistics_is_the_batch_alone(torch):
    x, made = torch.randn(4, 3), []
    for kind in (torch.nn.BatchNorm1d, pybnorm.torch.BatchNorm1d):
        module = kind(3, momentum=None)
        module.running_mean = module.running_var = None
        made.append(module(x))
        assert module.num_batches_tracked == 1
    torch.testing.assert_close(*made)
