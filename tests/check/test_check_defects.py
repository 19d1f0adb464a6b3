"""Known defects: each entry's case still fails where its library can run, and explains no more than it should."""

import dataclasses
import importlib.util
import math
import re
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
from judged_calls import case, made
from random_problems import judged
from selftest_tool import rows
from tables import table

import pybnorm
from pybnorm._find import file_digest
from pybnorm.check.judging.bounds import Status, Verdict, expect
from pybnorm.check.judging.known_defects import STATUSES, explain, makes
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.executors import annotated
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.check.run.session import describe
from pybnorm.defects import DEFECTS, Call, Effect, named
from pybnorm.defects.kinds import BACKWARD

MIOPEN = (3, 4, 0)
ROOT = Path(__file__).parents[2]


def script(name):
    """A module of ci, whose name has a hyphen."""
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), ROOT / "ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE, SEEN = script("defects-page"), script("defects-seen")
CHAIN = "sums in chains of 1000 terms: up to 2 times the bound of blocked sums"


def verdict(output, status=Status.FAIL, ratio=100.0, note="", **more):
    more = {"finite_ratio": ratio} | more
    return Verdict(output, status, "B", ratio, {"A": ratio, "B": ratio}, elements=10, over=1, note=note, **more)


def ids(found):
    return [d.id for d in found]


@table("defect", DEFECTS)
def test_entries_are_complete(defect):
    assert defect.backend in pybnorm.backends()
    assert re.fullmatch(rf"{defect.backend}(-[a-z0-9]+)+", defect.id)
    assert defect.what.rstrip(".") == defect.what != ""
    assert defect.example
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", link) for link in defect.links)
    assert defect.effect in STATUSES
    assert defect.fixed is None or defect.first < defect.fixed
    tried = [run.version for d in DEFECTS if d.backend == defect.backend for run in d.seen]
    assert not defect.first or any(version < defect.first for version in tried), "older ones were not run"
    absent = (defect.cards and defect.read) or False in defect.builds.values()  # nobody here has the card, or the build
    assert defect.seen or (absent and defect.links)
    assert all(defect.in_version(run.version, run.build) for run in defect.seen)
    assert all(defect.in_version(version) for version in defect.read)
    problem = Problem.parse(defect.case)
    assert str(problem) == defect.case
    assert defect.predicate(problem)
    assert named(defect.id) is defect
    assert repr(defect) == f"<Defect {defect.id}: {defect.effect.value}>"
    assert all(0 < defect.largest(output) <= 1e10 for output in defect.outputs)
    assert defect.largest("no output") == 0


@table("defect", DEFECTS)
def test_each_run_that_showed_an_entry_is_in_its_file(defect):
    """Rows that ci/defects-seen.py wrote below the version and build; older files name the entry somewhere."""
    for run in defect.seen:
        text = (ROOT / "docs" / "results" / run.file).read_text()
        version = ".".join(map(str, run.version))
        assert re.fullmatch(r"2026-\d\d-\d\d", run.date)
        if not run.file.startswith("defects-"):
            assert version in text
            continue
        own = next(part for part in text.split("\n\n") if part.startswith(f"{version}, build {run.build}, on "))
        assert own.partition("\n")[0].endswith(run.date)
        status, known = re.search(rf"^{defect.id} +(\w+) +\S+ +(.+)$", own, re.MULTILINE).groups()
        assert makes(defect, Status[status])
        assert defect.id in known.split(", ")


@table("defect", DEFECTS)
def test_sizes_of_an_example_meet_the_entry(defect):
    problem, text = Problem.parse(defect.case), defect.example.replace(",", "")
    n, c, *_ = problem.dims
    count = {word: int(number) for number, word in re.findall(r"(\d+) (images|channels|frames)", text)}
    n, c = count.get("images", count.get("frames", n)), count.get("channels", c)
    found = [tuple(map(int, dims.split("x"))) for dims in re.findall(r"\d+x\d+x\d+x\d+", text)]
    found += [(n, c, int(h), int(w)) for h, w in re.findall(r"(?<![\dx])(\d+)x(\d+)(?![\dx])", text)]
    found += [(int(rows), c, 1, 1) for rows in re.findall(r"(\d+) rows", text)]
    found += [(n, c, 1, int(bins)) for bins in re.findall(r"(\d+) bins", text)]
    for dims in found:
        sizes = ("x".join(map(str, sizes)) for sizes in (problem.dims, dims))
        assert defect.predicate(Problem.parse(defect.case.replace(*sizes))), dims


