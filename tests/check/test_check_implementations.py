"""Any Python object under the judge: what it may be, and what each way to be wrong is called."""

import doctest
import itertools
import json
import sys
import textwrap
from pathlib import Path

import command_here
import numpy as np
import pytest
from tables import table

import pybnorm
import pybnorm.check
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo, cell_text
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import implementations
from pybnorm.check.run.executors import Pool, run_cases
from pybnorm.check.run.runner import run_case
from pybnorm.check.run.session import describe, open_session
from pybnorm.check.run.worker import Worker
from pybnorm.errors import ArgumentError

EXAMPLES = Path(__file__).parents[2] / "examples" / "implementations"
sys.path.append(str(EXAMPLES))
from numpy_one_liner import OneLiner  # noqa: E402

KERNELS = Path(__file__).with_name("wrong_kernels.py")
LINE = "train,spatial,f32,nchw,8x3x4x4"
SESSIONS = {}
ALL = "y, running_mean, running_variance, saved_mean, saved_inv_variance"


def spec(name):
    return f"{KERNELS}:{name}"


def run(name, line=LINE):
    if name not in SESSIONS:
        SESSIONS[name] = open_session(spec(name))
    return run_case(Problem.parse(line), SESSIONS[name])


# ---------------------------------------------------------------- what a method may take and return


@pytest.mark.parametrize("name", ["Right", "AsTuple", "Flat", "InPlace"])
@pytest.mark.parametrize("line", [LINE, "train,spatial,f32,nhwc,8x3x4x4,fill=randn", LINE + ",saved=0"])
def test_results_are_returned_by_name_or_in_order_or_written_in_place(name, line):
    result = run(name, line)
    if "saved=0" in line and name in ("AsTuple", "InPlace"):
        assert result.status == (Status.FAIL if name == "AsTuple" else Status.UNSUPPORTED)
    else:
        assert (result.status, result.message) == (Status.PASS, "")
        assert {v.output for v in result.verdicts} >= {"y", "running_mean", "running_variance"}
        assert all(v.noticed for v in result.verdicts if v.ratio) or "fill=randn" not in line


FAIL, UNSUPPORTED = Status.FAIL, Status.UNSUPPORTED
TAKES = "kernels's forward_training does not take "
RAISES = next(n for n, text in enumerate(KERNELS.read_text().splitlines(), 1) if "no such" in text)


