"""``prefer``: what a table or a measurement says PyTorch computes faster is PyTorch's, bit for bit, and no more."""

import gc
import logging
import threading
import time
import types
import weakref

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
    for operation, eps in (("training", 2e-5), ("backward", 3e-5)):  # autograd's thread remembers what it called
        table(box(operation))
        del kinds[:]
        right = run(torch.nn.functional.batch_norm, *given, eps=eps)
        found = run(ours.batch_norm, *given, eps=eps, prefer="fastest")
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
    assert ours.convert(model, prefer="measured")[0].prefer == "measured"
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


def test_arrays_that_are_not_pytorchs_have_no_preference(load_library):
    load_library("onednn")
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


# ---------------------------------------------------------------- measured


@pytest.fixture
def clock(torch, ours, device, monkeypatch):
    """Sets what is measured: PyTorch's time and ours. Its list has the calls that were to be timed."""
    from pybnorm.torch import measured

    if torch.version.hip:
        pytest.skip("nothing is left to PyTorch on ROCm")
    works = []

    def put(theirs, own=10e-6):
        def timed(given, *how):
            works.append(given)
            time.sleep(0.02)  # others try meanwhile
            for (call,) in given:
                call()
            return [types.SimpleNamespace(seconds=seconds) for seconds in (theirs, own)]

        monkeypatch.setattr(measured, "best_in_turn", timed)
        return works

    measured._found.clear()
    functional._local.ready.clear()
    yield put
    measured._found.clear()
    functional._local.ready.clear()


@pytest.mark.parametrize(("theirs", "left"), [(9.6e-6, True), (9.8e-6, False), (2e-5, False)])
def test_measured_takes_the_faster(torch, ours, device, clock, kinds, caplog, theirs, left):
    works, given = clock(theirs), made(torch, device, 4, 8, 6, 6)
    asked = {"eps": theirs}  # a key of its own: autograd's thread remembers what it called
    right, free = run(torch.nn.functional.batch_norm, *given, **asked), run(ours.batch_norm, *given, **asked)
    assert works == []
    with caplog.at_level(logging.INFO, "pybnorm.torch"):
        found = run(ours.batch_norm, *given, **asked, prefer="measured")
    assert len(works) == len(caplog.records) == 3
    assert kinds == ["training", "backward", "inference"] * left
    for expected, mine in zip(right if left else free, found, strict=True):
        assert torch.equal(expected, mine) if left else torch.allclose(expected, mine, atol=1e-6)
    run(ours.batch_norm, *given, **asked, prefer="measured")
    assert len(works) == 3
    for operation in ("training", "backward", "inference"):
        text = ours.reason(operation, given[0], prefer="measured")
        assert text.startswith("PyTorch's own kernel: measured here") == left
        assert f"{theirs * 1e6:.1f} us against 10.0 us" in text if left else "10.0 us against" in text
        assert f"PyTorch {torch.__version__.rpartition('.')[0]}" in text


def test_measuring_writes_nothing_of_the_callers(torch, ours, device, clock, kinds):
    """Each running statistic is updated once; what was is gone when the call returns."""
    works = clock(1e-6)
    x, dy, weight, bias = made(torch, device, 4, 8, 6, 6)
    mean, variance = weight * 0, weight * 0 + 1
    arrays = x, dy, weight, bias, mean, variance
    kept = [array.clone() for array in arrays]
    functional.batch_norm_inference(x, weight, bias, mean, variance, prefer="measured")
    functional.batch_norm_backward(x, dy, weight, mean, variance, prefer="measured")
    functional.batch_norm_training(x, weight, bias, prefer="measured")
    assert all(torch.equal(one, other) for one, other in zip(arrays, kept, strict=True))
    functional.batch_norm_training(x, weight, bias, mean, variance, prefer="measured")
    scratch = [weakref.ref(array) for (call,) in works[3] for array in call.args[3:5]]
    assert len(works) == 4
    assert all(ref() is not mean and ref() is not variance for ref in scratch)
    del works[:]
    gc.collect()
    assert [ref() for ref in scratch] == [None] * 4
    torch.nn.functional.batch_norm(x, *kept[4:], weight, bias, True)
    assert torch.equal(mean, kept[4])
    assert torch.equal(variance, kept[5])