def noticed(defect, version, build, result):
    """What to say of a build that no run has seen; of one that a run has, the table has to be right."""
    shows = makes(defect, result.status)
    if (tuple(version), build) in [(run.version, run.build) for run in defect.seen]:
        assert shows, f"{defect.id} no longer shows, or shows otherwise: {result}"
        assert result.known == defect.id
        return ""
    if shows == defect.in_version(version, build):
        return ""
    seen = "seen" if shows else "no longer seen"
    numbers = ".".join(map(str, version))
    command = f"pybnorm check --backend {defect.backend} --case {defect.case}"
    return f"{seen}: {defect.id} on {defect.backend} {numbers}, build {build}, please report: {command}"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.id)
def test_the_defect_still_shows(defect, need_device, record_property, monkeypatch, tmp_path):
    """On the library of this machine: an entry that is out of date fails here, or is a notice at the end of the run."""
    need_device(defect.backend)
    version = pybnorm.load(defect.backend).version
    if defect.cards and not defect.on_card(describe(defect.backend).device):
        pytest.skip(f"{defect.backend}: no other card than {', '.join(defect.cards)} has it")
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", str(tmp_path))
    info, result, another = SEEN.ran(defect, tmp_path)
    assert not info.problem
    if not defect.ways and not defect.refused:  # the library is as it is; a handle that avoids has native compute
        (another,) = judged([Problem.parse(defect.case)], "entry", defect.backend, "avoid_all")
    if defect.refused:
        if defect.in_version(version):
            assert (another.status, defect.id in another.message) == (Status.UNSUPPORTED, True), another
    elif defect.effect != Effect.WEAK:
        absent = another.status == Status.UNSUPPORTED and "native does not compute it here" in another.message
        assert another.status == Status.PASS or absent, f"{defect.id} is not avoided: {another}"
    notice = noticed(defect, version, info.digest, result)
    if notice:
        record_property("notice", notice)


def test_miopens_tuning_leaves_the_callers_running_statistics_alone(need_device, monkeypatch, tmp_path):
    need_device("miopen")
    if pybnorm.load("miopen").version < (3, 5):
        pytest.skip("miopen tunes its own batch-norm kernels from 3.5 on")
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", str(tmp_path))
    result = SEEN.tuned("train,spatial,f32,nchw,4x3x6x5,fill=randn", tmp_path)
    assert {v.output for v in result.verdicts} >= {"running_mean", "running_variance"}
    assert result.status == Status.PASS, result
    assert "BnFwdTrainingSpatial:Variant1-1" in "".join(f.read_text() for f in tmp_path.glob("*.udb.txt"))


def test_only_a_build_that_a_run_has_seen_makes_a_defect_that_is_gone_a_failure():
    defect = named("miopen-training-stash")  # before 3.5
    own, another = defect.seen[0].build, "0123456789abcdef"

    def notice(version, build, status, known=""):
        return noticed(defect, version, build, CaseResult("miopen", defect.case, status, [], known=known))

    assert notice((3, 4, 0), own, Status.FAIL, defect.id) == ""
    with pytest.raises(AssertionError, match="no longer shows"):
        notice((3, 4, 0), own, Status.PASS)
    with pytest.raises(AssertionError):
        notice((3, 4, 0), own, Status.FAIL, "another")
    text = notice((3, 4, 0), another, Status.PASS)
    assert text.startswith(f"no longer seen: {defect.id} on miopen 3.4.0, build 0123456789abcdef, please report")
    assert text.endswith(f"pybnorm check --backend miopen --case {defect.case}")
    assert notice((3, 5, 1), another, Status.PASS) == ""
    assert notice((3, 5, 1), another, Status.FAIL).startswith("seen: miopen-training-stash")