@table(
    ("name", "line", "status", "told"),
    [
        ("InPlace", LINE + ",inplace=1", Status.PASS, ""),
        # a method gets the cases that its signature says it can do
        ("Right", LINE + ",alpha=2", UNSUPPORTED, TAKES + "alpha"),
        ("Right", "train,peract,f32,nchw,8x3x4x4", UNSUPPORTED, TAKES + "mode='peract'"),
        ("Right", LINE + ",running=0", UNSUPPORTED, "forward_training needs running_mean, which this case has not"),
        ("Right", LINE + ",algorithm=fast", UNSUPPORTED, TAKES + "algorithm='fast'"),
        ("Right", "backward,spatial,f32,nchw,8x3x4x4", UNSUPPORTED, "kernels has no backward"),
        ("Right", LINE + ",inplace=1", UNSUPPORTED, TAKES + "the array of its result, to write it in place"),
        ("Right", LINE + ",repeats=2,streams=2", UNSUPPORTED, "streams=2: a CPU has no streams"),
        # a call of another shape and thread leaves all as it was
        ("Right", LINE, Status.PASS, ""),
        (
            "Planned",
            LINE,
            FAIL,
            "running_variance wrong in a call after it of another shape: train,spatial,f32,nchw,2x3x5x5",
        ),
        ("Planned", LINE + ",seed=3", Status.PASS, ""),  # it was asked; alone, in another process, it is FAIL again
        (
            "OfThread",
            LINE,
            FAIL,
            "running_variance wrong in a call beside it on a second thread: train,spatial,f32,nchw,2x3x5x5",
        ),
        ("Overlapping", LINE, FAIL, "y that a call returned changed in calls of another shape and thread"),
        ("Shared", LINE, FAIL, "in call 2 of 2 equal ones"),
        # what a call does wrong
        ("Shape", LINE, FAIL, "y has the shape 8x3x3x4, not 8x3x4x4"),
        ("Dtype", LINE, FAIL, "saved_mean is of dtype float64, not float32"),
        ("Text", LINE, FAIL, "y is of type str, not an array"),
        ("Name", LINE, FAIL, f"forward_training returned 'variance', allowed: {ALL.replace(', ', ' | ')}"),
        ("Two", LINE, FAIL, f"forward_training returned 2 arrays without names, not 5: {ALL}"),
        ("Nothing", LINE, FAIL, "forward_training returned None, and does not take y, saved_mean, saved_inv_variance"),
        ("Less", LINE, FAIL, "forward_training returned no saved_mean, and does not take saved_mean to write in"),
        ("Writes", LINE, FAIL, "changed its input x"),
        ("SameBuffer", LINE, FAIL, "forward_training returned y in the memory of y of the call before it"),
        ("Refuses", LINE, UNSUPPORTED, "float32 is not built in"),
        ("Memory", LINE, Status.RESOURCE, "MemoryError: 2 GiB"),
        ("Raises", LINE, Status.RAISED, f"ValueError: no such\nkernel (wrong_kernels.py:{RAISES}, in results)"),
        # wrong numbers
        ("Dropped", LINE, FAIL, f"wrong: {ALL}."),
        ("Biased", LINE, FAIL, "wrong: running_variance."),
        ("Unwritten", LINE, FAIL, "wrong: y."),
    ],
)
def test_what_is_wrong_is_said(name, line, status, told):
    result = run(name, line)
    wrong = [name for name in ALL.split(", ") if name in {v.output for v in result.verdicts if v.status == FAIL}]
    text = f"{result.message}; {'; '.join(v.note for v in result.verdicts)}; wrong: {', '.join(wrong)}."
    assert result.status == status
    assert told in text
    assert told or result.message == ""


@pytest.mark.slow
def test_a_crash_costs_its_own_case():
    with Pool([Worker(spec("Right"), timeout=60)]) as pool:
        for name, status in (("Crashes", Status.CRASHED), ("Right", Status.PASS)):
            results = run_cases(pool, BackendInfo(spec(name)), [Problem.parse(LINE)])
            found = next(results)
            results.close()
            assert (found.status, found.message.endswith("SIGABRT")) == (status, name == "Crashes")


# ---------------------------------------------------------------- finding it


@table(
    ("name", "reason"),
    [
        ("Nowhere", "allowed: an object of wrong_kernels; it has Right, AsTuple, Flat, InPlace, Dropped"),
        ("Empty", "allowed: an object with a method forward_training or forward_inference or backward"),
        ("Device", "wrong_kernels.py:Device.device: got tpu (did you mean 'cpu'?), allowed: cpu | cuda"),
        ("Late", "OSError: no driver"),
    ],
)
def test_what_cannot_be_called_is_no_verdict(name, reason):
    info = describe(spec(name))
    assert (reason in info.problem, info.id) == (True, "")