def test_measured_with_the_real_clock(torch, ours, device):
    from pybnorm.torch import measured

    measured._found.clear()
    given = made(torch, device, 4, 8, 6, 6)
    found = run(ours.batch_norm, *given, prefer="measured")
    for one, other in zip(run(torch.nn.functional.batch_norm, *given), found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert ("measured here, " in ours.reason("training", given[0], prefer="measured")) == (not torch.version.hip)


def test_each_kind_is_measured_once(torch, ours, device, clock):
    works = clock(1e-6)
    x, _, weight, bias = made(torch, device, 4, 8, 6, 6)
    call = functional.batch_norm_training

    def count(*arrays, **options):
        before = len(works)
        call(*arrays, prefer="measured", **options)
        return len(works) - before

    assert count(x, weight, bias) == 1
    assert count(x, weight, bias, exponential_average_factor=0.3) == 0
    assert count(x, weight, bias, epsilon=1e-3) == 1
    assert count(x, weight, bias, weight * 0, weight * 0 + 1) == 1
    assert count(x, weight, None) == 1
    assert count(x[:2], weight, bias) == 1
    before = len(works)
    threads = [threading.Thread(target=count, args=(x[:3], weight, bias)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(works) == before + 1


def test_what_is_measured_is_bounded(torch, ours, device, clock, monkeypatch):
    from pybnorm.torch import measured

    clock(1e-6)
    monkeypatch.setattr(measured, "MOST_KINDS", 2)
    x, _, weight, bias = made(torch, device, 4, 8, 6, 6)
    for rows in (1, 2, 3, 4):
        functional.batch_norm_training(x[:rows], weight, bias, prefer="measured")
    assert len(measured._found) == 2
    assert "not measured yet" in ours.reason("training", x[:1], prefer="measured")
    assert "PyTorch's own" in ours.reason("training", x, prefer="measured")


def test_measured_and_repeating_bits(torch, ours, device, clock, kinds):
    works, given = clock(1e-6), made(torch, device, 4, 8, 6, 6)
    run(ours.batch_norm, *given, prefer="measured", deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        run(ours.batch_norm, *given, prefer="measured")
        assert "measured" not in ours.reason("training", given[0], prefer="measured")
    finally:
        torch.use_deterministic_algorithms(False)
    assert (works, kinds) == ([], [])


def test_measured_leaves_no_wrong_results_to_pytorch(torch, ours, device, clock, kinds, monkeypatch):
    """Other dtypes of results, an error, and memory whose results would be in another layout."""
    from pybnorm.torch import measured, preference

    clock(1e-6)
    x, _, weight, bias = made(torch, device, 4, 8, 6, 6)
    flat = x.reshape(4, 8, 36).transpose(1, 2).contiguous().transpose(1, 2)
    functional.batch_norm_training(flat, weight, bias, prefer="measured")
    functional.batch_norm_inference(x, weight.reshape(1, 8, 1, 1), bias, bias, weight.abs(), prefer="measured")
    if device == "cpu":
        half = x[:1].bfloat16()
        assert functional.batch_norm_training(half, None, None, prefer="measured")[1].dtype == torch.float32
        assert "other dtypes" in ours.reason("training", half, prefer="measured")
    monkeypatch.setitem(preference._CALLS, "training", lambda **options: _fails)
    y = functional.batch_norm_training(x, weight, bias, prefer="measured")[0]
    assert torch.equal(y, functional.batch_norm_training(x, weight, bias)[0])
    assert "failed: no memory" in ours.reason("training", x, prefer="measured")
    last = x.contiguous(memory_format=torch.channels_last)
    if device == "cpu":
        functional.batch_norm_training(last, weight, bias, prefer="measured")
    else:
        functional.batch_norm_inference(last, weight, bias, bias, weight.abs(), prefer="measured")
    assert "known to err" in ours.reason("training" if device == "cpu" else "inference", last, prefer="measured")
    assert kinds == []
    assert not any(found.theirs for found in measured._found.values())


def _fails(*arrays):
    raise RuntimeError("no memory")


class OnCuda:
    """A tensor without memory that says it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


RIGHT = [
    ("training", "float32", (64, 8, 20, 20), "last", False, False),  # sums in chains; fixed point
    ("training", "float32", (1, 8, 8, 8), "last", True, True),
    ("training", "float32", (64, 8, 20, 20), "first", True, True),
    ("training", "float16", (64, 8, 20, 20), "last", False, True),
    ("training", "float16", (8, 8, 2, 2, 2), "last", False, False),
    ("training", "bfloat16", (64, 8, 20, 20), "last", False, True),
    ("training", "float32", (64, 8), "first", True, True),
    ("training", "float32", (65, 8), "first", False, True),
    ("training", "float16", (64, 8, 20, 20), "first", False, True),
    ("inference", "float32", (4, 8, 8, 8), "last", True, False),  # x * a + b
    ("inference", "float16", (4, 8, 8, 8), "last", True, True),
    ("inference", "bfloat16", (4, 8, 8, 8), "first", True, True),
    ("backward", "float32", (64, 8, 20, 20), "last", True, False),
    ("backward", "float32", (16, 8, 20, 20), "last", True, True),
    ("backward", "bfloat16", (64, 8, 40, 40), "last", False, True),
    ("backward", "bfloat16", (4, 8, 2, 2, 2), "last", False, False),
    ("backward", "bfloat16", (4, 8, 8, 8), "first", True, False),  # 16-bit sums
    ("backward", "float16", (4, 8, 8, 8), "first", True, True),
    ("backward", "float16", (4, 8), "first", True, False),
]


@pytest.mark.parametrize(("operation", "dtype", "shape", "layout", "cpu", "cuda"), RIGHT)
def test_pytorchs_kernels_that_err_are_not_taken(torch, ours, monkeypatch, operation, dtype, shape, layout, cpu, cuda):
    from pybnorm.torch import measured

    monkeypatch.setattr(torch.version, "hip", None)
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if layout == "last":
        tensor = tensor.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)])
    assert measured._right(operation, tensor, 16) == cpu
    assert measured._right(operation, OnCuda(tensor), 16) == cuda
    if (dtype, layout, cuda) == ("float16", "first", True):
        assert not measured._right(operation, OnCuda(tensor), 2)
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
        assert measured._right(operation, OnCuda(tensor), 16) == (operation != "backward")
    monkeypatch.setattr(torch.version, "hip", "6")
    assert not measured._right(operation, OnCuda(tensor), 16)


def test_nothing_is_measured_while_a_graph_is_captured(torch, ours, table, clock, monkeypatch):
    from pybnorm.torch import measured, preference

    works, x = clock(1e-6), OnCuda(torch.zeros(4, 8, 6, 6))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    vectors = dict.fromkeys(("scale", "bias", "running_mean", "running_variance"))
    options = {"epsilon": 1e-5, "exponential_average_factor": 0.1, "saved": True}

    def own():
        return preference.own("training", {"x": x, "y": None}, vectors, options, "measured", None)

    monkeypatch.setattr(preference, "chosen", lambda *given: None)
    assert own() is None
    monkeypatch.setattr(preference, "chosen", lambda *given: "the table")
    call, kept = own()
    assert callable(call)
    assert not kept
    assert (works, dict(measured._found)) == ([], {})


def test_a_captured_call_is_as_it_was_measured(torch, ours, device, clock):
    if device == "cpu":
        pytest.skip("a graph of a GPU")
    clock(1e-6)
    x, _, weight, bias = made(torch, device, 4, 8, 6, 6)
    right = functional.batch_norm_training(x, weight, bias, prefer="measured")[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = functional.batch_norm_training(x, weight, bias, prefer="measured")[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, right)