@pytest.mark.parametrize(
    ("backend", "version", "build", "said"),
    [
        ("miopen", (3, 6, 0), "", "MIOpen 3.6.0 was not run: it is taken to have the known defects of 3.5.1"),
        ("miopen", (2, 19), "", "MIOpen 2.19 was not run: it is taken to have every known defect of older and newer"),
        ("cudnn", (9, 10, 2), "", "cuDNN 9.10.2 was not run"),
        ("cudnn", (8, 9, 7), "", "cuDNN 8.9.7 was not run"),
        ("onednn", (3, 5), "", "oneDNN 3.5 was not run"),
        ("onednn", (4,), "", "defects of 3.13.2"),
        ("cudnn", (10, 0, 0), "", "defects of 9.28.1"),
        ("miopen", (3, 5, 1), "another", "this build of MIOpen 3.5.1 was not run"),
        ("miopen", (3, 5, 1), "6efe605b9ddd1028", ""),
        ("miopen", (2, 20, 0), "", ""),
        ("miopen", (3, 5, 9), "", ""),
        ("miopen", (3,), "", ""),
        ("cudnn", (9, 19, 0), "", ""),
        ("another", (1, 0), "", ""),
    ],
)
def test_a_version_or_build_that_no_run_has_seen_is_said_to_be_one(backend, version, build, said):
    text = pybnorm.defects.unrecorded(backend, version, build)
    assert said in text
    assert bool(text) == bool(said)


def test_the_page_is_that_of_the_table():
    text = (ROOT / "docs" / "defects.md").read_text()
    assert text == PAGE.page(), "python ci/defects-page.py makes docs/defects.md anew"


# ---------------------------------------------------------------- what an entry explains


def test_versions_are_compared_as_far_as_they_are_given():
    defect = named("miopen-training-stash")
    assert all(map(defect.in_version, [(2, 19, 9), (2, 20, 0), (3, 0, 0), (3, 4, 9)]))
    assert not any(map(defect.in_version, [(3, 5, 0), (4,)]))
    assert dataclasses.replace(defect, fixed=None).in_version((9, 0, 0))


@pytest.mark.parametrize("backend", ["cudnn", "miopen", "onednn"])
def test_an_unknown_version_has_the_defects_of_the_newest_that_was_run(backend):
    own = [d for d in DEFECTS if d.backend == backend]
    newest = max(run.version for d in own for run in d.seen)
    there = [d.in_version(newest) for d in own]
    assert any(there)
    for version in ((newest[0], newest[1] + 1, 0), (newest[0] + 1, 0, 0)):
        assert [d.in_version(version) for d in own] == there
    assert [d.in_version((1, 0, 0)) for d in own] == [not d.first for d in own]


def test_a_version_that_no_run_has_seen_is_told_of_once(monkeypatch, load_library):
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", "warn")
    load_library("onednn")
    monkeypatch.setitem(pybnorm.defects.kinds.NEWEST, "onednn", (3, 1, 7))
    said = "was not run: it is taken to have the known defects of 3.1.7, the newest that was"
    with pytest.warns(pybnorm.UnseenLibraryWarning, match=said):
        pybnorm.Handle("onednn").close()
    x = np.zeros((2, 3, 4, 5), np.float32)
    with warnings.catch_warnings(), pybnorm.Handle("onednn") as handle:
        warnings.simplefilter("error")
        plan = handle.plan_forward_inference(x)
        assert plan.reason.endswith(said)


def test_a_build_that_differs_from_its_version_is_told_by_its_file(monkeypatch, load_library):
    library = load_library("onednn")
    own = file_digest(library.path)
    problem = Problem.parse("train,spatial,f32,nchw,1x2x700x700,fill=randn")
    chain = verdict("y", Status.CHAIN, 2.0, CHAIN)
    for fixed in (None, (2, 0)):  # the version has it, or not; the build is the other way round
        has, version = fixed is not None, library.version
        defect = dataclasses.replace(named("onednn-long-sums"), first=(1,), fixed=fixed, builds={own: has})
        assert defect.in_version(version) == defect.in_version(version, "another") == (not has)
        assert defect.in_version(version, own) == has
        monkeypatch.setattr(pybnorm.defects, "DEFECTS", (defect,))
        monkeypatch.setattr(PAGE, "DEFECTS", (defect,))
        assert bool(pybnorm.known_defects("onednn", problem, version)) == (not has)
        assert bool(pybnorm.known_defects("onednn", problem, version, own)) == has
        assert bool(explain("onednn", version, problem, [chain], Status.CHAIN, build=own)) == has
        with pybnorm.Handle("onednn") as handle:
            assert bool(pybnorm._core.defects_of(handle, problem)) == has
        asked = problem.operation, problem.mode, problem.dtype, problem.layout, problem.dims
        assert (defect.id in pybnorm.capability("onednn", *asked)[1]) == has
        assert f"* Build `{own}`: {'has it' if has else 'does not have it'}" in PAGE.page().splitlines()


