"""What records, traces, compiles or wraps a model sees its batch norms, cold and warm, or is refused by a sentence."""

import contextlib
import copy
import io
import pickle
import types
import zipfile
from pathlib import Path

import pytest
from test_compositions import NAMES

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ["installed", "converted", "fused"]


def net(torch):
    torch.manual_seed(3)
    nn = torch.nn
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))
    with torch.no_grad():
        made[1].running_mean.fill_(0.25), made[4].running_var.fill_(2.0)
    return made


@contextlib.contextmanager
def made(torch, ours, kind, training, warm):
    """A network of one kind, PyTorch's own beside it, and x; warm: the first calls have been made."""
    plain = net(torch).train(training)
    model = copy.deepcopy(plain)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    with ours.install() if kind == "installed" else contextlib.nullcontext():
        if kind != "installed":
            ours.convert(model, fuse=kind == "fused")
        for _ in range(2 * warm):
            model(x), plain(x)
        yield types.SimpleNamespace(plain=plain, model=model, x=x)


@pytest.fixture(params=[False, True], ids=["cold", "warm"])
def warm(request):
    return request.param


def same(torch, got, wanted):
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


RUNS = {
    "jit.trace": lambda torch, m, x: torch.jit.trace(m, x, check_trace=False)(x),
    "make_fx": lambda torch, m, x: fx(torch).make_fx(m)(x)(x),
    "make_fx fake": lambda torch, m, x: fx(torch).make_fx(m, tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x),
    "make_fx symbolic": lambda torch, m, x: fx(torch).make_fx(m, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        x
    )(x),
    "compile eager": lambda torch, m, x: torch.compile(m, backend="eager", fullgraph=True)(x),
    "compile aot_eager": lambda torch, m, x: torch.compile(m, backend="aot_eager", fullgraph=True)(x),
    "export": lambda torch, m, x: torch.export.export(m, (x,)).module()(x),
    "functional_call": lambda torch, m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    "checkpoint": lambda torch, m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False),
    "deepcopy": lambda torch, m, x: copy.deepcopy(m)(x),
    "pickle": lambda torch, m, x: pickle.loads(pickle.dumps(m))(x),
    "inference_mode": lambda torch, m, x: torch.inference_mode()(m)(x).clone(),
}


def test_the_page_has_each_row():
    page = Path(__file__).parents[2] / "docs/exporting.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside the tests")
    text = page.read_text(encoding="utf-8")
    assert [name for name in (*RUNS, *NAMES) if name not in text] == []


def fx(torch):
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUNS)
def test_the_result_is_pytorchs(torch, ours, name, kind, training, warm):
    if training and name in ("jit.trace", "export", "make_fx", "make_fx fake", "make_fx symbolic"):
        pytest.skip(f"{name}: of a model in training is not what anybody deploys")
    if name == "pickle" and kind == "fused":
        pytest.skip("fused: a rewritten forward is not pickled; unconvert first")
    with made(torch, ours, kind, training, warm) as m:
        got = RUNS[name](torch, m.model, m.x)
        if name.startswith("compile"):
            torch._dynamo.reset()
        same(torch, got.detach(), m.plain(m.x).detach())
    if training and name in ("functional_call", "checkpoint", "compile aot_eager"):
        for mine, theirs in zip(m.model.buffers(), m.plain.buffers(), strict=True):
            same(torch, mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dispatch_mode_sees_each_batch_norm(torch, ours, kind, warm):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with made(torch, ours, kind, False, warm) as m, torch.no_grad(), Log():
        m.model(m.x)
    assert sum("batch_norm" in name for name in seen) == 2


def test_functionalize_has_no_rule_for_functions_of_autograd(torch, ours):
    with made(torch, ours, "installed", False, False) as m:
        same(torch, torch.func.functionalize(m.model)(m.x), m.plain(m.x))
    with pytest.raises(RuntimeError, match="Functionalize"):
        torch.func.functionalize(ours.convert(net(torch)))(m.x)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_and_meta_tensors(torch, ours, kind, warm):
    from torch._subclasses import FakeTensorMode

    with made(torch, ours, kind, True, warm) as m:
        wanted = m.model(m.x).shape
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert m.model(mode.from_tensor(m.x)).shape == wanted
        assert m.model.to("meta")(m.x.to("meta")).shape == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_down_has_pytorchs_batch_norm(torch, ours, kind):
    """So that it runs where there is no pybnorm."""
    with made(torch, ours, kind, False, False) as m:
        exported = str(torch.export.export(m.model, (m.x,)).graph)
        torch.jit.save(torch.jit.trace(m.model, m.x), file := io.BytesIO())
        wanted = m.plain(m.x)
    with zipfile.ZipFile(file) as archive:
        traced = "".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".py"))
    for text in (exported, traced):
        assert ("ops.pybnorm" in text, "batch_norm" in text) == (False, True)
    file.seek(0)
    same(torch, torch.jit.load(file)(m.x).detach(), wanted.detach())


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_has_pytorchs_batch_norm(torch, ours, kind, dynamo):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    if dynamo:
        pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    with made(torch, ours, kind, False, False) as m:
        file = io.BytesIO()
        if dynamo:
            torch.onnx.export(m.model, (m.x,), dynamo=True).save(file)
        else:
            torch.onnx.export(m.model, (m.x,), file, dynamo=False)
    written = onnx.load_from_string(file.getvalue())
    assert {node.domain for node in written.graph.node} <= {""}  # nothing of ours


@pytest.mark.parametrize("kind", ["converted", "fused"])
@pytest.mark.parametrize("name", ["jit.script", "symbolic_trace"])
def test_what_reads_the_source_gets_pytorchs_modules(torch, ours, kind, name):
    with made(torch, ours, kind, False, False) as m:
        read = {"jit.script": torch.jit.script, "symbolic_trace": torch.fx.symbolic_trace}[name]
        with pytest.raises(Exception, match="unconvert"):
            read(m.model)
        same(torch, read(ours.unconvert(m.model))(m.x), m.plain(m.x))


def test_unconvert_gives_pytorchs_modules(torch, ours):
    plain = net(torch)
    model = ours.unconvert(ours.convert(copy.deepcopy(plain), fuse=True))
    assert [type(part) for part in model.modules()] == [type(part) for part in plain.modules()]
    assert all(
        vars(part).keys() == vars(other).keys() for part, other in zip(model.modules(), plain.modules(), strict=True)
    )
    with pytest.raises(pybnorm.ArgumentTypeError):
        ours.unconvert(3)
    synchronized = ours.convert(torch.nn.SyncBatchNorm(3))
    synchronized.__dict__["_joined"] = {}
    assert "_joined" not in vars(ours.unconvert(synchronized))  # nothing of the ranks
