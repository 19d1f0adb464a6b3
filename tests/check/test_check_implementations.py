"""Any Python object under the judge: what it may be, and what each way to be wrong is called."""

import doctest
import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

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
from pybnorm.cli import main
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


def test_in_place_is_one_memory():
    assert run("InPlace", LINE + ",inplace=1").status == Status.PASS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (LINE + ",alpha=2", "kernels's forward_training does not take alpha"),
        ("train,peract,f32,nchw,8x3x4x4", "kernels's forward_training does not take mode='peract'"),
        (LINE + ",running=0", "kernels's forward_training needs running_mean, which this case has not"),
        (LINE + ",algorithm=fast", "kernels's forward_training does not take algorithm='fast'"),
        ("backward,spatial,f32,nchw,8x3x4x4", "kernels has no backward"),
        (LINE + ",inplace=1", "kernels's forward_training does not take the array of its result, to write it in place"),
        (LINE + ",repeats=2,streams=2", "streams=2: a CPU has no streams"),
    ],
)
def test_a_method_gets_the_cases_that_its_signature_says_it_can_do(line, reason):
    result = run("Right", line)
    assert (result.status, result.message) == (Status.UNSUPPORTED, reason)


# ---------------------------------------------------------------- each way to be wrong


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Right", ""),
        ("Planned", "running_variance wrong in a call after it of another shape: train,spatial,f32,nchw,2x3x5x5"),
        ("OfThread", "running_variance wrong in a call beside it on a second thread: train,spatial,f32,nchw,2x3x5x5"),
        ("Overlapping", "y that a call returned changed in calls of another shape and thread"),
    ],
)
def test_a_call_of_another_shape_and_thread_leaves_all_as_it_was(name, text):
    result = run(name)
    assert result.status == (Status.FAIL if text else Status.PASS)
    assert text in result.message
    again = run(name, LINE + ",seed=3")  # it was asked; the same line alone, in another process, is FAIL again
    assert (again.status, again.message) == (Status.PASS, "")


def test_two_threads_in_one_implementation_are_wrong_where_they_share_memory():
    result = run("Shared")
    assert result.status == Status.FAIL
    assert any("in call 2 of 2 equal ones" in v.note for v in result.verdicts), result


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("Shape", Status.FAIL, "y has the shape 8x3x3x4, not 8x3x4x4"),
        ("Dtype", Status.FAIL, "saved_mean is of dtype float64, not float32"),
        ("Text", Status.FAIL, "y is of type str, not an array"),
        ("Name", Status.FAIL, f"forward_training returned 'variance', allowed: {ALL.replace(', ', ' | ')}"),
        ("Two", Status.FAIL, f"forward_training returned 2 arrays without names, not 5: {ALL}"),
        ("Nothing", Status.FAIL, "forward_training returned None, and does not take y, saved_mean, saved_inv_variance"),
        ("Less", Status.FAIL, "forward_training returned no saved_mean, and does not take saved_mean to write in"),
        ("Writes", Status.FAIL, "changed its input x"),
        ("SameBuffer", Status.FAIL, "forward_training returned y in the memory of y of the call before it"),
        ("Refuses", Status.UNSUPPORTED, "float32 is not built in"),
        ("Memory", Status.RESOURCE, "MemoryError: 2 GiB"),
    ],
)
def test_what_a_call_does_wrong_is_said(name, status, message):
    result = run(name)
    assert result.status == status
    assert result.message.startswith(message)


def test_an_exception_has_its_own_status_and_says_where_it_was_raised():
    result = run("Raises")
    line = next(n for n, text in enumerate(KERNELS.read_text().splitlines(), 1) if "no such" in text)
    assert result.status == Status.RAISED
    assert result.message == f"ValueError: no such\nkernel (wrong_kernels.py:{line}, in results)"


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("Dropped", {"y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance"}),
        ("Biased", {"running_variance"}),
        ("Unwritten", {"y"}),
    ],
)
def test_a_wrong_number_is_a_fail_of_its_outputs(name, outputs):
    result = run(name)
    assert result.status == Status.FAIL
    assert {v.output for v in result.verdicts if v.status == Status.FAIL} == outputs


@pytest.mark.slow
def test_a_crash_costs_its_own_case():
    with Pool([Worker(spec("Right"), timeout=60)]) as pool:
        for name, status in (("Crashes", Status.CRASHED), ("Right", Status.PASS)):
            results = run_cases(pool, BackendInfo(spec(name)), [Problem.parse(LINE)])
            found = next(results)
            results.close()
            assert (found.status, found.message.endswith("SIGABRT")) == (status, name == "Crashes")


# ---------------------------------------------------------------- finding it


@pytest.mark.parametrize(
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
    assert reason in info.problem
    assert not info.id


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
def test_it_is_run_reported_kept_and_compared_as_a_library_is(tmp_path, capsys, monkeypatch):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("PYBNORM_REQUIRE", raising=False)  # which adds libraries to the report

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        return ended.value.code, capsys.readouterr().out

    name = spec("Right")
    common = ("check", "--executor", "process", "--implementation", name, "--case", f"{LINE},fill=exact/randn")
    reports = ("--json", tmp_path / "run.json", "--junit", tmp_path / "run.xml", "--html", tmp_path / "run.html")
    status, out = command(*common, *reports, "--save", tmp_path / "a")
    assert status == 0
    assert f"{name}: 2 cases, 2 PASS" in out
    document = json.loads((tmp_path / "run.json").read_text())
    (info,) = document["backends"]
    assert (info["label"], info["version"], info["found_via"]) == ("kernels", [1, 2], "--implementation")
    assert {case["library"] for case in document["cases"]} == {info["id"]}
    assert all(case["known"] == case["claim"] == "" and case["saved"] for case in document["cases"])
    assert document["cases"][0]["repro"].startswith(f"pybnorm check --implementation {name} --case ")
    assert 'tests="2"' in (tmp_path / "run.xml").read_text()
    assert "kernels" in (tmp_path / "run.html").read_text()
    assert command(*common, "--save", tmp_path / "b")[0] == 0
    status, out = command("compare", tmp_path / "a", tmp_path / "b")
    assert status == 0
    status, out = command(*common[:3], "--implementation", spec("Nowhere"), "--case", LINE)
    assert status == 2
    assert "Nothing that was asked for could run, so nothing was checked" in out
    status, out = command(*common[:3], "--implementation", spec("Nowhere"), *common[3:])
    assert status == 1
    assert f"{spec('Nowhere')} was asked for and could not run" in out
    assert command("check", "--implementation", "wrong_kernels")[0] == 2


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


@pytest.mark.parametrize(
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
    ("numpy_one_liner.py:OneLiner", "train/infer/backward,spatial/peract,f64/f32/f16/bf16,nhwc,4x3x5x5,fill=randn"),
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


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_is_short_and_says_how_to_run_it(file):
    text = file.read_text()
    assert file.stem in PACKAGES
    assert len(text.splitlines()) < 70
    assert f"pybnorm check --implementation {file.name}:" in text