EXPLAINED = """
miopen 3.4.0 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dx=9 dscale=9 dbias=PASS -> backward-statistics-tail
miopen 3.4.0 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dx=9 dbias=9
miopen 3.4.0 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dbias=PASS
miopen 3.5.9 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dx=9 -> backward-statistics-tail
miopen 3.6.0 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dx=9 -> backward-statistics-tail
cudnn 3.4.0 backward,spatial,f32,nchw,2x3x72x72,saved=0 FAIL dx=9
miopen 3.4.0 backward,spatial,bf16,nchw,2x3x33x33 FAIL dscale=50 -> backward-vector-tail
miopen 3.4.0 backward,spatial,bf16,nchw,2x3x33x33 FAIL dx=1.9 -> backward-vector-tail bf16-truncation
miopen 3.4.0 backward,spatial,bf16,nchw,2x3x32x33 FAIL dx=1.9 -> bf16-truncation
miopen 3.4.0 backward,spatial,bf16,nchw,2x3x32x33 FAIL dx=2.1
miopen 3.4.0 backward,spatial,bf16,nchw,2x3x32x33 FAIL dscale=1.9
miopen 3.4.0 train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100 WARN y=9 saved_mean=PASS -> one-pass-variance
miopen 3.4.0 train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100 INCONCLUSIVE y=9 -> one-pass-variance
miopen 3.4.0 train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100 FAIL y=9
miopen 3.4.0 train,peract,f32,nchw,4x3x8x8,fill=randn,kappa=100 WARN y=9 saved_mean=PASS
miopen 3.4.0 train,spatial,f32,nchw,769x3x1x1025 FAIL y=1e4 -> training-stash
miopen 3.4.0 train,spatial,f32,nchw,769x3x1x1025 FAIL y=1.01e6
miopen 3.4.0 train,spatial,f32,nchw,769x3x1x1025 FAIL saved_mean=1.01e5
miopen 3.4.0 train,spatial,f32,nchw,769x3x1x1025 FAIL y=inf
onednn 3.2.0 train,spatial,f32,nchw,1x1x1000x1000,fill=randn CHAIN y=2 -> long-sums
onednn 3.2.0 train,spatial,f32,nchw,1x1x1000x1000,fill=randn FAIL y=2
onednn 3.12.1 train,spatial,f32,nchw,32x2x56x56,fill=image CHAIN saved_mean=6 -> chained-sums
onednn 3.14.0 train,spatial,f32,nchw,32x2x56x56,fill=image CHAIN saved_mean=6 -> chained-sums
onednn 3.12.1 train,spatial,f32,nchw,32x2x56x56,fill=image FAIL saved_mean=2
onednn 3.2.0 train,spatial,f32,nchw,2x2x4x8,fill=image CHAIN saved_mean=6
onednn 3.2.0 backward,spatial,f32,nchw,32x2x56x56,fill=image CHAIN saved_mean=6
cudnn 9.19.0 train,persistent,f32,nchw,32x4x112x112 FAIL saved_mean=1.5 -> persistent-mean
cudnn 9.19.0 train,persistent,f32,nchw,32x4x112x112 FAIL y=1.5
cudnn 9.19.0 train,persistent,f32,nchw,32x4x112x112 FAIL saved_mean=5
cudnn 9.19.0 train,persistent,f32,nchw,32x4x112x112,fill=randn FAIL saved_mean=1.5
cudnn 9.19.0 train,peract,f32,nchw,1280x4x1x2,fill=sparse CHAIN y=2.2 -> chained-sums
cudnn 9.19.0 train,peract,f32,nchw,1280x4x1x2,fill=sparse FAIL saved_mean=1.5
cudnn 9.19.0 train,peract,f32,nchw,64x4x1x2,fill=sparse CHAIN y=2.2
cudnn 9.19.0 train,persistent,f32,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0 FAIL y=4e5 -> persistent-fixed-point
cudnn 9.19.0 train,persistent,f32,nchw,4x4x4x4096,fill=randn,eps=0 FAIL y=4e5
cudnn 9.19.0 train,spatial,f32,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0 FAIL y=4e5
cudnn 9.19.0 train,persistent,f32,nchw,4x4x4x1024,fill=range,magnitude=1e-06,eps=0 FAIL y=4e5
cudnn 9.19.0 train,persistent,f64,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0 FAIL y=4e5
"""
"""Library, version (an unknown one is as the newest known), case, its status, error / bound of outputs, and entries."""


