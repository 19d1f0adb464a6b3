"""Runs held against each other."""

import json
import os
import re

import numpy as np
import pytest
from click.testing import CliRunner
from command_here import run
from made_runs import made_document, made_result, make_run, nudged, right_outputs

import pybnorm
from pybnorm import cli
from pybnorm.check.compare import comparison as compare
from pybnorm.check.compare import conclusions as compare_conclusions
from pybnorm.check.compare import document as compare_document
from pybnorm.check.compare.comparison import Change, Outcome
from pybnorm.check.judging.bounds import Status, tiers
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import archive
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo
from pybnorm.errors import ArgumentError

LINES = [
    "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=3",
    "infer,peract,bf16,nhwc,4x3x5x5,fill=randn,alpha=2,beta=0.5",
    "backward,spatial,f16,nchw,4x3x5x5,fill=randn",
]


def only_pair(*folders):
    found = compare.compare(compare.read(folders))
    (pair,) = found.pairs
    assert re.fullmatch(r"<Comparison of .*: \d+ cases?, exit status \d>", repr(found))
    assert f"<tr><td>{pair.first}</td><td>{pair.second}</td>" in found._repr_html_()
    return found, pair


def by_case(found):
    return {c.case: c for c in found.cases}


# ---------------------------------------------------------------- elements


def pair_of(line, output, change_first=None, change_second=None, classes=(0, 0)):
    problem = Problem.parse(line)
    expected, outputs = right_outputs(problem)
    values = [c(outputs[output].copy()) if c else outputs[output] for c in (change_first, change_second)]
    choices = tiers(problem, output)
    return compare.compare_outputs(expected, output, tuple(values), (choices[classes[0]], choices[classes[1]]))


@pytest.mark.parametrize("line", LINES)
def test_one_ulp_is_within_and_counted(line):
    for output in right_outputs(Problem.parse(line))[1]:
        same = pair_of(line, output)
        assert (same.outcome, same.different, same.ratio, same.worst) == (Outcome.EQUAL, 0, 0, [])
        assert (same.first_nearer, same.second_nearer) == (0, 0)
        pair = pair_of(line, output, None, nudged)
        assert pair.outcome == Outcome.WITHIN
        assert pair.different == pair.elements == right_outputs(Problem.parse(line))[1][output].size
        assert 0 < pair.ratio <= 1
        assert pair.first_nearer == pair.elements
        assert pair.second_nearer == 0
        assert pair_of(line, output, nudged).second_nearer == pair.elements
        assert len(pair.worst) == min(10, pair.elements)


def test_the_bound_of_a_pair_is_the_sum_of_both():
    line = LINES[0]
    problem = Problem.parse(line)
    expected, outputs = right_outputs(problem)
    stable, one_pass = tiers(problem, "y")
    (part,) = expected.parts("y", None, (stable, one_pass))
    (a, _), (b, _) = part.classes
    for first, second, bounds in ((stable, stable, a + a), (stable, one_pass, a + b), (one_pass, one_pass, b + b)):
        for factor, outcome in ((0.98, Outcome.WITHIN), (1.02, Outcome.BEYOND)):
            other = outputs["y"].copy()
            other[1, 2, 3, 4] = np.float32(outputs["y"][1, 2, 3, 4] + factor * bounds[1, 2, 3, 4])
            pair = compare.compare_outputs(expected, "y", (outputs["y"], other), (first, second))
            assert pair.outcome == outcome
            assert pair.over == (outcome == Outcome.BEYOND)
            assert pair.ratio == pytest.approx(factor, rel=0.02)
            (worst,) = pair.worst
            assert worst.index == (1, 2, 3, 4)
            assert worst.bound == bounds[1, 2, 3, 4]
            assert (worst.first, worst.second) == (outputs["y"][1, 2, 3, 4], other[1, 2, 3, 4])
            assert worst.reference == expected.outputs["y"][1, 2, 3, 4]


def put(value):
    def change(array):
        array[0, 0, 0, 0] = value
        return array

    return change


