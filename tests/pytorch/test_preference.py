"""``prefer="fastest"``: what a table says PyTorch computes faster is PyTorch's, bit for bit, and nothing else is."""

import logging

import numpy as np
import pytest

import pybnorm
from pybnorm import functional


@pytest.fixture
def table(torch, ours, device, monkeypatch):
    """Sets boxes for this device and these versions, or another of the three."""
    from pybnorm.torch import faster, preference

    version = torch.backends.cudnn.version() if device == "cuda" and not torch.version.hip else None
    cudnn = "" if version is None else f"{version // 10000}.{version // 100 % 100}"
    here = torch.cuda.get_device_name() if device == "cuda" else "cpu", torch.__version__.rpartition(".")[0], cudnn

    def put(*boxes, **other):
        name, *found = (other.get(name, value) for name, value in zip(("device", "torch", "cudnn"), here, strict=True))
        monkeypatch.setattr(faster, "MEASURED", ((("a device", name), *found, boxes),))
        preference._boxes.cache_clear()
        functional._local.ready.clear()

    yield put
    preference._boxes.cache_clear()
    functional._local.ready.clear()


def box(
    operation, layout="first", dtypes=("float32",), n=(4, 4), c=(8, 8), s=(36, 36), megabytes=(0.0, 1.0), whole=None
):
    return operation, dtypes, layout, n, c, s, megabytes, whole


ALL = [box(operation) for operation in ("training", "inference", "backward")]


@pytest.fixture
def kinds(torch, monkeypatch):
    """Which calls were left to PyTorch."""
    from pybnorm.torch import preference

    seen, real = [], preference.own
    monkeypatch.setattr(preference, "own", lambda *given: _seen(seen, given[0], real(*given)))
    return seen


def _seen(seen, operation, call):
    if call is not None:
        seen.append(operation)
    return call


def made(torch, device, *shape):
    rng = np.random.default_rng(4)
    x, dy = (torch.tensor(rng.normal(1, 2, shape), dtype=torch.float32, device=device) for _ in range(2))
    weight, bias = (torch.tensor(rng.normal(size=shape[1]), dtype=torch.float32, device=device) for _ in range(2))
    return x, dy, weight, bias


def run(call, x, dy, weight, bias, **how):
    """A step of training and an evaluation."""
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    mean, variance = weight.detach() * 0, weight.detach() * 0 + 1
    y = call(x, mean, variance, weight, bias, True, **how)
    y.backward(dy)
    evaluated = call(x.detach(), mean, variance, weight.detach(), bias.detach(), False, **how)
    return [y.detach(), x.grad, weight.grad, bias.grad, mean, variance, evaluated]


def test_a_call_in_the_table_is_pytorchs(torch, ours, device, table, kinds, caplog):
    given = made(torch, device, 4, 8, 6, 6)
    right = run(torch.nn.functional.batch_norm, *given)
    table(*ALL)
    free = run(ours.batch_norm, *given)
    assert kinds == []
    with caplog.at_level(logging.INFO, "pybnorm.torch"):
        found = run(ours.batch_norm, *given, prefer="fastest")
    assert kinds == ["training", "backward", "inference"]
    assert len(caplog.records) == 3
    assert "measured faster on" in caplog.text
    for own, mine, other in zip(right, found, free, strict=True):
        assert torch.equal(own, mine)
        assert torch.allclose(own, other, atol=1e-4)


def test_each_operation_has_its_own_boxes(torch, ours, device, table, kinds):
    given = made(torch, device, 4, 8, 6, 6)
    right = run(torch.nn.functional.batch_norm, *given)
    for operation in ("training", "backward"):
        table(box(operation))
        del kinds[:]
        found = run(ours.batch_norm, *given, prefer="fastest")
        assert kinds == [operation]
        assert all(torch.allclose(own, mine, atol=1e-4) for own, mine in zip(right, found, strict=True))


@pytest.mark.parametrize(
    "changed",
    [{"n": (5, 9)}, {"n": (1, 3)}, {"c": (1, 7)}, {"s": (37, 99)}, {"megabytes": (1.0, 9.0)}, {"layout": "last"},
     {"dtypes": ("float16", "bfloat16")}, {"whole": False}],
)  # fmt: skip
def test_what_a_box_does_not_hold_is_ours(torch, ours, device, table, kinds, changed):
    table(box("training", **changed))
    run(ours.batch_norm, *made(torch, device, 4, 8, 6, 6), prefer="fastest")
    assert kinds == []


@pytest.mark.parametrize("other", [{"device": "another"}, {"torch": "1.0"}, {"cudnn": "1.0"}])
def test_another_device_or_version_has_no_table(torch, ours, device, table, kinds, other):
    table(*ALL, **other)
    run(ours.batch_norm, *made(torch, device, 4, 8, 6, 6), prefer="fastest")
    assert kinds == []