@table("row", EXPLAINED.strip().splitlines())
def test_entries_explain_their_outputs_up_to_a_size_together_or_not_at_all(row):
    case, _, wanted = row.partition(" -> ")
    backend, version, line, status, *outputs = case.split()
    verdicts, status = [], Status[status]
    for output, ratio in (word.split("=") for word in outputs):
        own = Status.PASS if ratio == "PASS" else status
        number, note = float("0.1" if ratio == "PASS" else ratio), CHAIN if own == Status.CHAIN else ""
        wild = {"finite_ratio": 1e4, "wild": 1} if math.isinf(number) else {}
        verdicts.append(verdict(output, own, number, note, **wild))
    found = explain(backend, tuple(map(int, version.split("."))), Problem.parse(line), verdicts, status)
    assert ids(found) == [f"{backend}-{name}" for name in wanted.split()]


def explained(line, status, said, **more):
    return ids(explain("miopen", MIOPEN, Problem.parse(line), [], status, said, **more))


def test_a_failing_call_is_explained_by_what_it_said():
    line = "train,spatial,f32,nhwc,2x3x1x513"
    said = "InternalError: miopen batch_normalization_forward_training: miopenStatusInternalError (5): "
    missing = said + "MIOpen Error: ./src/hipoc/hipoc_program.cpp:294: Empty code object path."
    assert explained(line, Status.BUILD_FAILED, missing) == ["miopen-nhwc-training-kernel"]
    assert explained(line, Status.BUILD_FAILED, said) == explained(line, Status.CRASHED, missing) == []
    assert explain("miopen", MIOPEN, Problem.parse(line), [verdict("y")]) == []


def test_what_certain_cards_have_is_explained_on_those():
    line, name = "train,spatial,f32,nchw,4x6x9x9,fill=randn", "miopen-gfx115x-reductions"
    said = "InternalError: miopen batch_normalization_forward_training: Code object build failed. Source: MIOpen"
    strix, known_build = "AMD Radeon 8060S Graphics (gfx1151, wave size 32)", next(iter(named(name).builds))
    problem = Problem.parse(line)
    call = Call(problem.operation, problem.mode, problem.dtype, problem.dims)
    for device, there in ((strix, True), ("AMD Radeon RX 7900 XTX (gfx1100, wave size 32)", False), ("", False)):
        assert explained(line, Status.BUILD_FAILED, said, device=device) == [name] * there
        assert (name in ids(pybnorm.known_defects("miopen", call._replace(device=device), MIOPEN))) == there
    assert explained(line, Status.BUILD_FAILED, said, device=strix, build=known_build) == []
    assert explained(line.replace("train", "infer"), Status.BUILD_FAILED, said, device=strix) == []
    assert name not in ids(pybnorm.known_defects("miopen", problem, MIOPEN))
    with pytest.raises(pybnorm.ArgumentTypeError, match="device: got 7"):
        pybnorm.known_defects("onednn", call._replace(device=7))


def test_tuning_reaches_the_running_statistics_of_builds_that_were_not_run(monkeypatch):
    monkeypatch.setenv("MIOPEN_FIND_ENFORCE", "SEARCH")
    problem, entry = Problem.parse("train,spatial,f32,nhwc,4x6x9x9"), named("miopen-tuned-running-statistics")
    for more, build, met in (
        ({}, "another", True),
        ({"running": False}, "another", False),
        ({}, next(iter(entry.builds)), False),
    ):
        call = dataclasses.replace(problem, **more)
        assert (entry in pybnorm.known_defects("miopen", call, (3, 5, 1), build)) == met


