"""Calls that PyTorch refuses, or takes and we refuse: each is decided, and nothing is written by a refused one."""

import re

import pytest

import pybnorm

MESSAGES = {  # what is wrong with the tensor of that name: in the error
    "meta": r"a tensor on meta, allowed: .*cpu, as input",
    "matrix": r"shape \(1, 3\), allowed: shape \(C,\)",
    "column": r"shape \(3, 1\), allowed: shape \(C,\)",
    "integer": "torch.int64, allowed: .*floating-point",
    "bool": "torch.bool, allowed: .*floating-point",
    "complex": "torch.complex64, allowed: .*floating-point",
    "sparse": "torch.sparse_coo, allowed: torch.strided",
    "expanded": "elements that share memory",
    "negated": "lazily negated",
}


def changed(torch, kind):
    return {
        "meta": lambda: torch.ones(3, device="meta"),
        "matrix": lambda: torch.ones(1, 3),
        "column": lambda: torch.ones(3, 1),
        "integer": lambda: torch.ones(3, dtype=torch.int64),
        "bool": lambda: torch.ones(3, dtype=torch.bool),
        "complex": lambda: torch.ones(3, dtype=torch.complex64),
        "sparse": lambda: torch.ones(3).to_sparse(),
        "expanded": lambda: torch.ones(1).expand(3),
        "negated": lambda: torch._neg_view(-torch.ones(3)),
    }[kind]()


def function(torch, x, tensors, training):
    return pybnorm.torch.batch_norm(x, *tensors.values(), training)


def module(torch, x, tensors, training, made=None):
    made = made or pybnorm.torch.BatchNorm1d(3)
    norm = made[0] if isinstance(made, torch.nn.Sequential) else made
    for name in ("weight", "bias"):
        del norm._parameters[name]
        setattr(norm, name, tensors[name])
    norm.running_mean, norm.running_var = tensors["running_mean"], tensors["running_var"]
    with torch.no_grad():  # fused evaluation is one call only there
        return made.train(training)(x)


def sync(torch, *arguments):
    return module(torch, *arguments, pybnorm.torch.SyncBatchNorm(3))


def fused(torch, *arguments):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    return module(torch, *arguments, pybnorm.torch.convert(model, fuse=True))


ROADS = {"function": function, "module": module, "sync": sync, "fused": fused}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", MESSAGES)
def test_each_tensor_is_refused_by_name_and_nothing_is_written(torch, kind, road, training):
    for name in ("running_mean", "running_var", "weight", "bias"):
        if kind in ("expanded", "negated") and not (training and name.startswith("running")):
            continue  # read only: taken, or refused where memory is read
        x = torch.arange(24.0).view(4, 3, 2)
        tensors = dict(
            running_mean=torch.zeros(3), running_var=torch.ones(3), weight=torch.ones(3), bias=torch.zeros(3)
        )
        tensors[name] = changed(torch, kind)
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: .*{MESSAGES[kind]}"):
            ROADS[road](torch, x, tensors, training)
        for other in {"running_mean": 0, "running_var": 1}.items() - {(name, 0), (name, 1)}:
            assert tensors[other[0]].tolist() == [other[1]] * 3, other


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_inputs_are_refused_by_name(torch, training):
    vectors = [torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)]
    inputs = {
        r"shape \(\)": torch.tensor(1.0),
        r"shape \(3,\)": torch.ones(3),
        "torch.sparse_coo": torch.ones(4, 3, 2).to_sparse(),
    }
    for text, x in inputs.items():
        with pytest.raises(pybnorm.ArgumentError, match=f"^input: got .*{text}"):
            pybnorm.torch.batch_norm(x, *vectors, training)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
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


def test_two_channels_that_share_memory_are_no_running_statistics(torch):
    for name in ("running_mean", "running_var"):
        statistics = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
        statistics[name] = torch.ones(1).expand(2)
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: .*elements that share memory"):
            pybnorm.torch.batch_norm(torch.ones(4, 2), **statistics, training=True)
    one = torch.zeros(1).expand(1), torch.ones(1).expand(1)
    pybnorm.torch.batch_norm(torch.arange(4.0).view(4, 1), *one, training=True)


def test_no_channels_are_no_error(torch):
    for shape in [(4, 0), (4, 0, 2, 2)]:
        assert pybnorm.torch.batch_norm(torch.ones(shape), None, None, training=True).shape == shape


def test_a_module_of_another_precision_is_named(torch, ours):
    for module, x in (
        (ours.BatchNorm2d(2), torch.ones(2, 2, 3, 3).double()),
        (ours.BatchNorm2d(2).double(), torch.ones(2, 2, 3, 3)),
    ):
        with pytest.raises(
            pybnorm.ArgumentTypeError, match=r"running_mean: .*the precision of input, torch\.float\d\d"
        ):
            module(x)
        module.to(x.dtype)(x)


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of what it means to change
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("road", ROADS)
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
    for text, x in inputs.items():
        tensors = dict(
            running_mean=torch.zeros(3), running_var=torch.ones(3), weight=torch.ones(3), bias=torch.zeros(3)
        )
        with pytest.raises(pybnorm.ArgumentError, match=f"^input: .*({text})"):
            ROADS[road](torch, x, tensors, training)
        assert tensors["running_mean"].tolist() == [0] * 3


class _Summed:
    """Made a module below: PyTorch is imported by a fixture."""

    def forward(self, x, residual):
        return self.relu(self.norm(x) + residual)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_sparse_residual_is_added_as_pytorch_adds_it(torch, training):
    def model():
        made = type("Summed", (_Summed, torch.nn.Module), {})()
        made.norm, made.relu = torch.nn.BatchNorm1d(3), torch.nn.ReLU()
        return made.train(training)

    x, residual = torch.randn(4, 3, 2), torch.ones(4, 3, 2).to_sparse()
    fused = pybnorm.torch.convert(model(), fuse=True)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, residual), model()(x, residual))
        torch.testing.assert_close(fused(x, residual.to_dense()), model()(x, residual))


def test_one_running_statistic_alone_is_refused(torch):
    for name in ("running_mean", "running_var"):
        statistics = {"running_mean": None, "running_var": None, name: torch.ones(3)}
        with pytest.raises(pybnorm.ArgumentError, match=r"^running_(var|mean): got .?None"):
            pybnorm.torch.batch_norm(torch.randn(4, 3), **statistics, training=True)


def test_an_average_of_batches_without_statistics_is_the_batch_alone(torch):
    x, made = torch.randn(4, 3), []
    for kind in (torch.nn.BatchNorm1d, pybnorm.torch.BatchNorm1d):
        module = kind(3, momentum=None)
        module.running_mean = module.running_var = None
        made.append(module(x))
        assert module.num_batches_tracked == 1
    torch.testing.assert_close(*made)


def test_a_residual_elsewhere_is_pytorchs_to_refuse(torch):
    model = type("Summed", (_Summed, torch.nn.Module), {})()
    model.norm, model.relu = torch.nn.BatchNorm1d(3), torch.nn.ReLU()
    with torch.no_grad(), pytest.raises(RuntimeError, match="device"):
        pybnorm.torch.convert(model.eval(), fuse=True)(torch.randn(4, 3, 2), torch.ones(4, 3, 2, device="meta"))


def test_unconvert_leaves_nothing_of_the_ranks(torch):
    module = pybnorm.torch.convert(torch.nn.SyncBatchNorm(3))
    module.__dict__["_joined"] = {}
    assert "_joined" not in vars(pybnorm.torch.unconvert(module))
