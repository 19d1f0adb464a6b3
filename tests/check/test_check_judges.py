"""A case judged by arrays of another namespace: the same data, verdicts and bounds as by NumPy."""

import math
import os

import numpy as np
import pytest
from simulated import Kernels, array_of
from tables import spread, table

from pybnorm import devices
from pybnorm.check.judging.bounds import Status, expect, tiers, untrusted
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language import data
from pybnorm.check.language.problem import COMPOSED, DATA_OUTPUTS, Problem
from pybnorm.check.run import judge_devices as judges
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session
from pybnorm.errors import ArgumentError, ArgumentTypeError, LibraryNotFoundError
from pybnorm.reference import namespaces
from pybnorm.reference.namespaces import Foreign

LINES = [
    "train,spatial,f32,nchw,4x8x7x16,fill=exact",
    "train,peract,bf16,nchw,300x3x7,fill=randn",
    "backward,spatial,f16,nhwc,3x8x15x17,fill=exact",
    "backward,spatial,f32,nhwc,16x8x8x9,fill=ramp,beta=0.5",
    "train,spatial,f32,nchw,16x8x8x8,fill=paired",
    "infer,spatial,f64,nchw,3x8x26x16,fill=sparse",
    "backward,peract,bf16,nchw,16x8x8x8,fill=sqrteps,beta=1,saved=0",
    "train,spatial,f32,nchw,4x8x5x16,fill=range",
    "train,spatial,f16,nchw,4x8x5x16,fill=special",
    "infer,spatial,f32,nchw,4x8x5x16,fill=special",
    "backward,spatial,f16,nchw,4x8x5x16,fill=image",
    "train,spatial,f16,nchw,4x8x5x16,fill=constant",
    "train,spatial,f16,strides=5280x600x90x3,4x8x5x16,fill=level",
    "train,spatial,f32,nchw,16x6x5x7,fill=randn,activation=relu,residual=1",
    "infer,peract,f32,nchw,16x6x5x7,fill=randn,activation=clamp,low=-1,high=0.25,beta=0.5",
    "backward,spatial,f32,nchw,16x6x5x7,fill=randn,activation=relu,alpha=2",
    "backward,spatial,f16,nhwc,16x6x5x7,fill=exact,activation=relu,residual=1",
    "backward,spatial,f32,nchw,16x6x5x7,fill=ramp,activation=clamp,saved=0",
    "infer,spatial,bf16,nchw,8x6x5x7,fill=randn,inverse=1,alpha=2,beta=0.5",
    "frozen,spatial,f32,nchw,8x6x5x7,fill=randn,beta=0.5,alpha_param=-0.5",
    "training_grad,peract,f16,nhwc,8x6x5x7,fill=exact",
    "backward_reduce,spatial,f64,nchw,8x6x5x7,fill=ramp,sign=negative",
    "backward_elemt,spatial,bf16,nchw,8x6x5x7,fill=randn,beta=0.5",
    "elemt,spatial,f32,nhwc,8x6x5x7,fill=special,seed=2",
    "gather_stats,spatial,f32,nchw,4x33,fill=randn",
    "gather_stats,spatial,f64,nchw,9x6,fill=exact,running=0",
    "sync_train,spatial,f32,nchw,8x6x5x7,fill=randn,ranks=4",
    "sync_backward,spatial,bf16,nhwc,8x6x5x7,fill=exact,ranks=2",
]


@pytest.fixture(params=["numpy", "torch", "cupy"])
def space(request, need_package, monkeypatch):
    """A namespace, with blocks of a few elements."""
    need_package(request.param)
    found = namespaces.namespace(request.param)
    if request.param == "cupy" and found.on_cpu:
        pytest.skip("CuPy finds no GPU")
    monkeypatch.setattr(namespaces, "BLOCK", 1 << 11)
    return found


def right_outputs(expected, wrong=""):
    """What a perfect kernel writes, or one that is `wrong` in y or dx."""
    problem, outputs = expected.problem, {}
    for name in expected.outputs:
        values = np.empty(expected.shape(name))
        for part in expected.parts(name, None, tiers(problem, name)[:1]):
            values[part.index] = part.reference
        data_sized = name in DATA_OUTPUTS
        if data_sized or not set(DATA_OUTPUTS) & set(expected.outputs):
            values.flat[{"": slice(0), "last": -1, "many": slice(None, None, 7)}[wrong]] += 0.01
        dtype = problem.dtype if data_sized else problem.parameter_dtype
        with np.errstate(invalid="ignore"):
            outputs[name] = data.round_to(values, dtype)
    return outputs


def bits(array):
    host = np.ascontiguousarray(array)
    return host.view(f"u{host.itemsize}")


@table("line", LINES)
def test_data_are_the_same_bits(line, space):
    problem = Problem.parse(line)
    own = data.generate(problem).arrays()
    made = data.generate(problem, space).arrays()
    assert isinstance(made["x"], Foreign)
    for name, array in own.items():
        there = np.asarray(made[name])
        assert there.dtype == array.dtype
        assert (bits(there) == bits(array)).all(), name