@pytest.mark.parametrize("dims", ["32x2x28x28", "1x2x32x64"])
def test_equal_gradients_in_float32_are_summed_in_a_chain_which_the_table_has(dims, load_library):
    """As those of a mean, on the oneDNN of this machine; a handle that avoids all makes them correct."""
    library = load_library("onednn")
    problem = Problem.parse(f"backward,spatial,f32,nchw,{dims},fill=randn")
    inputs = dataclasses.replace(generate(problem), dy=np.full(problem.dims, 1 / 3e5 if dims[0] == "3" else 0.1, "f"))
    expected, found = expect(problem, inputs), {}
    for policy in ("ignore", "avoid_all"):
        out = {n: np.empty(problem.dims if n == "dx" else problem.parameter_dims, "f") for n in BACKWARD}
        given = {n: getattr(inputs, n) for n in ("x", "dy", "scale", "saved_mean", "saved_inv_variance")}
        with pybnorm.Handle("onednn", known_defects=policy) as handle:
            handle.backward(**given, **out, epsilon=problem.epsilon)
        found[policy] = list(judge_call(expected, out).values())
    assert {v.status for v in found["avoid_all"]} == {Status.PASS}
    wrong = [v for v in found["ignore"] if v.status != Status.PASS]
    assert {v.status for v in wrong} <= {Status.CHAIN}
    if library.version[:2] == (3, 2):  # whose chains are those of one thread
        assert ids(explain("onednn", library.version, problem, wrong, Status.CHAIN)) == ["onednn-chained-gradients"]


@pytest.mark.slow
def test_a_new_fault_on_the_shape_of_a_known_defect_is_not_explained():
    """As a run has it: the verdicts of a simulated kernel, under MIOpen's name."""
    problem, _, expected = case("train,spatial,f32,nchw,769x2x1x1025,fill=randn,repeats=1")
    right = {name: values.astype(np.float32) for name, values in expected.outputs.items()}

    def found(y):
        verdicts = judge_call(expected, right | {"y": y})
        assert verdicts["y"].status == Status.FAIL
        return verdicts["y"], ids(explain("miopen", MIOPEN, problem, list(verdicts.values())))

    y = right["y"].copy()
    y[3, 1, 0, 7] += 1e-2
    assert found(y)[1] == ["miopen-training-stash"]
    assert found(y * np.float32(1e5))[1] == []
    y[768, 1, 0, 1024] = np.nan
    wild, explained = found(y)
    assert (wild.wild, explained) == (1, [])
    assert 1 < wild.finite_ratio < 1e7