def test_a_kernel_without_its_library_says_which(tmp_path, monkeypatch):
    monkeypatch.setenv("PYBNORM_LIB_MIOPEN", str(tmp_path / "none.so"))
    file = tmp_path / "needs.py"
    file.write_text("import pybnorm\nclass Needs:\n    def __init__(self): pybnorm.Handle('miopen')\n")
    assert "MIOpen" in describe(f"{file}:Needs").problem


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "found_here.py").write_text("from wrong_kernels import Right\nright = Right()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    info = describe("found_here:right")
    assert (info.label, info.version, info.path) == ("kernels", (1, 2), str(tmp_path / "found_here.py"))
    sys.modules.pop("found_here")
    for wrong in ("found_nowhere:right", "found_here.more:right", "found_here.py:left", ":right", "found_here:"):
        assert describe(wrong).problem.startswith("--implementation: got "), wrong


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_it_is_run_reported_kept_and_compared_as_a_library_is(tmp_path, plots):
    name, none = spec("Right"), spec("Nowhere")
    check = ("check", "--executor", "process")
    common = (*check, "--implementation", name, "--case", f"{LINE},fill=exact/randn")
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "junit", "html")}
    reports = itertools.chain.from_iterable((f"--{kind}", file) for kind, file in files.items())
    done = command_here.run(*common, *reports, "--save", tmp_path / "a")
    assert (done.returncode, f"{name}: 2 cases, 2 PASS" in done.stdout) == (0, True)
    document = json.loads(files["json"].read_text())
    (info,) = document["backends"]
    assert (info["label"], info["version"], info["found_via"]) == ("kernels", [1, 2], "--implementation")
    assert {case["library"] for case in document["cases"]} == {info["id"]}
    assert all(case["known"] == case["claim"] == "" and case["saved"] for case in document["cases"])
    assert document["cases"][0]["repro"].startswith(f"pybnorm check --implementation {name} --case ")
    assert 'tests="2"' in files["junit"].read_text()
    assert "kernels" in files["html"].read_text()
    for words, status, told in (
        ((*common, "--save", tmp_path / "b"), 0, ""),
        (("compare", tmp_path / "a", tmp_path / "b"), 0, ""),
        ((*check, "--implementation", none, "--case", LINE), 2, "Nothing that was asked for could run, so nothing was"),
        ((*common, "--implementation", none), 1, f"{none} was asked for and could not run"),
        (("check", "--implementation", "wrong_kernels"), 2, ""),
    ):
        done = command_here.run(*words)
        assert (done.returncode, told in done.stdout) == (status, True), done.stdout + done.stderr


# ---------------------------------------------------------------- the judge alone


def inference(given):
    return OneLiner().forward_inference(**{n: given[n] for n in given if n not in ("y", "alpha", "beta")})


@pytest.mark.parametrize("line", ["infer,spatial,f32,nchw,8x3x4x4,fill=randn", "infer,spatial,bf16,nhwc,8x3x4x4"])
def test_the_judge_says_of_arrays_what_it_says_of_a_run(line):
    given = pybnorm.check.arguments(line)
    kept = {name: np.copy(value).tobytes() for name, value in given.items()}
    y = inference(given)
    judged = pybnorm.check.judge(line, {"y": y})
    ran = run_case(Problem.parse(line), open_session(f"{EXAMPLES / 'numpy_one_liner.py'}:OneLiner"))
    assert (judged.status, judged.verdicts) == (ran.status, ran.verdicts)
    assert judged.status == Status.PASS
    assert repr(judged) == f"<CaseResult PASS {line}: y {cell_text(judged.verdicts[0])}>"
    assert repr(judged.verdicts[0]).startswith("<Verdict y: PASS, ")
    judged.verdicts[0].note = "<script>"
    assert "<td>y</td><td>PASS</td>" in judged._repr_html_()
    assert "&lt;script&gt;" in judged._repr_html_()
    y[-1, -1, -1, -1] += 1
    judged = pybnorm.check.judge(Problem.parse(line), {"y": y})
    assert judged.status == Status.FAIL
    assert judged.verdicts[0].worst[0].index == (7, 2, 3, 3)
    assert {name: np.copy(value).tobytes() for name, value in given.items()} == kept
    assert np.isnan(given["y"].astype(float)).all()
    assert given["x"].strides == given["y"].strides


def test_arguments_are_those_of_the_case():
    given = pybnorm.check.arguments("train,peract,f64,strides=200x40x9x2,3x4x4x4,inplace=1,running=0")
    assert list(given)[:6] == ["x", "scale", "bias", "y", "saved_mean", "saved_inv_variance"]
    assert given["x"] is given["y"]
    assert given["x"].strides == (1600, 320, 72, 16)
    assert given["mode"] == "peract"
    given = pybnorm.check.arguments("backward,spatial,f16,nchw,3x4x5x6,activation=relu")
    assert given["activation"] == "relu"
    assert given["scale"].dtype == np.float32


def test_a_case_that_could_not_have_failed_is_mistrusted():
    line = "infer,spatial,f32,nchw,4x3x4x4,eps=1e-09"
    result = pybnorm.check.judge(line, {"y": inference(pybnorm.check.arguments(line))})
    assert (result.status, result.message) == (Status.MISTRUSTED, "a change would not be noticed of: eps")


