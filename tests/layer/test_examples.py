"""The examples for users of hipDNN, gocudnn, MIOpen, DirectML and CANN: one command each; a wrong result is said."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_here import run_here

import pybnorm
from pybnorm import cann, directml, graph, layer, miopen

EXAMPLES = Path(__file__).parents[2] / "examples"
DTYPES = {
    "gocudnn_layer": ("f32", "f16", "bf16"),
    "miopen_calls": ("f32", "f16", "bf16"),
    "directml_grad": ("f32", "f16"),
    "cann_reduce_backward": ("f32", "f16", "bf16"),
}
SAMPLES = {p.stem: p.read_text() for p in EXAMPLES.glob("*.py")}
GRAPHS = sorted(name for name, text in SAMPLES.items() if "import example\n" in text and "pybnorm.graph" in text)
DTYPES |= dict.fromkeys(GRAPHS, ("f32", "f16", "bf16"))
CASES = [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]
JUDGED = {"gocudnn_layer": 19, "miopen_calls": 19, "directml_grad": 4, "cann_reduce_backward": 6}
MISMATCH, ABSENT, REFUSED = 1, 2, 3


def run(name, *options, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip


def need_no_workspace(backend, name):
    if name == "miopen_calls" and backend in ("native_cuda", "native_rocm"):
        pytest.skip(f"{backend} takes a workspace, for which MIOpen's names have no place")


def test_every_example_is_tested():
    assert {name for name, text in SAMPLES.items() if "import example\n" in text} == set(DTYPES)
    assert {"batchnorm_training", "batchnorm_inference", "batchnorm_backward"} < set(GRAPHS)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_one_command(handle, name, dtype, layout, monkeypatch):
    avoids = handle.backend == "miopen" and name != "miopen_calls"
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", "avoid" if avoids else "ignore")
    need_no_workspace(handle.backend, name)
    start = run if (name, dtype, layout) == ("gocudnn_layer", "f32", "nchw") else run_here
    done = start(name, "--backend", handle.backend, "--dtype", dtype, "--layout", layout)
    if name in GRAPHS:
        assert done.returncode == 0, done.stdout + done.stderr
        assert all("  ok" in line for line in done.stdout.splitlines()[1:]), done.stdout
        assert len(done.stdout.splitlines()) >= 3
        return
    must = handle.backend != "miopen" or layout == "nchw"
    if done.returncode == REFUSED and not must:
        assert "refused: " in done.stdout
        return
    # MIOpen's kernels truncate bfloat16 y and dx, which is off by less than twice the bound; others avoid that.
    truncates = handle.backend == "miopen" and dtype == "bf16" and name == "miopen_calls"
    assert done.returncode == (MISMATCH if truncates else 0), done.stdout + done.stderr
    judged = [line.split() for line in done.stdout.splitlines() if "error / bound" in line]
    assert len(judged) == JUDGED[name]
    for output, _, _, _, _, _, _, ratio, word, *_ in judged:
        wrong = truncates and output in ("y", "dx")
        assert word == ("WRONG" if wrong else "ok"), done.stdout
        assert float(ratio) <= (2 if wrong else 1), done.stdout


@pytest.mark.parametrize("other", pybnorm.backends())
def test_a_state_moves_to_another_backend(handle, other):
    try:
        pybnorm.load(other)
    except pybnorm.LibraryError:
        pytest.skip(f"{other}: no such library here, of which test_an_absent_library_is_said")
    done = run_here("gocudnn_layer", "--backend", handle.backend, "--infer-backend", other)
    if done.returncode == ABSENT:
        with pytest.raises(pybnorm.NotInitializedError):
            pybnorm.Handle(other).close()
        assert other in done.stderr
        pytest.skip(f"{other}: no such device here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"restored on {other}" in done.stdout


def changed(index, value):
    return lambda args: [*args[:index], value, *args[index + 1 :]]


def swapped(i, j):
    def change(args):
        args = list(args)
        args[i], args[j] = args[j], args[i]
        return args

    return change


def halved_scale(args):
    """Half of the scale given to a graph as twice what it is."""
    made, handle, pack, *rest = args
    for record in made._records.values():
        for key in pack:
            if record.name == "scale" and (key if isinstance(key, int) else key.get_uid()) == record.uid:
                count = pack[key].dims[1] if len(pack[key].dims) > 1 else pack[key].dims[0]
                half = pack[key]._replace(dims=(1, count // 2), strides=(count, 1))
                handle.axpby(0.0, half, 2.0, half._replace(pointer=half.pointer + count // 2 * 4))
    return [made, handle, pack, *rest]


MISTAKES = [
    *[(name, graph.Graph, "execute", halved_scale, "") for name in GRAPHS],
    ("gocudnn_layer", layer.BatchNorm, "forward_training", swapped(2, 3), "saved_mean|y"),
    ("gocudnn_layer", layer.BatchNorm, "forward_inference", swapped(2, 3), "y"),
    ("gocudnn_layer", layer.BatchNorm, "backward", swapped(5, 6), "dscale"),
    ("miopen_calls", miopen, "batch_normalization_forward_training", changed(11, 0.75), "running_mean"),
    ("miopen_calls", miopen, "batch_normalization_forward_inference", changed(13, 0.1), "y"),
    ("miopen_calls", miopen, "batch_normalization_backward", swapped(17, 18), "dx"),
    ("directml_grad", directml, "batch_normalization", changed(9, "identity"), "y"),
    ("directml_grad", directml, "batch_normalization", swapped(3, 4), "y"),
    ("directml_grad", directml, "batch_normalization_grad", changed(9, 0.1), "dx"),
    ("cann_reduce_backward", cann, "batch_norm_stats_get_workspace_size", changed(2, 0.1), "saved_inv_variance"),
    ("cann_reduce_backward", cann, "batch_norm_reduce_backward_get_workspace_size", swapped(3, 4), "sum_dy_xmu"),
]


@pytest.mark.parametrize(
    ("name", "owner", "call", "mistake", "output"), MISTAKES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_wrong_call_is_a_mismatch(backend, handle, name, owner, call, mistake, output, monkeypatch, capsys):
    """The argument that is wrong is among what the example judges."""
    need_no_workspace(backend, name)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for stale in ("example", name):
        monkeypatch.delitem(sys.modules, stale, raising=False)
    example, program = __import__("example"), __import__(name)
    options = {"options_of": program.options_of} if hasattr(program, "options_of") else {}
    assert example.run(program.__doc__, program.main, ["--backend", backend], **options) == 0
    assert "WRONG" not in capsys.readouterr().out
    original = getattr(owner, call)
    monkeypatch.setattr(owner, call, lambda *args, **named: original(*mistake(args), **named))
    assert example.run(program.__doc__, program.main, ["--backend", backend], **options) == MISMATCH
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert set(wrong) & set(output.split("|")) or (wrong and name in GRAPHS)


@pytest.mark.parametrize(
    "options",
    [("batchnorm_training", "--backend", "onednn"),
     ("gocudnn_layer", "--backend", "native", "--infer-backend", "onednn")],
)  # fmt: skip
def test_an_absent_library_is_said(options):
    done = run(*options, PYBNORM_LIB_ONEDNN=str(EXAMPLES / "example.py"))
    assert done.returncode == ABSENT
    assert "PYBNORM_LIB_ONEDNN" in done.stderr


@pytest.mark.parametrize(("name", "dtype"), [("directml_grad", "bf16"), ("batchnorm_training", "f64")])
def test_the_command_line_names_what_is_allowed(name, dtype):
    done = run_here(name, "--dtype", dtype)
    assert done.returncode == 2
    assert "f32" in done.stderr