@pytest.mark.slow
def test_a_chain_of_sums_is_no_failure_and_data_left_out_on_the_same_shape_are():
    """A chain's depth would hold both; on these data a chain is off by a twentieth of what the other is."""
    expected, by_channel = made("train,spatial,f32,nchw,32x2x56x56,fill=image")
    problem = expected.problem
    left_out = rows.Kernel(reads={"": lambda a: a[:, : a.shape[1] * 199 // 200]})
    chain, part = (
        judge_call(expected, rows.outputs(kernel, by_channel))
        for kernel in (rows.Kernel(total=rows.sequential), left_out)
    )
    said = explain("onednn", (3, 2, 0), problem, list(chain.values()), Status.CHAIN)
    assert ids(said) == ["onednn-chained-sums"]
    assert {v.status for v in chain.values()} == {Status.PASS, Status.CHAIN}
    assert part["saved_mean"].status == Status.FAIL
    assert part["saved_mean"].ratios["B"] * (16 + 4 * problem.m**0.5) < problem.m
    assert part["saved_mean"].note == ""
    assert explain("onednn", (3, 2, 0), problem, list(part.values())) == []


# What the H200 said of cuDNN 9.19's entry points: a call that each entry meets, and its neighbour that is right.
CUDNN = {
    "cudnn-inference-rows": ("infer,spatial,f32,nhwc,65536x2x1x2", "infer,spatial,f16,nchw,65535x2x1x2"),
    "cudnn-per-activation-rows": ("train,peract,f32,nchw,131071x2x1x1", "train,peract,f32,nchw,131070x2x1x1"),
    "cudnn-per-activation-chains": (
        "backward,peract,f32,nchw,1000000x2x1x1,saved=0", "backward,peract,f32,nchw,1000000x2x1x1"
    ),
    "cudnn-persistent-fixed-point": ("backward,persistent,f32,nhwc,4x4x4x1024", "train,persistent,f32,nhwc,4x4x4x1024"),
    "cudnn-misaligned": ("infer,peract,bf16,nchw,4x7x5x5,misalign=3", "infer,peract,bf16,nchw,4x7x5x5,misalign=2"),
    "cudnn-channels-last-inference": ("infer,spatial,f32,nhwc,8x16x14x14", "infer,spatial,f32,nchw,8x16x14x14"),
}  # fmt: skip


@pytest.mark.parametrize("identity", CUDNN)
def test_predicates_of_cudnn_end_where_the_library_does(identity):
    assert set(CUDNN) <= {d.id for d in DEFECTS}
    for line, met in zip(CUDNN[identity], (True, False), strict=True):
        assert named(identity).predicate(Problem.parse(line)) is met, line
    assert named("cudnn-per-activation-rows").predicate(Problem.parse("infer,peract,f32,nchw,262137x2x1x1"))
    assert not named("cudnn-per-activation-rows").predicate(Problem.parse("infer,peract,f32,nchw,262136x2x1x1"))


def test_a_length_of_sum_has_one_entry_and_a_weakness_is_no_reason_to_warn():
    for m, found in ((64, []), (65, ["chained"]), (400_000, ["chained"]), (400_001, ["long"])):
        line = f"train,spatial,f32,nchw,1x2x1x{m},fill=randn"
        assert ids(pybnorm.known_defects("onednn", line)) == [f"onednn-{word}-sums" for word in found]
    library = types.SimpleNamespace(backend="onednn", version=(3, 2, 0), path="")
    assert ids(pybnorm.defects._of_library(library)) == ["onednn-long-sums"]


def test_damage_and_failed_checks_of_trust_are_not_explained():
    problem = Problem.parse("backward,spatial,f32,nchw,2x3x33x33")
    info = BackendInfo("miopen", version=MIOPEN)

    def known(**changes):
        result = CaseResult("miopen", str(problem), Status.FAIL, [verdict("dx")])
        return annotated(dataclasses.replace(result, **changes), info, problem).known

    assert known() == "miopen-backward-vector-tail"
    assert known(message="wrote outside of dx") == ""
    assert known(status=Status.PASS) == ""
    assert known(status=Status.CRASHED, verdicts=[], message="the library's process died: SIGSEGV") == ""
    assert known(status=Status.FAIL, claim="newly unsupported", verdicts=[]) == ""


# ---------------------------------------------------------------- where predicates end

# Verdicts of MIOpen 3.4.0 on its own kernels at both sides of every edge, and of 3.5.1 for miopen-nhwc-stash; "" is a
# case that passes.
EDGES = {
    "": """
        backward,spatial,f32,nchw,2x3x32x32/31x3x27x19/32x3x1x511/32x3x1x516/4x1x5x205/2x3x1x61/2x3x72x72
        backward,spatial,f32,nhwc,2x3x33x33
        backward,peract,f32,nchw,2x3x33x33
        backward,spatial,f16,nchw,2x3x5x12/2x3x1x57/2x3x3x67/2x12x5x5
        backward,spatial,f32,nchw,2x3x64x64/2x3x4x1023/1x1x1x4100,saved=0
        train,spatial,f32,nchw,2x3x45x91/2x3x64x65/769x2x1x1024/769x2x1x1028/769x2x1x2047/768x2x1x1025
        train,spatial,f16,nchw,769x2x1x1025
        train,spatial,f32,nhwc,2x3x1x512/2x3x1x1025/769x2x1x150/768x2x1x151/2x12x5x5
        train,spatial,f16,nhwc,2x3x1x513/2x4x5x5/2x8x5x5/2x12x1x1
        infer,spatial,f32,nchw,2x3x73x73
        infer,spatial,f16,nhwc,2x12x5x5
    """,
    "miopen-nhwc-stash": """
        train,spatial,f16,nhwc,1x12x3x3/2x28x5x5
        backward,spatial,f16,nhwc,2x12x2x4
    """,
    "miopen-backward-vector-tail": """
        backward,spatial,f32,nchw,2x3x33x33,saved=0
        backward,spatial,f32,nchw,1x3x5x205/3x1x5x205/32x3x27x19/3x2x1089/3x2x11x9x11
        backward,spatial,f16,nchw,2x3x1x61/2x3x1x199
    """,
    "miopen-tuned-backward": """
        backward,spatial,f32,nchw,4x4x7x7/3x1x5x5/2x3x33x33
        backward,spatial,f16,nchw,512x8
    """,
    "miopen-backward-statistics-tail": """
        backward,spatial,f32,nchw,1x2x4x1025/2x3x72x72/1x2x1x4100/1x1x1x4104,saved=0
    """,
    "miopen-training-vector-tail": """
        train,spatial,f32,nchw,2x3x1x4097/3x1x1x4097
        train,spatial,f16,nchw,33x2x1x4097
    """,
    "miopen-training-stash": """
        train,spatial,f32,nchw,769x2x1x1025/769x2x1x1026/769x2x1x1027/769x2x1x2049/8x1x1x4194305
    """,
    "miopen-f16-blend": """
        infer,peract,f16,nchw,8x3x4x5,fill=randn,alpha=2,beta=0.5
        backward,spatial,f16,nhwc,4x6x8x9,beta=-1
    """,
    "miopen-nhwc-training-kernel": """
        train,spatial,f32,nhwc,2x3x1x513/2x3x1x1024/769x2x1x151
    """,
}


@table(("identity", "line"), [(i, str(p)) for i, text in EDGES.items() for line in text.split() for p in expand(line)])
def test_predicates_end_where_the_library_does(identity, line):
    problem = Problem.parse(line)
    tuned = identity == "miopen-tuned-backward"
    table = [d for d in DEFECTS if d.backend == "miopen" and d.effect != Effect.WEAK and d.tuned == tuned]
    table = [d for d in table if not d.cards]
    assert [d.id for d in table if d.predicate(problem)] == ([identity] if identity else [])


def test_no_predicate_raises():
    lines = "train/infer/backward,spatial/peract/persistent,f32/f64/f16/bf16,nchw/nhwc,2x3/2x3x4/2x3x4x5"
    for problem in expand(lines):
        for defect in DEFECTS:
            assert defect.predicate(problem) in (True, False)


# ---------------------------------------------------------------- what callers ask


def test_known_defects_of_a_call_and_of_a_problem_are_the_same():
    call = Call(pybnorm.Operation.BACKWARD, pybnorm.Mode.SPATIAL, pybnorm.DataType.FLOAT32, (4, 8, 35, 35))
    problem = Problem.parse("backward,spatial,f32,nchw,4x8x35x35")
    for version in (None, MIOPEN, (3, 6)):
        for question in (call, problem, str(problem)):
            assert ids(pybnorm.known_defects("miopen", question, version)) == ["miopen-backward-vector-tail"]
    assert pybnorm.known_defects("cudnn", call) == []
    unsaved = call._replace(dims=(2, 3, 72, 72), saved=False)
    found = ids(pybnorm.known_defects("miopen", unsaved, MIOPEN))
    assert found == ["miopen-backward-statistics-tail", "miopen-one-pass-variance"]


@pytest.mark.parametrize(
    ("backend", "call", "text"),
    [
        (
            "nvidia",
            "train,spatial,f32,nchw,4x8",
            "backend.*nvidia.*cudnn, miopen, native, native_cuda, native_rocm, onednn",
        ),
        ("miopen", ("backward",), r"call.*pybnorm.defects.Call"),
        ("miopen", "backward", r"^call: got backward, .*operation,mode,dtype,layout,dims"),
        ("miopen", "backward,spatial,f32,nchv,4x8x35x35", r"^call: got .*\(layout: got nchv \(did you mean 'nchw'"),
    ],
)
def test_bad_questions_are_refused_by_name(backend, call, text):
    with pytest.raises((pybnorm.ArgumentError, pybnorm.ArgumentTypeError), match=text):
        pybnorm.known_defects(backend, call)
    with pytest.raises(pybnorm.ArgumentError, match=r"identity.*onednn-long-sums"):
        named("none")