@table(("line", "wrong"), spread(LINES, ["last", "many"]))
def test_verdicts_are_the_same(line, wrong, space):
    problem = Problem.parse(line)
    inputs, there = data.generate(problem), data.generate(problem, space)
    outputs = right_outputs(expect(problem, inputs), wrong)
    placed = {name: space.of(a) if name in DATA_OUTPUTS else a for name, a in outputs.items()}
    own, other = judge_call(expect(problem, inputs), outputs), judge_call(expect(problem, there), placed)
    if wrong == "many":
        assert Status.FAIL in {v.status for v in own.values()}
    for name, verdict in own.items():
        for field in ("status", "tier", "over", "undecided", "unjudged", "identical", "elements", "note"):
            assert getattr(verdict, field) == getattr(other[name], field), (name, field)
        assert other[name].ratio == pytest.approx(verdict.ratio, rel=1e-6, abs=1e-9)
        assert other[name].noticed == pytest.approx(verdict.noticed, rel=1e-6)
        assert [p.index for p in other[name].worst[:1]] == [p.index for p in verdict.worst[:1]] or wrong != "last"
    assert untrusted(problem, there) == untrusted(problem, inputs)


@table("line", [line for line in LINES if "special" not in line])
def test_no_array_of_the_data_comes_to_the_cpu(line, space, monkeypatch):
    problem = Problem.parse(line)
    outputs = right_outputs(expect(problem, data.generate(problem)))
    there = data.generate(problem, space)
    placed = {name: space.of(a) if name in DATA_OUTPUTS else a for name, a in outputs.items()}
    fetched, get = [], type(space).get

    def recorded(self, raw, dtype):
        fetched.append(math.prod(raw.shape))
        return get(self, raw, dtype)

    monkeypatch.setattr(namespaces, "BLOCK", 1 << 30)
    monkeypatch.setattr(type(space), "get", recorded)
    judge_call(expect(problem, there), placed)
    assert fetched
    assert max(fetched) < math.prod(problem.dims)


@pytest.mark.parametrize("word", ["train", "backward", *COMPOSED])
def test_a_file_is_judged_there(word, space, tmp_path):
    dims = "4x33" if word == "gather_stats" else "8x6x5x7"
    problem = Problem.parse(f"{word},spatial,f32,nchw,{dims},fill=randn")
    made, file = data.generate(problem), tmp_path / "report.npz"
    given = {name: getattr(made, row[0]) for name, row in data.names(problem).items() if row[3]}
    np.savez(file, **given)
    problem = Problem.parse(f"{problem},data={file}".replace("fill=randn", "fill=file"))
    own, there = data.generate(problem).arrays(), data.generate(problem, space)
    assert isinstance(there.x, Foreign)
    for name, array in own.items():
        assert (bits(np.asarray(there.arrays()[name])) == bits(array)).all(), name
    outputs = right_outputs(expect(problem, data.generate(problem)))
    placed = {name: space.of(a) if name in DATA_OUTPUTS else a for name, a in outputs.items()}
    verdicts = judge_call(expect(problem, there), placed)
    assert {verdict.status for verdict in verdicts.values()} == {Status.PASS}


# ---------------------------------------------------------------- a case


@table(
    "line",
    [
        "train,spatial,f32,nchw,8x3x4x4,repeats=3",
        "backward,spatial,bf16,nhwc,8x3x4x4,fill=randn,misalign=1",
        "infer,spatial,f16,strides=300x90x18x3,2x3x4x5,fill=randn",
        "train,spatial,f32,nchw,8x6x5x7,fill=randn,activation=relu,residual=1",
        "backward,spatial,bf16,nhwc,8x6x5x7,fill=randn,activation=relu",
        "infer,spatial,f32,nchw,8x6x5x7,fill=randn,inverse=1,beta=0.5",
        "frozen,spatial,f32,nchw,8x6x5x7,fill=special,seed=1",
        "training_grad,spatial,bf16,nchw,8x6x5x7,fill=exact",
        "backward_reduce,spatial,f32,nchw,8x6x5x7,sign=negative",
        "backward_elemt,spatial,f32,nhwc,8x6x5x7,fill=randn",
        "gather_stats,spatial,f32,nchw,9x6,fill=constant",
        "sync_backward,spatial,f32,nchw,8x6x5x7,fill=randn,ranks=3",
    ],
)
def test_a_librarys_case_is_judged_there(line, space, need_device, monkeypatch):
    need_device("onednn")
    if not space.on_cpu:
        pytest.skip("oneDNN computes on the CPU")
    monkeypatch.setattr(judges, "chosen", lambda problem, device: space)
    opened = open_session("onednn")
    with opened.handle:
        result = run_case(Problem.parse(line), opened)
    assert (result.status, result.message, result.judge) == (Status.PASS, "", space.name)