def test_what_is_not_finite():
    for value in (np.nan, np.inf, -np.inf):
        pair = pair_of(LINES[0], "y", None, put(value))
        assert (pair.outcome, pair.over, pair.ratio) == (Outcome.BEYOND, 1, np.inf)
        assert pair.first_nearer == 1
        same = pair_of(LINES[0], "y", put(value), put(value))  # both wrong, and alike
        assert (same.outcome, same.different) == (Outcome.EQUAL, 0)
    assert pair_of(LINES[0], "y", put(np.inf), put(-np.inf)).outcome == Outcome.BEYOND
    assert pair_of(LINES[0], "y", put(np.nan), put(-np.nan)).outcome == Outcome.WITHIN  # NaN all the same


def test_signed_zeros_are_a_change_of_bits_and_no_difference():
    pair = pair_of(LINES[0], "y", put(0.0), put(-0.0))
    assert pair.different == 1
    assert (pair.outcome, pair.ratio) == (Outcome.WITHIN, 0)


def test_elements_whose_right_value_is_out_of_range_are_not_judged():
    line = "infer,spatial,f16,nchw,4x3x5x5,fill=randn,alpha=60000"
    problem = Problem.parse(line)
    expected, outputs = right_outputs(problem)
    beyond = np.abs(60000 * expected.outputs["y"]) > 70000
    other = outputs["y"].copy()
    other[beyond] = 65504.0
    stable = tiers(problem, "y")[0]
    pair = compare.compare_outputs(expected, "y", (outputs["y"], other), (stable, stable))
    assert pair.outcome == Outcome.WITHIN
    assert pair.unjudged == np.count_nonzero(beyond) > 0


def test_where_no_bound_holds_a_difference_is_undecided():
    line = "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=30000"
    pair = pair_of(line, "y", None, lambda a: a + np.float32(1e4), classes=(1, 1))
    assert pair.outcome == Outcome.UNDECIDED
    assert pair.undecided == pair.elements
    assert pair.over == 0


def test_arrays_of_another_shape_are_refused():
    expected, outputs = right_outputs(Problem.parse(LINES[0]))
    stable = tiers(Problem.parse(LINES[0]), "y")[0]
    with pytest.raises(ArgumentError, match="shape"):
        compare.compare_outputs(expected, "y", (outputs["y"], outputs["y"][:1]), (stable, stable))


# ---------------------------------------------------------------- runs


def test_equal_runs_exit_with_0_and_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "read_outputs", None)
    for name in ("a", "b"):
        make_run(tmp_path / name, "cudnn", LINES)
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.outcomes == {"equal": 3}
    assert pair.changes == {}
    assert pair.kind == "repeats"
    assert found.exit_status == 0
    assert found.alone == []
    assert found.only == {"A": [], "B": []}


