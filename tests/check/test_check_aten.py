"""Modules of kernels with the signatures of PyTorch's operators, under the judge."""

import types

import pytest

torch = pytest.importorskip("torch")

from pybnorm import devices  # noqa: E402
from pybnorm.check.judging.bounds import Status  # noqa: E402
from pybnorm.check.language.problem import Problem  # noqa: E402
from pybnorm.check.run import aten, implementations  # noqa: E402
from pybnorm.check.run.runner import run_case  # noqa: E402
from pybnorm.check.run.session import Session, open_session  # noqa: E402
from pybnorm.errors import ArgumentError  # noqa: E402

NATIVE, GRADIENT = torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward
SPATIAL = "spatial,f32,nchw,8x3x4x4,fill=randn"


def session_of(device="cpu", **functions):
    module = types.SimpleNamespace(device=device, **functions)
    found = implementations.Implementation("aten:here", aten.Kernels(module, "here"))
    return Session("aten:here", found, devices.device_for(found.memory_type))


def statuses(session, *words):
    return [run_case(Problem.parse(f"{word},{SPATIAL}"), session).status for word in words]


def reserved(forward):
    """A forward operator that gives its backward one a reserve space."""
    return lambda *given: (*forward(*given), "reserve")


def takes_reserve(backward):
    """A backward operator that is given that reserve space, last."""

    def call(*given):
        assert given[-1] == "reserve"
        return backward(*given[:-1])

    return call


def by_index(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled):
    assert cudnn_enabled is False
    return *NATIVE(x, weight, bias, mean, variance, training, momentum, eps), "reserve", 7


def by_index_backward(index, x, dy, weight, mean, variance, saved_mean, saved_inverse, train, eps, mask):
    assert index == 7
    return GRADIENT(dy, x, weight, mean, variance, saved_mean, saved_inverse, train, eps, mask)


def third_backward(x, dy, weight, mean, variance, saved_mean, saved_inverse, eps):
    return GRADIENT(dy, x, weight, mean, variance, saved_mean, saved_inverse, True, eps, [True] * 3)


def gems(x, weight=None, bias=None, mean=None, variance=None, training=False, momentum=0.1, eps=1e-05):
    return NATIVE(x, weight, bias, mean, variance, training, momentum, eps)


def with_update(training):
    return reserved(lambda *given: NATIVE(*given[:5], training, *given[5:]))


def functional(x, weight, bias, mean, variance, training, factor, eps):
    new = mean.clone(), variance.clone()
    return *NATIVE(x, weight, bias, *new, training, factor, eps), *new


FAMILIES = {
    "native": {"native_batch_norm": NATIVE, "native_batch_norm_backward": GRADIENT},
    "cudnn": {"cudnn_batch_norm": reserved(NATIVE), "cudnn_batch_norm_backward": takes_reserve(third_backward)},
    "miopen": {"miopen_batch_norm": NATIVE, "miopen_batch_norm_backward": third_backward},
    "index": {"_batch_norm_impl_index": by_index, "_batch_norm_impl_index_backward": takes_reserve(by_index_backward)},
    "update": {
        "_batch_norm_with_update": with_update(True),
        "_batch_norm_no_update": with_update(False),
        "batch_norm_backward": takes_reserve(GRADIENT),
    },
    "export": {"_native_batch_norm_legit_functional": functional, "native_batch_norm_backward": GRADIENT},
    "gems": {"batch_norm": gems, "batch_norm_backward": GRADIENT},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_operators_is_called_with_its_arguments(family):
    session = session_of(**FAMILIES[family])
    assert statuses(session, "train", "infer", "backward") == [Status.PASS] * 3
    assert statuses(session, "frozen") == [Status.PASS if family in ("native", "export") else Status.UNSUPPORTED]
    without = run_case(Problem.parse(f"train,{SPATIAL},running=0,saved=0"), session)
    assert without.status == (Status.UNSUPPORTED if family in ("update", "export") else Status.PASS)


def test_a_result_alone_is_judged_alone():
    def alone(x, weight, bias, mean, variance, training, momentum, eps):
        return NATIVE(x, weight, bias, mean, variance, training, momentum, eps)[0]

    session = session_of(batch_norm=alone, outputs=("y", "running_mean", "running_variance"))
    result = run_case(Problem.parse(f"train,{SPATIAL}"), session)
    assert (result.status, len(result.verdicts)) == (Status.PASS, 3)
    assert run_case(Problem.parse(f"train,{SPATIAL}"), session_of(batch_norm=alone)).status == Status.FAIL


def stats(x, eps):
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    return mean, (variance + eps).rsqrt()


def wide(vector):
    return vector[:, None, None]


def elemt(x, weight, bias, mean, inverse, eps):
    return wide(weight) * (x - wide(mean)) * wide(inverse) + wide(bias)


def reduce(dy, x, mean, inverse, weight, input_g, weight_g, bias_g):
    total, weighted = dy.sum((0, 2, 3)), (dy * (x - wide(mean))).sum((0, 2, 3))
    return total, weighted, weighted * inverse, total


def backward_elemt(dy, x, mean, inverse, weight, total, weighted, count):
    n = count.sum()
    slope = wide(weighted / n * inverse * inverse)
    return wide(weight * inverse) * (dy - wide(total / n) - (x - wide(mean)) * slope)


def test_the_operators_of_synchronized_batch_norm_are_judged():
    session = session_of(
        batch_norm_stats=stats,
        batch_norm_elemt=elemt,
        batch_norm_backward_reduce=reduce,
        batch_norm_backward_elemt=backward_elemt,
    )
    assert statuses(session, "elemt", "backward_reduce", "backward_elemt") == [Status.PASS] * 3
    assert run_case(Problem.parse(f"train,{SPATIAL},running=0"), session).status == Status.PASS
    assert statuses(session, "train", "infer", "backward") == [Status.UNSUPPORTED] * 3
    wrong = session_of(batch_norm_elemt=lambda *given: 1.01 * elemt(*given))
    assert statuses(wrong, "elemt") == [Status.FAIL]


def test_pytorchs_own_namespace_and_files_are_modules(tmp_path):
    session = open_session("aten:torch.ops.aten")
    if session.handle.device == "cpu":
        assert statuses(session, "train", "infer", "backward", "frozen") == [Status.PASS] * 4
    file = tmp_path / "kernels_here.py"
    file.write_text("import torch\ndevice = 'cpu'\nnative_batch_norm = torch.ops.aten.native_batch_norm\n")
    assert statuses(open_session(f"aten:{file}"), "train", "infer") == [Status.PASS] * 2
    assert statuses(open_session(f"aten:{file}"), "backward") == [Status.UNSUPPORTED]
    for spec in ("aten:", "aten:nowhere_at_all", f"aten:{tmp_path}/nowhere.py"):
        with pytest.raises(ArgumentError):
            open_session(spec)