def behind(buffer):
    return buffer._replace(pointer=buffer.pointer + 8 * 3 * 16 * 4, dims=(1,), strides=(1,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: array_of(behind(y)).fill(1), "wrote outside of y"),
        (lambda x, y: array_of(x).__setitem__((0, 0, 0, 0), 7), "changed its input x"),
        (lambda x, y: array_of(y).__setitem__((7, 2, 3, 3), 7), ""),
    ],
)
def test_damage_is_seen_there(function, message, space, need_device, monkeypatch):
    need_device("onednn")  # simulated kernels are called as oneDNN's, whose version has known defects
    if not space.on_cpu:
        pytest.skip("simulated kernels compute on the CPU")
    monkeypatch.setattr(judges, "chosen", lambda problem, device: space)

    class Wrong(Kernels):
        def forward_training(self, x, scale, bias, y, **options):
            super().forward_training(x, scale, bias, y, **options)
            function(x, y)

    result = run_case(SMALL, Session("onednn", Wrong(), devices.device_for(1)))
    assert (result.status, result.message) == (Status.FAIL, message)


# ---------------------------------------------------------------- which


class Gpu:
    device_type, device_id = 2, 0


CPU = devices.device_for(1)
SMALL, LARGE = (Problem.parse(f"train,spatial,f32,nchw,{dims}") for dims in ("8x3x4x4", "64x64x32x32"))


@pytest.fixture
def libraries(monkeypatch):
    """CuPy and PyTorch, each there with a GPU, without one, or absent."""

    def have(**found):
        class Library:
            def __init__(self, name, on_cpu):
                self.name, self.on_cpu = name, on_cpu

        def namespace(name, device_id=0):
            if name not in found:
                raise LibraryNotFoundError("absent", backend=name)
            return Library(name, not found[name])

        monkeypatch.setattr(namespaces, "namespace", namespace)

    monkeypatch.delenv(judges.VARIABLE, raising=False)
    return have


def name_of(problem, device):
    found = judges.chosen(problem, device)
    return "numpy" if found is None else found.name


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"cupy": True, "torch": True}, "cupy"),
        ({"torch": True}, "torch"),
        ({"cupy": False, "torch": True}, "torch"),
        ({"cupy": False, "torch": False}, "numpy"),
        ({}, "numpy"),
    ],
)
def test_a_gpu_judges_a_large_case_by_what_there_is(found, name, libraries):
    libraries(**found)
    assert [name_of(*asked) for asked in ((LARGE, Gpu), (LARGE, CPU), (SMALL, Gpu))] == [name, "numpy", "numpy"]


def test_the_variable_names_it(libraries, monkeypatch):
    libraries(cupy=True, torch=True)
    for word in namespaces.NAMES:
        monkeypatch.setenv(judges.VARIABLE, word)
        assert {name_of(problem, Gpu) for problem in (SMALL, LARGE)} == {word}
    monkeypatch.setenv(judges.VARIABLE, "jax")
    with pytest.raises(ArgumentError, match=r"numpy \| cupy \| torch"):
        judges.chosen(LARGE, Gpu)
    libraries()
    monkeypatch.setenv(judges.VARIABLE, "torch")
    with pytest.raises(LibraryNotFoundError):
        judges.chosen(LARGE, Gpu)


def test_what_only_numpy_can_judge_is_said(libraries, monkeypatch):
    libraries(cupy=True, torch=True)
    line = "train,spatial,f32,nchw,64x64x32x32"
    activated, fenced = (Problem.parse(f"{line},{option}") for option in ("activation=relu", "fence=end"))
    assert (name_of(activated, Gpu), name_of(fenced, Gpu)) == ("cupy", "numpy")

    def result(line, judge):
        return CaseResult("onednn", line, Status.PASS, judge=judge)

    fences = [result(f"{line},fence={end}", "numpy") for end in ("start", "end")]
    judged = [result(line, "torch"), *fences, result(line, "")]
    assert judges.instead(judged) == []
    monkeypatch.setenv(judges.VARIABLE, "torch")
    assert judges.instead(judged) == ["2 cases judged by numpy, not torch: memory between fences is pages of the CPU"]
    assert judges.instead([result(line, "numpy")]) == [
        "1 case judged by numpy, not torch: torch has no arrays where the library computes"
    ]


@pytest.mark.slow
def test_the_option_names_it_for_the_run_and_not_after(need_device, monkeypatch, tmp_path):
    import json

    from click.testing import CliRunner

    from pybnorm.cli.check import check

    need_device("onednn")
    monkeypatch.delenv(judges.VARIABLE, raising=False)
    file = tmp_path / "run.json"
    case = ["--case", "train,spatial,f32,nchw,8x3x4x4", "--backend", "onednn", "--json", str(file)]
    assert CliRunner().invoke(check, [*case, "--judge", "numpy"]).exit_code == 0
    document = json.loads(file.read_text())
    assert document["cases"][0]["judge"] == "numpy"
    assert document["environment"]["variables"][judges.VARIABLE] == "numpy"
    assert judges.VARIABLE not in os.environ
    assert CliRunner().invoke(check, [*case, "--judge", "jax"]).exit_code == 2


@pytest.mark.parametrize("judge", [1, "cupy", np.zeros(2)])
def test_data_are_made_by_a_namespace_only(judge):
    with pytest.raises(ArgumentTypeError, match="judge"):
        data.generate(LARGE, judge)