def test_two_backends_of_one_run(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    # beside a right value of 16 bits the next one is wrong already
    make_run(tmp_path / "b", "miopen", LINES, change=lambda line, name, a: nudged(a) if a.dtype.itemsize == 4 else None)
    both = archive.read_run(tmp_path / "a")
    other = archive.read_run(tmp_path / "b")
    for file in (tmp_path / "b" / "outputs").iterdir():
        file.rename(tmp_path / "a" / "outputs" / file.name)
    cases, infos = both["cases"] + other["cases"], both["backends"] + other["backends"]
    archive.write_run(tmp_path / "a", made_document(infos, cases))
    found, pair = only_pair(tmp_path / "a")
    assert (pair.first, pair.second, pair.kind) == ("A:cudnn", "A:miopen", "vendors")
    assert pair.outcomes == {"within": 2, "equal": 1}
    assert pair.changes == {}
    assert pair.second_nearer == 0 < pair.first_nearer
    pair.first_nearer, pair.second_nearer = 2, 1
    assert compare.nearer_text(pair) == "67 % : 33 %"
    assert found.exit_status == 0


def test_what_changed_between_two_versions(tmp_path):
    lines = [str(p) for p in expand("train,spatial,f32,nchw,4x3x5x5,fill=randn,seed=1/2/3/4/5/6/7/8/9/10")]
    kappa = "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=10"

    def seeds(*chosen):
        return lambda line: int(line.partition("seed=")[2] or 0) in chosen

    fails_before, fails_now, moves, refused_before = (seeds(n) for n in (1, 2, 3, 4))

    def before(line, name, array):
        return array + np.float32(0.5) if name == "y" and fails_before(line) else None

    def now(line, name, array):
        if name == "y" and fails_now(line):
            return array + np.float32(0.5)
        if line == kappa and name == "saved_inv_variance":
            return array * np.float32(1 + 2e-4)
        return nudged(array, 3) if name == "y" and moves(line) else None

    refused_now, crashed_before, crashed_now = seeds(5, 10), seeds(6, 7, 10), seeds(6, 8)

    def status(refused, crashed, bad_status):
        return lambda line: Status.UNSUPPORTED if refused(line) else bad_status if crashed(line) else None

    make_run(
        tmp_path / "a",
        "cudnn",
        [*lines, kappa],
        (9, 0, 0),
        before,
        status(refused_before, crashed_before, Status.CRASHED),
    )
    make_run(tmp_path / "b", "cudnn", [*lines, kappa], (9, 2, 0), now, status(refused_now, crashed_now, Status.TIMEOUT))
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.kind == "versions"
    changes = {line: c.change for line, c in by_case(found).items()}
    expected = [
        *(Change.PASSING, Change.FAILING, Change.BITS, Change.SUPPORTED, Change.UNSUPPORTED),
        *(Change.OTHERWISE, Change.PASSING, Change.FAILING, Change.NONE, Change.OTHERWISE),
    ]
    assert [changes[line] for line in lines] == expected
    assert changes[kappa] == Change.WARNED
    assert {c.case for c in found.cases if c.change.regression} == {lines[1], lines[4], lines[7]}
    assert pair.changes["newly failing"] == 2
    assert pair.worse == 2  # the moved one and the one-pass one
    assert pair.better == 0
    assert found.exit_status == 1
    back, other = only_pair(tmp_path / "b", tmp_path / "a")
    assert by_case(back)[kappa].change == Change.UNWARNED
    assert other.better == 2
    assert by_case(back)[lines[0]].change == Change.FAILING


def test_a_regression_alone_exits_with_1(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    refuses = {LINES[0]: Status.UNSUPPORTED}
    make_run(tmp_path / "b", "cudnn", LINES, (2, 0), status=refuses.get)
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.outcomes == {"refused": 1, "equal": 2}
    assert found.exit_status == 1
    make_run(tmp_path / "c", "miopen", LINES, status=refuses.get)  # another vendor may refuse what it likes
    assert only_pair(tmp_path / "a", tmp_path / "c")[0].exit_status == 0


@pytest.mark.parametrize(
    ("document", "kind"),
    [({}, "repeats"), ({"host": "host-00000000"}, "machines"), ({"variables": {"OMP_NUM_THREADS": "77"}}, "settings")],
)
def test_in_what_two_runs_of_one_library_differ(tmp_path, document, kind):
    make_run(tmp_path / "a", "cudnn", LINES[:1])
    environment = machine() | document
    make_run(tmp_path / "b", "cudnn", LINES[:1], document={"environment": environment})
    assert only_pair(tmp_path / "a", tmp_path / "b")[1].kind == kind


def test_two_files_of_one_version_are_two_builds(tmp_path):
    for name, digest in (("a", "aa"), ("b", "bb"), ("c", "bb"), ("d", "")):
        info = BackendInfo("cudnn", "libcudnn", (1, 0, 0), "/lib/cudnn.so", "made", device="a device", digest=digest)
        make_run(tmp_path / name, "cudnn", LINES[:1], document={"backends": [info]})
    kinds = [only_pair(tmp_path / a, tmp_path / b)[1].kind for a, b in ("ab", "bc", "ad")]
    assert kinds == ["builds", "repeats", "repeats"]


@pytest.mark.slow
def test_beyond_exits_with_1_and_shows_its_points(tmp_path):
    def wrong(line, name, array):
        if name == "y":
            array[1, 1] += array.dtype.type(0.5)
            return array
        return None

    make_run(tmp_path / "a", "cudnn", LINES)
    make_run(tmp_path / "b", "miopen", LINES, change=wrong)
    done = run("compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "c.json")
    assert done.returncode == 1, done.stderr
    data = json.loads((tmp_path / "c.json").read_text())
    outcomes = {c["case"]: c["outcome"] for c in data["cases"]}
    assert outcomes == {LINES[0]: "beyond", LINES[1]: "beyond", LINES[2]: "equal"}
    (y,) = [o for o in data["cases"][0]["outputs"] if o["output"] == "y"]
    assert y["different"] == y["over"] == 25
    assert len(y["worst"]) == 10
    point = y["worst"][0]
    assert point["index"][:2] == [1, 1]
    assert point["second"] - point["first"] == pytest.approx(0.5, rel=1e-3)
    assert abs(point["reference"] - point["first"]) < point["bound"]
    row = [f"{point[name]:.9g}" for name in ("reference", "first", "second")]
    assert any(text.split()[1:4] == row for text in done.stdout.splitlines())
    assert [(a["alone"], a["output"]) for a in data["alone"]] == [("B:miopen", "y")] * 2
    assert data["exit_status"] == 1


def test_the_worst_output_decides_a_case(tmp_path):
    for wrong in ("y", "saved_mean", "running_variance"):

        def change(line, name, array, wrong=wrong):
            return array + array.dtype.type(0.5) if name == wrong else None

        make_run(tmp_path / "a", "cudnn", LINES[:1])
        make_run(tmp_path / wrong, "miopen", LINES[:1], change=change)
        (case,) = only_pair(tmp_path / "a", tmp_path / wrong)[0].cases
        assert case.outcome == Outcome.BEYOND
        assert {o.output for o in case.outputs if o.outcome != Outcome.EQUAL} == {wrong}


def test_each_side_is_held_to_the_class_that_held_it(tmp_path):
    line = "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=10"

    def one_pass(line, name, array):
        return array * np.float32(1 + 2e-4) if name == "saved_inv_variance" else None

    make_run(tmp_path / "a", "cudnn", [line])
    make_run(tmp_path / "b", "miopen", [line], change=one_pass)
    (case,) = only_pair(tmp_path / "a", tmp_path / "b")[0].cases
    assert case.statuses == (Status.PASS, Status.WARN)
    classes = {o.output: o.classes for o in case.outputs}
    assert classes["saved_inv_variance"] == ("A", "B")
    assert classes["saved_mean"] == ("A", "A")
    assert case.outcome == Outcome.WITHIN


def test_a_comparison_says_whether_bits_are_the_same(tmp_path):
    def otherwise(line, name, array):
        return nudged(array) if line == LINES[1] and name in ("y", "dx") else None

    for name, version, change in (("a", (9, 1, 0), None), ("b", (9, 2, 0), None), ("c", (9, 3, 0), otherwise)):
        make_run(tmp_path / name, "cudnn", LINES[:2], version, change=change)
    (same,) = compare.compare(compare.read([tmp_path / "a", tmp_path / "b"])).pairs
    assert compare.bits_text(same) == "the same bits in all 2 cases"
    (other,) = compare.compare(compare.read([tmp_path / "a", tmp_path / "c"])).pairs
    assert compare.bits_text(other) == "the same bits in 1 of 2 cases, different bits in 1"
    assert "different bits in 1" in run("compare", tmp_path / "a", tmp_path / "c").stdout


# ---------------------------------------------------------------- majority


def halved(line, name, array):
    return array * array.dtype.type(0.5) if name == "running_variance" else None


@pytest.mark.parametrize(
    ("backends", "wrong", "alone"),
    [
        ("cudnn miopen onednn", "B", "B:miopen"),
        ("cudnn miopen onednn", "BC", ""),
        ("cudnn miopen onednn", "ABC", "reference"),
        ("onednn onednn cudnn", "AB", "onednn"),  # versions of one library are one voice
        ("onednn onednn miopen", "ABC", "reference"),
        ("onednn onednn", "A", "A:onednn"),
    ],
)
def test_who_stands_alone(tmp_path, backends, wrong, alone):
    groups, paths = [["reference"], []], []
    for number, backend in enumerate(backends.split(), 1):
        name = "_ABC"[number]
        change = halved if name in wrong else lambda line, name, array: nudged(array)
        paths.append(make_run(tmp_path / name, backend, LINES[:1], (number, 0), change))
        groups[name in wrong].append(f"{name}:{backend}")
    found = compare.compare(compare.read(paths))
    (item,) = found.alone
    assert (item.alone, item.output) == (alone, "running_variance")
    assert sorted(map(sorted, item.groups)) == sorted(map(sorted, groups))
    assert found.exit_status == 1


# ---------------------------------------------------------------- what cannot be compared


def test_files_without_outputs_are_compared_by_status(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    fails = {LINES[0]: Status.CRASHED}
    make_run(tmp_path / "b", "cudnn", LINES, (2, 0), status=fails.get)
    found, pair = only_pair(tmp_path / "a" / "run.json", tmp_path / "b" / "run.json")
    assert pair.outcomes == {"differ": 1, "agree": 2}
    assert [c.case for c in found.cases if c.change.regression] == LINES[:1]
    assert found.exit_status == 1
    assert any("A is a file without outputs" in notice for notice in found.notices)
    assert only_pair(tmp_path / "a", tmp_path / "a" / "run.json")[1].outcomes == {"agree": 3}


def test_a_crash_has_no_outputs_to_compare(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    make_run(tmp_path / "b", "miopen", LINES, status={LINES[1]: Status.CRASHED}.get)
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.outcomes == {"equal": 2, "differ": 1}
    assert found.exit_status == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_failure_beside_a_pass_is_a_difference_though_the_outputs_are_within(tmp_path, moved):
    """As of a kernel that writes outside of its arrays: what it was to write is right."""
    make_run(tmp_path / "a", "cudnn", LINES[:1])
    make_run(tmp_path / "b", "miopen", LINES[:1], change=lambda line, name, array: nudged(array) if moved else None)
    document = archive.read_run(tmp_path / "b")
    (case,) = document["cases"]
    case.status, case.message = Status.FAIL, "wrote outside of y"
    archive.write_run(tmp_path / "b", document)
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert {o.outcome for o in found.cases[0].outputs} == {Outcome.WITHIN if moved else Outcome.EQUAL}
    assert pair.outcomes == {"differ": 1}
    assert found.exit_status == 1
    done = run("compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    assert f"differ A:cudnn PASS, B:miopen FAIL: {LINES[0]}\n  B:miopen: wrote outside of y\n" in done.stdout
    case.status, case.message = Status.UNSUPPORTED, "no"
    archive.write_run(tmp_path / "b", document)
    assert only_pair(tmp_path / "a", tmp_path / "b")[1].outcomes == {"refused": 1}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_run_is_not_overwritten_by_a_report(tmp_path, option):
    """Of ``compare --json a.json b.json c.json`` the option would take the first run for its file."""
    for name in "ab":
        make_run(tmp_path / name, "cudnn", LINES[:1])
        (tmp_path / name / "run.json").rename(tmp_path / f"{name}.json")
    make_run(tmp_path / "c", "cudnn", LINES[:1])
    for target in ("a.json", "b.json", "c/run.json"):
        before = (tmp_path / target).read_bytes()
        done = run("compare", option, tmp_path / target, tmp_path / "b.json", tmp_path / "c")
        assert done.returncode == 2
        message = f"{option} would overwrite the run {tmp_path / target}; use {option}=FILE to write elsewhere"
        assert message in done.stderr
        assert (tmp_path / target).read_bytes() == before
    for _ in range(2):  # an earlier comparison is replaced
        done = run("compare", "--json", tmp_path / "old", tmp_path / "b.json", tmp_path / "c")
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "old").read_text())["schema"] == compare_document.SCHEMA


@pytest.mark.slow
def test_what_is_no_run_is_refused_by_name_before_memory_or_time_run_out(tmp_path):
    make_run(tmp_path / "good", "cudnn", LINES[:1])
    document = json.loads((tmp_path / "good" / "run.json").read_text())
    document["cases"] = [{"backend": "cudnn", "case": LINES[0], "status": "PASS"}] * 120_000
    (tmp_path / "many").write_text(json.dumps(document))
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / "journal.jsonl")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for path, reason in {
        "journal": "no regular file",
        "sparse": "larger than 2147483648 bytes",
        "many": f"it has a case twice: cudnn {LINES[0]}",
    }.items():
        done = CliRunner().invoke(cli.main, ["compare", str(tmp_path / "good"), str(tmp_path / path)])
        assert (done.exit_code, reason in done.output) == (2, True), done.output
        assert f"RUN: got {tmp_path / path}" in done.output


def test_outputs_of_another_case_or_backend_are_refused(tmp_path):
    """They were compared as if they were of the case whose name they have, and the exit status was 0."""
    lines = ["infer,spatial,f32,nchw,2x3,fill=randn", "infer,spatial,f32,nchw,2x3,fill=randn,seed=1"]
    for name, backend in (("a", "cudnn"), ("b", "cudnn"), ("c", "miopen")):
        make_run(tmp_path / name, backend, lines)
    first, second = (sorted((tmp_path / name / "outputs").iterdir()) for name in "ab")
    other = sorted((tmp_path / "c" / "outputs").iterdir())
    mine = first[0].read_bytes()
    header = "a whole file of pybnorm check --save (it is of"
    for content, text in (
        (first[1].read_bytes(), header),
        (other[0].read_bytes(), header),
        (mine[:-1], "File is not a zip file"),
        (b"", "a whole file"),
    ):
        second[0].write_bytes(content)
        done = CliRunner().invoke(cli.main, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
        assert (done.exit_code, text in done.output) == (2, True), done.output
        assert str(second[0]) in done.output
    second[0].write_bytes(mine)
    assert CliRunner().invoke(cli.main, ["compare", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 0
    # whole by every checksum, and without what the case has written
    for arrays in ({}, {"y": np.ones(5, np.float32)}):
        archive.write_outputs(tmp_path / "b", "cudnn", Problem.parse(lines[0]), arrays)
        done = CliRunner().invoke(cli.main, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
        assert done.exit_code == 2, done.output


# ---------------------------------------------------------------- what a later run lost


def gone(folder, backend, others=(), **document):
    """A run in which a backend could not run; others judged what it did not."""
    infos = [BackendInfo(backend, problem="no device"), *map(BackendInfo, others)]
    results = [made_result(Status.PASS, LINES[0], other) for other in others]
    archive.write_run(folder, made_document(infos, results) | document)
    return folder


def test_a_backend_that_is_gone_from_a_later_run_is_a_regression(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    (tmp_path / "b").mkdir()
    gone(tmp_path / "b", "cudnn")
    done = run("compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "c.json")
    assert done.returncode == 1, done.stdout
    assert "B:cudnn: 3 cases that A judged could not run there: no device\n" in done.stdout
    (lost,) = json.loads((tmp_path / "c.json").read_text())["lost"]
    assert (lost["backend"], lost["first"], lost["second"], lost["cases"]) == ("cudnn", "A", "B", 3)
    # the other way round it came
    assert compare.compare(compare.read([tmp_path / "b", tmp_path / "a"])).exit_status == 2


def test_a_machine_of_another_kind_has_not_lost_what_it_never_had(tmp_path):
    other = machine() | {"host": "host-00000000"}
    (tmp_path / "b").mkdir()
    make_run(tmp_path / "a", "cudnn", LINES)
    for backends, environment, lost in (
        (["miopen"], other, 0),
        (["miopen"], machine(), 1),
        ([], other, 1),
    ):
        gone(tmp_path / "b", "cudnn", backends, environment=environment)
        found = compare.compare(compare.read([tmp_path / "a", tmp_path / "b"]))
        assert len(found.lost) == lost, (backends, environment)
        assert ("B:cudnn: 3 cases that A judged could not run there: no device" in found.notices) == (not lost)


def test_what_the_earlier_run_only_refused_is_not_lost(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES, status=dict.fromkeys(LINES, Status.UNSUPPORTED).get)
    (tmp_path / "b").mkdir()
    gone(tmp_path / "b", "cudnn")
    assert compare.compare(compare.read([tmp_path / "a", tmp_path / "b"])).exit_status == 2


def test_a_later_run_that_is_not_complete_has_lost_the_rest(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    make_run(tmp_path / "b", "cudnn", LINES[:1], document={"complete": False})
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.outcomes == {"equal": 1}
    assert [compare.lost_text(item) for item in found.lost] == [
        "B:cudnn: 2 cases that A judged were not run there: it is not complete"
    ]
    assert found.exit_status == 1
    assert only_pair(tmp_path / "b", tmp_path / "a")[0].exit_status == 0
    make_run(tmp_path / "c", "cudnn", LINES, document={"complete": False})
    assert only_pair(tmp_path / "a", tmp_path / "c")[0].exit_status == 0


@pytest.mark.slow
def test_cases_of_one_run_only_are_named(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES[:2])
    make_run(tmp_path / "b", "cudnn", LINES[1:])
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert found.only == {"A": LINES[:1], "B": LINES[2:]}
    assert (pair.only_first, pair.only_second) == (LINES[:1], LINES[2:])
    done = run("compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0
    only = (
        "libcudnn 1.0.0 (A) to libcudnn 1.0.0 (B): no change in 1 case; 1 case only in libcudnn 1.0.0 (A), not compared"
    )
    assert done.stdout.endswith(f"\n{only}; 1 case only in libcudnn 1.0.0 (B), not compared.\n")
    assert f"only in A: 1 case\n    {LINES[0]}\n" in done.stdout
    assert f"only in B: 1 case\n    {LINES[2]}\n" in done.stdout


@pytest.mark.slow
def test_nothing_comparable_exits_with_2(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES[:1])
    make_run(tmp_path / "b", "cudnn", LINES[1:])
    done = run("compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 2
    assert "Nothing to compare" in done.stdout
    done = run("compare", tmp_path / "a")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "Nothing to compare: this is one run of one library.")
    (tmp_path / "reports").mkdir()
    (tmp_path / "a").rename(tmp_path / "reports/run")
    done = run("compare", tmp_path / "reports", tmp_path / "b")
    assert f"(did you mean '{tmp_path}/reports/run'?)" in done.stderr
    (tmp_path / "reports/run").rename(tmp_path / "a")
    refuses = dict.fromkeys(LINES, Status.UNSUPPORTED)
    make_run(tmp_path / "c", "miopen", LINES, status=refuses.get)
    assert run("compare", tmp_path / "a", tmp_path / "c").returncode == 2


@pytest.mark.slow
def test_bad_arguments_are_one_line(tmp_path):
    done = run("compare")
    assert done.returncode == 2
    assert "RUN" in done.stderr
    make_run(tmp_path / "a", "cudnn", LINES[:1])
    make_run(tmp_path / "b", "cudnn", LINES[:1], change=lambda line, name, array: nudged(array))
    done = run("compare", tmp_path / "a", tmp_path / "b", "--html", f"{__file__}/page.html")
    assert done.returncode == 2
    assert f"--html: got {__file__}/page.html, allowed: a file that can be written" in done.stderr


def test_runs_of_another_version_or_incomplete_are_noticed(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES[:1])
    environment = machine() | {"pybnorm": "99.0"}
    make_run(tmp_path / "b", "cudnn", LINES[:1], document={"environment": environment, "complete": False})
    notices = only_pair(tmp_path / "a", tmp_path / "b")[0].notices
    assert any(f"B is of pybnorm 99.0, this is {pybnorm.__version__}: " in notice for notice in notices)
    assert "B is not complete" in notices


def test_a_run_of_a_later_format_is_told_with_both_versions(tmp_path):
    environment = machine() | {"pybnorm": "99.0"}
    make_run(tmp_path, "cudnn", LINES[:1], document={"environment": environment, "schema": "pybnorm.check/2"})
    told = (
        rf"pybnorm 99\.0 wrote it as 'pybnorm\.check/2'; this is pybnorm {pybnorm.__version__}, which reads .*check/1'"
    )
    with pytest.raises(ArgumentError, match=told):
        compare.read([tmp_path])


def test_the_document_has_the_sentences(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    make_run(tmp_path / "b", "cudnn", LINES[:2], status=dict.fromkeys(LINES, Status.FAIL).get)
    document = compare_document.document(compare.compare(compare.read([tmp_path / "a", tmp_path / "b"])))
    (said,) = document["conclusions"]
    assert not said["good"]
    assert said["sentence"].endswith("2 newly failing; 1 case only in libcudnn 1.0.0 (A), not compared.")


def test_a_line_of_a_later_language_is_compared_by_status(tmp_path):
    line = LINES[0] + ",an_option_of_the_future=1"
    for name in "ab":
        result = made_result(Status.PASS, line, saved="outputs/none.npz")
        archive.write_run(tmp_path, made_document([BackendInfo("cudnn")], [result]))
        (tmp_path / "run.json").rename(tmp_path / f"{name}.json")
    assert only_pair(tmp_path / "a.json", tmp_path / "b.json")[1].outcomes == {"agree": 1}


def test_an_interrupted_run_is_compared_from_its_journal(tmp_path):
    make_run(tmp_path / "a", "cudnn", LINES)
    make_run(tmp_path / "b", "cudnn", LINES)
    document = archive.read_run(tmp_path / "b")
    (tmp_path / "b" / "run.json").unlink()
    with archive.Journal(tmp_path / "b", resume=True) as journal:
        journal.begin(document["backends"])
        journal.append(document["cases"][0])
    found, pair = only_pair(tmp_path / "a", tmp_path / "b")
    assert pair.outcomes == {"equal": 1}
    assert pair.only_first == LINES[1:]
    assert "B is not complete" in found.notices


# ---------------------------------------------------------------- on oneDNN


@pytest.mark.slow
def test_real_runs_are_compared(tmp_path, load_library):
    load_library("onednn")
    case = "train/infer/backward,spatial,f32/f64,nchw/nhwc,8x40x9x9,fill=randn,kappa=3"
    variables = [{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "SSE41"}]
    for name, settings in zip("ab", variables, strict=True):
        done = run("check", "--backend", "onednn", "--case", case, "--save", tmp_path / name, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run("compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "c.json")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "c.json").read_text())
    (pair,) = data["pairs"]
    assert pair["kind"] == "settings"
    assert pair["outcomes"]["refused"] == 6
    assert pair["outcomes"].get("equal", 0) + pair["outcomes"].get("within", 0) == 6
    assert [run_["outputs"] for run_ in data["runs"]] == [6, 6]


# ---------------------------------------------------------------- known defects


@pytest.mark.parametrize("known", ["", "X-1"])
def test_a_run_beside_itself_has_no_change_and_one_voice(tmp_path, known):
    make_run(tmp_path / "a", "onednn", LINES, change=halved, known=known)
    found = compare.compare(compare.read([tmp_path / "a", tmp_path / "a"]))
    assert found.alone == []
    assert found.exit_status == 0
    (said,) = compare_conclusions.found(found)
    assert said.good
    assert "no change in 3 cases, 1 of them wrong in both." in said.sentence


@pytest.mark.slow
def test_known_defects_are_counted_apart_and_can_be_allowed(tmp_path):
    make_run(tmp_path / "a", "onednn", LINES)
    make_run(tmp_path / "b", "onednn", LINES, (2, 0), change=halved, known="X-1")
    make_run(tmp_path / "c", "cudnn", LINES, change=halved, known="Y-1")
    runs = compare.read([tmp_path / name for name in "abc"])
    for allows in (False, True):
        found = compare.compare(runs, allow_known=allows)
        assert found.exit_status == (0 if allows else 1)
        bad = [f for f in compare_conclusions.found(found) if not f.good]
        assert bool(bad) != allows
        texts = " ".join(f.sentence for f in compare_conclusions.found(found))
        assert f"1 newly failing (1 by known defects{', allowed' if allows else ''})" in texts
    make_run(tmp_path / "new", "onednn", LINES, (2, 0), change=halved)
    assert compare.compare(compare.read([tmp_path / "a", tmp_path / "new"]), allow_known=True).exit_status == 1
    # both wrong alike: the reference stands alone
    both = [tmp_path / "b", tmp_path / "c"]
    assert [run("compare", *both, *more).returncode for more in ([], ["--allow-known"])] == [1, 0]
    told = run("compare", *both).stdout
    assert "In 1 case all libraries agree with one another and not with the reference, by known defects." in told
    assert "Where the reference stands alone, it is wrong or all libraries share a convention" in told


def test_changed_bits_are_within_the_bounds_and_may_be_wrong_in_both(tmp_path):
    def first(line, name, array):
        return halved(line, name, array) if "seed=2" in line else None

    def second(line, name, array):
        changed = first(line, name, array)
        return nudged(array if changed is None else changed) if name.startswith("running") else None

    lines = [f"{LINES[0]},seed={seed}" for seed in (1, 2, 3)]
    make_run(tmp_path / "a", "onednn", lines, change=first)
    make_run(tmp_path / "b", "onednn", lines, (2, 0), change=second)
    *_, said = compare_conclusions.found(compare.compare(compare.read([tmp_path / "a", tmp_path / "b"])))
    wrong = "all changes are within the sum of both bounds, 1 of them wrong in both."
    assert said.sentence.endswith(f"bits changed in 3 cases, {wrong}")