@table(
    ("outputs", "text"),
    [
        ({}, "outputs: got none named y, allowed: all of y"),
        ({"y": 0, "z": 1}, "outputs: got z, allowed: y, and no others"),
        (7, "outputs: got int, allowed: a dict of names and arrays"),
        ({"y": [1.0]}, "outputs['y']: got type list, allowed: float32, 2x3x4"),
        ({"y": np.zeros((2, 3, 4))}, "outputs['y']: got dtype float64, allowed: float32, 2x3x4"),
        ({"y": np.zeros((2, 12), "f4")}, "outputs['y']: got shape 2x12, allowed: float32, 2x3x4"),
    ],
)
def test_outputs_that_are_not_the_case_are_named(outputs, text):
    with pytest.raises(ArgumentError) as refused:
        pybnorm.check.judge("infer,spatial,f32,nchw,2x3x4", outputs)
    assert str(refused.value) == text


@pytest.mark.parametrize("name", ["arguments", "judge"])
def test_the_examples_of_the_documentation_run(name):
    found = doctest.DocTestFinder().find(
        getattr(pybnorm.check, name), globs={"pybnorm": pybnorm, "np": np, "__name__": "x"}
    )
    assert sum(len(test.examples) for test in found)
    for test in found:
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_example_of_the_protocol_runs(tmp_path):
    """The class in the module's documentation, as it stands there."""
    text = textwrap.dedent(implementations.__doc__.partition("::\n\n")[2].partition("\n\nThe four")[0])
    (tmp_path / "my_kernel.py").write_text("import numpy as np\n\n" + text)
    session = open_session(f"{tmp_path / 'my_kernel.py'}:OneLiner")
    assert run_case(Problem.parse("infer,spatial,f64,nhwc,2x3x4,fill=randn"), session).status == Status.PASS
    assert describe(session.backend).label == "my kernel"


# ---------------------------------------------------------------- the examples


PACKAGES = {"cupy_one_liner": "cupy", "jax_batch_norm": "jax", "numpy_one_liner": "numpy"} | {
    "onnxruntime_batch_norm": "onnxruntime",
    "torch_batch_norm": "torch",
    "torch_compiled": "torch",
    "triton_batch_norm": "triton",
}
ENTRIES = [
    ("numpy_one_liner.py:OneLiner", "train/infer/backward,spatial/peract,f32/bf16,nhwc,4x3x5x5,fill=randn"),
    ("torch_batch_norm.py:Native", "train/infer/backward,spatial,f64/f32/f16/bf16,nchw,4x3x5x5,fill=randn"),
    ("torch_compiled.py:Compiled", "train,spatial,f32,nchw,4x3x5x5,fill=randn,saved=0"),
    ("jax_batch_norm.py:Jax", "train/infer/backward,spatial,f64/f32/bf16,nchw,4x3x5x5,fill=randn"),
    ("jax_batch_norm.py:Standardize", "infer,spatial,f32,nchw,4x3x5x5,fill=randn"),
    ("onnxruntime_batch_norm.py:OnnxRuntime", "infer,spatial,f32,nchw,4x3x5x5,fill=randn"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize(("name", "line"), ENTRIES)
def test_an_example_that_is_right_passes(name, line):
    package = PACKAGES[name.partition(".")[0]]
    found = pytest.importorskip(package, reason="only where the package that it judges is installed")
    if "compiled" in name and not hasattr(found, "compile"):
        pytest.skip(f"PyTorch {found.__version__} has no torch.compile")
    session = open_session(f"{EXAMPLES}/{name}")
    results = [run_case(problem, session) for problem in expand(line)]
    assert {r.status for r in results} == {Status.PASS}, [(r.case, r.message) for r in results]


@table("file", sorted(EXAMPLES.glob("*.py")))
def test_an_example_is_short_and_says_how_to_run_it(file):
    text = file.read_text()
    assert file.stem in PACKAGES
    assert len(text.splitlines()) < 70
    assert f"pybnorm check --implementation {file.name}:" in text