def test_channels_last(torch, ours, device, table, kinds):
    x, dy, weight, bias = made(torch, device, 4, 8, 6, 6)
    given = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    table(*(box(operation, "last", whole=True) for operation in ("training", "inference", "backward")))
    found = run(ours.batch_norm, *given, weight, bias, prefer="fastest")
    assert kinds == ["training", "backward", "inference"]
    right = run(torch.nn.functional.batch_norm, *given, weight, bias)
    assert all(torch.equal(own, mine) for own, mine in zip(right, found, strict=True))


def test_memory_with_gaps_is_no_channels_last(torch, ours, device, table, kinds):
    x, _, weight, bias = made(torch, device, 4, 8, 6, 6)
    wide = torch.cat((x, x), 3)[..., ::2]
    flat = x.reshape(4, 8, 36).transpose(1, 2).contiguous().transpose(1, 2)  # of rank 3 PyTorch knows none
    table(box("training", "last"), box("training", "first", s=(1, 1)))
    functional.batch_norm_training(flat, weight, bias, prefer="fastest")
    functional.batch_norm_training(wide, weight, bias, prefer="fastest")
    assert kinds == []


def test_modules_and_convert(torch, ours, device, table, kinds):
    x = made(torch, device, 4, 8, 6, 6)[0]
    table(*ALL)
    model = ours.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(8)).to(device), prefer="fastest")
    model(x).square().sum().backward()
    model.eval()(x)
    assert kinds == ["training", "backward", "inference"]
    assert ours.convert(model)[0].prefer is None
    with pytest.raises(pybnorm.ArgumentError, match="prefer"):
        ours.convert(model, prefer="fast")


def test_functional(torch, ours, device, table, kinds):
    x, dy, weight, bias = made(torch, device, 4, 8, 6, 6)
    table(*ALL)
    own = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, True)
    found = functional.batch_norm_training(x, weight, bias, prefer="fastest")
    assert all(torch.equal(one, other) for one, other in zip(found, own, strict=False))
    assert functional.batch_norm_training(x, weight, bias, saved=False, prefer="fastest")[1:] == (None, None)
    functional.batch_norm_backward(x, dy, None, *found[1:], prefer="fastest")
    leaf = weight.clone().requires_grad_()
    assert not functional.batch_norm_inference(x, leaf, bias, bias, weight.abs(), prefer="fastest").requires_grad
    assert kinds == ["training", "training", "backward", "inference"]
    del kinds[:]
    functional.batch_norm_training(x, weight, bias, prefer="fastest", deterministic=True)
    functional.batch_norm_training(x, weight, bias, prefer="fastest", out=(torch.empty_like(x), None, None))
    functional.batch_norm_backward(x, dy, weight, prefer="fastest")
    assert kinds == []
    ones = np.ones(3, np.float32)
    assert functional.batch_norm_training(np.ones((2, 3), np.float32), ones, ones, prefer="fastest")[0].shape == (2, 3)


@pytest.mark.parametrize("wrong", ["fast", True, 1])
def test_other_values_are_refused(torch, ours, device, wrong):
    x, dy, weight, bias = made(torch, device, 4, 8, 6, 6)
    for call in (
        lambda: ours.batch_norm(x, None, None, training=True, prefer=wrong),
        lambda: functional.batch_norm_training(x, weight, bias, prefer=wrong),
        lambda: functional.batch_norm_inference(x, weight, bias, bias, weight, prefer=wrong),
        lambda: functional.batch_norm_backward(x, dy, weight, prefer=wrong),
        lambda: ours.reason("training", x, prefer=wrong),
    ):
        with pytest.raises(pybnorm.ArgumentError, match="prefer"):
            call()


def test_the_reason(torch, ours, device, table):
    x = made(torch, device, 4, 8, 6, 6)[0]
    table(box("training"))
    assert ours.reason("training", x, prefer="fastest").startswith("PyTorch's own kernel: measured faster on")
    for operation, prefer in (("training", None), ("inference", "fastest"), ("backward", None)):
        assert "PyTorch" not in ours.reason(operation, x, prefer=prefer)
    with pytest.raises(pybnorm.ArgumentError, match="operation"):
        ours.reason("train", x)


def test_the_table_that_is_shipped_has_its_form(ours):
    from pybnorm.torch import faster

    for devices, version, cudnn, boxes in faster.MEASURED:
        assert all(isinstance(word, str) for word in (*devices, version, cudnn))
        assert isinstance(devices, tuple)
        for operation, dtypes, layout, *bounds, whole in boxes:
            assert whole in (None, True, False)
            assert operation in {"training", "inference", "backward"}
            assert set(dtypes) <= {"float32", "float16", "bfloat16"}
            assert layout in {"first", "last"}
            assert [low <= high for low, high in bounds] == [True] * 4
