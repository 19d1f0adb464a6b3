"""Runs held against each other."""

import json
import os
import re

import numpy as np
import pytest
from command_here import run
from made_runs import made_document, made_result, make_run, nudged, right_outputs
from tables import table

import pybnorm
from pybnorm.check.compare import comparison as compare
from pybnorm.check.compare import conclusions as compare_conclusions
from pybnorm.check.compare import document as compare_document
from pybnorm.check.compare.comparison import Change, Outcome
from pybnorm.check.judging.bounds import Status, tiers
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


@pytest.fixture
def made(tmp_path):
    """Makes the run of a folder of a name, of cuDNN and all lines if nothing else is said."""

    def make(name, backend="cudnn", lines=LINES, *rest, **options):
        return make_run(tmp_path / name, backend, lines, *rest, **options)

    return make


def compared(*folders, **options):
    return compare.compare(compare.read(folders), **options)


def only_pair(*folders):
    found = compared(*folders)
    (pair,) = found.pairs
    assert re.fullmatch(r"<Comparison of .*: \d+ cases?, exit status \d>", repr(found))
    assert f"<tr><td>{pair.first}</td><td>{pair.second}</td>" in found._repr_html_()
    return found, pair


def told_by(*words):
    """The exit status, and what the command prints."""
    done = run("compare", *words)
    return done.returncode, done.stdout + done.stderr


def added(amount, *names, lines=LINES):
    """A change of a library that adds so much to outputs of those names."""

    def change(line, name, array):
        return array + array.dtype.type(amount) if name in names and line in lines else None

    return change


def halved(line, name, array):
    return array * array.dtype.type(0.5) if name == "running_variance" else None


def moved(line, name, array):
    return nudged(array)


def one_pass(line, name, array):
    return array * np.float32(1 + 2e-4) if name == "saved_inv_variance" else None


ONE_PASS = "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=10"

# ---------------------------------------------------------------- elements


def pair_of(line, output, change_first=None, change_second=None, classes=(0, 0)):
    problem = Problem.parse(line)
    expected, outputs = right_outputs(problem)
    values = [c(outputs[output].copy()) if c else outputs[output] for c in (change_first, change_second)]
    choices = tiers(problem, output)
    return compare.compare_outputs(expected, output, tuple(values), (choices[classes[0]], choices[classes[1]]))


@pytest.mark.parametrize("line", LINES)
def test_one_ulp_is_within_and_counted(line):
    for output, array in right_outputs(Problem.parse(line))[1].items():
        same = pair_of(line, output)
        assert (same.outcome, same.different, same.ratio, same.worst) == (Outcome.EQUAL, 0, 0, [])
        assert (same.first_nearer, same.second_nearer) == (0, 0)
        pair = pair_of(line, output, None, nudged)
        assert pair.outcome == Outcome.WITHIN
        assert pair.different == pair.elements == array.size
        assert 0 < pair.ratio <= 1
        assert (pair.first_nearer, pair.second_nearer) == (pair.elements, 0)
        assert pair_of(line, output, nudged).second_nearer == pair.elements
        assert len(pair.worst) == min(10, pair.elements)


def test_the_bound_of_a_pair_is_the_sum_of_both():
    problem = Problem.parse(LINES[0])
    expected, outputs = right_outputs(problem)
    stable, loose = tiers(problem, "y")
    (part,) = expected.parts("y", None, (stable, loose))
    (a, _), (b, _) = part.classes
    for first, second, bounds in ((stable, stable, a + a), (stable, loose, a + b), (loose, loose, b + b)):
        for factor, outcome in ((0.98, Outcome.WITHIN), (1.02, Outcome.BEYOND)):
            other = outputs["y"].copy()
            other[1, 2, 3, 4] = np.float32(outputs["y"][1, 2, 3, 4] + factor * bounds[1, 2, 3, 4])
            pair = compare.compare_outputs(expected, "y", (outputs["y"], other), (first, second))
            assert (pair.outcome, pair.over) == (outcome, outcome == Outcome.BEYOND)
            assert pair.ratio == pytest.approx(factor, rel=0.02)
            (worst,) = pair.worst
            assert (worst.index, worst.bound) == ((1, 2, 3, 4), bounds[1, 2, 3, 4])
            assert (worst.first, worst.second) == (outputs["y"][1, 2, 3, 4], other[1, 2, 3, 4])
            assert worst.reference == expected.outputs["y"][1, 2, 3, 4]
    with pytest.raises(ArgumentError, match="shape"):
        compare.compare_outputs(expected, "y", (outputs["y"], outputs["y"][:1]), (stable, stable))


def put(value):
    def change(array):
        array[0, 0, 0, 0] = value
        return array

    return change


def test_what_is_not_finite_and_signed_zeros():
    for value in (np.nan, np.inf, -np.inf):
        pair = pair_of(LINES[0], "y", None, put(value))
        assert (pair.outcome, pair.over, pair.ratio, pair.first_nearer) == (Outcome.BEYOND, 1, np.inf, 1)
        same = pair_of(LINES[0], "y", put(value), put(value))  # both wrong, and alike
        assert (same.outcome, same.different) == (Outcome.EQUAL, 0)
    assert pair_of(LINES[0], "y", put(np.inf), put(-np.inf)).outcome == Outcome.BEYOND
    assert pair_of(LINES[0], "y", put(np.nan), put(-np.nan)).outcome == Outcome.WITHIN  # NaN all the same
    zeros = pair_of(LINES[0], "y", put(0.0), put(-0.0))  # other bits, and no difference
    assert (zeros.different, zeros.outcome, zeros.ratio) == (1, Outcome.WITHIN, 0)


def test_elements_whose_right_value_is_out_of_range_are_not_judged():
    line = "infer,spatial,f16,nchw,4x3x5x5,fill=randn,alpha=60000"
    beyond = np.abs(60000 * right_outputs(Problem.parse(line))[0].outputs["y"]) > 70000
    pair = pair_of(line, "y", None, lambda array: np.where(beyond, np.float16(65504.0), array))
    assert pair.outcome == Outcome.WITHIN
    assert pair.unjudged == np.count_nonzero(beyond) > 0


def test_where_no_bound_holds_a_difference_is_undecided():
    line = "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=30000"
    pair = pair_of(line, "y", None, lambda a: a + np.float32(1e4), classes=(1, 1))
    assert (pair.outcome, pair.undecided, pair.over) == (Outcome.UNDECIDED, pair.elements, 0)


# ---------------------------------------------------------------- runs


def test_equal_runs_exit_with_0_and_are_not_unpacked(made, monkeypatch):
    monkeypatch.setattr(archive, "read_outputs", None)
    found, pair = only_pair(made("a"), made("b"))
    assert (pair.outcomes, pair.changes, pair.kind) == ({"equal": 3}, {}, "repeats")
    assert (found.exit_status, found.alone, found.only) == (0, [], {"A": [], "B": []})


def test_two_backends_of_one_run(made, tmp_path):
    made("a")
    # beside a right value of 16 bits the next one is wrong already
    made("b", "miopen", change=lambda line, name, a: nudged(a) if a.dtype.itemsize == 4 else None)
    both = archive.read_run(tmp_path / "a")
    other = archive.read_run(tmp_path / "b")
    for file in (tmp_path / "b" / "outputs").iterdir():
        file.rename(tmp_path / "a" / "outputs" / file.name)
    cases, infos = both["cases"] + other["cases"], both["backends"] + other["backends"]
    archive.write_run(tmp_path / "a", made_document(infos, cases))
    found, pair = only_pair(tmp_path / "a")
    assert (pair.first, pair.second, pair.kind) == ("A:cudnn", "A:miopen", "vendors")
    assert (pair.outcomes, pair.changes) == ({"within": 2, "equal": 1}, {})
    assert pair.second_nearer == 0 < pair.first_nearer
    pair.first_nearer, pair.second_nearer = 2, 1
    assert compare.nearer_text(pair) == "67 % : 33 %"
    assert found.exit_status == 0


CHANGES = {  # of each case what it was, what it is, and the change's name
    "passing again": ("wrong", "", Change.PASSING),
    "failing": ("", "wrong", Change.FAILING),
    "bits": ("", "moved", Change.BITS),
    "supported": (Status.UNSUPPORTED, "", Change.SUPPORTED),
    "refused": ("", Status.UNSUPPORTED, Change.UNSUPPORTED),
    "crash, timeout": (Status.CRASHED, Status.TIMEOUT, Change.OTHERWISE),
    "crash, right": (Status.CRASHED, "", Change.PASSING),
    "right, timeout": ("", Status.TIMEOUT, Change.FAILING),
    "same": ("", "", Change.NONE),
    "crash, refused": (Status.CRASHED, Status.UNSUPPORTED, Change.OTHERWISE),
}


def test_what_changed_between_two_versions(made):
    lines = {f"train,spatial,f32,nchw,4x3x5x5,fill=randn,seed={i}": row for i, row in enumerate(CHANGES.values(), 1)}
    lines |= {ONE_PASS: ("", "one pass", Change.WARNED)}
    changes = {"wrong": added(0.5, "y", lines=lines), "one pass": one_pass}
    changes["moved"] = lambda line, name, array: nudged(array, 3) if name == "y" else None

    def side(name, version, place):
        def change(line, output, array):
            return changes[of](line, output, array) if (of := lines[line][place]) in changes else None

        def status(line):
            return lines[line][place] if isinstance(lines[line][place], Status) else None

        return made(name, "cudnn", lines, version, change, status)

    before, now = side("a", (9, 0, 0), 0), side("b", (9, 2, 0), 1)
    found, pair = only_pair(before, now)
    assert (pair.kind, found.exit_status) == ("versions", 1)
    assert {c.case: c.change for c in found.cases} == {line: change for line, (*_, change) in lines.items()}
    regressions = (Change.FAILING, Change.UNSUPPORTED)
    assert {c.case for c in found.cases if c.change.regression} == {
        n for n, row in lines.items() if row[2] in regressions
    }
    assert pair.changes["newly failing"] == 2
    assert (pair.worse, pair.better) == (2, 0)  # the moved one and the one-pass one
    back, other = only_pair(now, before)
    changed = {c.case: c.change for c in back.cases}
    assert (changed[ONE_PASS], changed[next(iter(lines))], other.better) == (Change.UNWARNED, Change.FAILING, 2)


def test_a_regression_alone_exits_with_1(made):
    refuses = {LINES[0]: Status.UNSUPPORTED}.get
    before = made("a")
    found, pair = only_pair(before, made("b", version=(2, 0), status=refuses))
    assert (pair.outcomes, found.exit_status) == ({"refused": 1, "equal": 2}, 1)
    other = made("c", "miopen", status=refuses)  # another vendor may refuse what it likes
    assert only_pair(before, other)[0].exit_status == 0


def of_build(digest):
    info = BackendInfo("cudnn", "libcudnn", (1, 0, 0), "/lib/cudnn.so", "made", device="a device", digest=digest)
    return {"backends": [info]}


@table(
    ("first", "second", "kind"),
    [
        ({}, {}, "repeats"),
        ({}, {"environment": machine() | {"host": "host-00000000"}}, "machines"),
        ({}, {"environment": machine() | {"variables": {"OMP_NUM_THREADS": "77"}}}, "settings"),
        (of_build("aa"), of_build("bb"), "builds"),
        (of_build("bb"), of_build("bb"), "repeats"),
        (of_build("aa"), of_build(""), "repeats"),
    ],
)
def test_in_what_two_runs_of_one_library_differ(tmp_path, first, second, kind):
    folders = [make_run(tmp_path / n, "cudnn", LINES[:1], document=d) for n, d in (("a", first), ("b", second))]
    assert only_pair(*folders)[1].kind == kind


@pytest.mark.slow
def test_beyond_exits_with_1_and_shows_its_points(made, tmp_path):
    def wrong(line, name, array):
        if name == "y":
            array[1, 1] += array.dtype.type(0.5)
            return array
        return None

    status, text = told_by(made("a"), made("b", "miopen", change=wrong), "--json", tmp_path / "c.json")
    assert status == 1, text
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
    assert any(line.split()[1:4] == row for line in text.splitlines())
    assert [(a["alone"], a["output"]) for a in data["alone"]] == [("B:miopen", "y")] * 2
    assert data["exit_status"] == 1


def test_the_worst_output_decides_a_case(made):
    first = made("a", lines=LINES[:1])
    for wrong in ("y", "saved_mean", "running_variance"):
        (case,) = only_pair(first, made(wrong, "miopen", LINES[:1], change=added(0.5, wrong)))[0].cases
        assert case.outcome == Outcome.BEYOND
        assert {o.output for o in case.outputs if o.outcome != Outcome.EQUAL} == {wrong}


def test_each_side_is_held_to_the_class_that_held_it(made):
    (case,) = only_pair(made("a", lines=[ONE_PASS]), made("b", "miopen", [ONE_PASS], change=one_pass))[0].cases
    assert case.statuses == (Status.PASS, Status.WARN)
    classes = {o.output: o.classes for o in case.outputs}
    assert (classes["saved_inv_variance"], classes["saved_mean"]) == (("A", "B"), ("A", "A"))
    assert case.outcome == Outcome.WITHIN


def test_a_comparison_says_whether_bits_are_the_same(made):
    def otherwise(line, name, array):
        return nudged(array) if line == LINES[1] and name in ("y", "dx") else None

    first = made("a", lines=LINES[:2])
    _, same = only_pair(first, made("b", "cudnn", LINES[:2], (9, 2, 0)))
    assert compare.bits_text(same) == "the same bits in all 2 cases"
    other = made("c", "cudnn", LINES[:2], (9, 3, 0), otherwise)
    assert compare.bits_text(only_pair(first, other)[1]) == "the same bits in 1 of 2 cases, different bits in 1"
    assert "different bits in 1" in told_by(first, other)[1]


@table(
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
        paths.append(make_run(tmp_path / name, backend, LINES[:1], (number, 0), halved if name in wrong else moved))
        groups[name in wrong].append(f"{name}:{backend}")
    found = compared(*paths)
    (item,) = found.alone
    assert (item.alone, item.output) == (alone, "running_variance")
    assert sorted(map(sorted, item.groups)) == sorted(map(sorted, groups))
    assert found.exit_status == 1


# ---------------------------------------------------------------- what cannot be compared


def test_files_without_outputs_are_compared_by_status(made):
    first, second = made("a"), made("b", version=(2, 0), status={LINES[0]: Status.CRASHED}.get)
    found, pair = only_pair(first / "run.json", second / "run.json")
    assert (pair.outcomes, found.exit_status) == ({"differ": 1, "agree": 2}, 1)
    assert [c.case for c in found.cases if c.change.regression] == LINES[:1]
    assert any("A is a file without outputs" in notice for notice in found.notices)
    assert only_pair(first, first / "run.json")[1].outcomes == {"agree": 3}
    found, pair = only_pair(first, made("c", "miopen", status={LINES[1]: Status.CRASHED}.get))
    assert (pair.outcomes, found.exit_status) == ({"equal": 2, "differ": 1}, 1)  # a crash has none


@pytest.mark.parametrize("change", [None, moved])
def test_a_failure_beside_a_pass_is_a_difference_though_the_outputs_are_within(made, change):
    """As of a kernel that writes outside of its arrays: what it was to write is right."""
    first, second = made("a", lines=LINES[:1]), made("b", "miopen", LINES[:1], change=change)
    document = archive.read_run(second)
    (case,) = document["cases"]
    case.status, case.message = Status.FAIL, "wrote outside of y"
    archive.write_run(second, document)
    found, pair = only_pair(first, second)
    assert {o.outcome for o in found.cases[0].outputs} == {Outcome.WITHIN if change else Outcome.EQUAL}
    assert (pair.outcomes, found.exit_status) == ({"differ": 1}, 1)
    status, text = told_by(first, second)
    assert status == 1
    assert f"differ A:cudnn PASS, B:miopen FAIL: {LINES[0]}\n  B:miopen: wrote outside of y\n" in text
    case.status, case.message = Status.UNSUPPORTED, "no"
    archive.write_run(second, document)
    assert only_pair(first, second)[1].outcomes == {"refused": 1}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_run_is_not_overwritten_by_a_report(made, tmp_path, option):
    """Of ``compare --json a.json b.json c.json`` the option would take the first run for its file."""
    for name in "ab":
        (made(name, lines=LINES[:1]) / "run.json").rename(tmp_path / f"{name}.json")
    made("c", lines=LINES[:1])
    for target in ("a.json", "b.json", "c/run.json"):
        before = (tmp_path / target).read_bytes()
        status, text = told_by(option, tmp_path / target, tmp_path / "b.json", tmp_path / "c")
        assert status == 2
        assert f"{option} would overwrite the run {tmp_path / target}; use {option}=FILE to write elsewhere" in text
        assert (tmp_path / target).read_bytes() == before
    for _ in range(2):  # an earlier comparison is replaced
        assert told_by("--json", tmp_path / "old", tmp_path / "b.json", tmp_path / "c")[0] == 0
    assert json.loads((tmp_path / "old").read_text())["schema"] == compare_document.SCHEMA


@pytest.mark.slow
def test_what_is_no_run_is_refused_by_name_before_memory_or_time_run_out(made, tmp_path):
    good = made("good", lines=LINES[:1])
    document = json.loads((good / "run.json").read_text())
    document["cases"] = [{"backend": "cudnn", "case": LINES[0], "status": "PASS"}] * 120_000
    (tmp_path / "many").write_text(json.dumps(document))
    (tmp_path / "journal").mkdir()
    os.mkfifo(tmp_path / "journal" / "journal.jsonl")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for name, reason in {
        "journal": "no regular file",
        "sparse": "larger than 2147483648 bytes",
        "many": f"it has a case twice: cudnn {LINES[0]}",
    }.items():
        status, text = told_by(good, tmp_path / name)
        assert (status, reason in text, f"RUN: got {tmp_path / name}" in text) == (2, True, True), text


def test_outputs_of_another_case_or_backend_are_refused(made):
    """They were compared as if they were of the case whose name they have, and the exit status was 0."""
    lines = ["infer,spatial,f32,nchw,2x3,fill=randn", "infer,spatial,f32,nchw,2x3,fill=randn,seed=1"]
    folders = made("a", lines=lines), made("b", lines=lines), made("c", "miopen", lines)
    (mine, seeded), (target, _), (other, _) = (sorted((folder / "outputs").iterdir()) for folder in folders)
    whole, header = mine.read_bytes(), "a whole file of pybnorm check --save (it is of"
    for content, reason in (
        (seeded.read_bytes(), header),
        (other.read_bytes(), header),
        (whole[:-1], "File is not a zip file"),
        (b"", "a whole file"),
    ):
        target.write_bytes(content)
        status, text = told_by(*folders[:2])
        assert (status, reason in text, str(target) in text) == (2, True, True), text
    target.write_bytes(whole)
    assert told_by(*folders[:2])[0] == 0
    # whole by every checksum, and without what the case has written
    for arrays in ({}, {"y": np.ones(5, np.float32)}):
        archive.write_outputs(folders[1], "cudnn", Problem.parse(lines[0]), arrays)
        assert told_by(*folders[:2])[0] == 2


# ---------------------------------------------------------------- what a later run lost


def gone(folder, backend, others=(), **document):
    """A run in which a backend could not run; others judged what it did not."""
    folder.mkdir(exist_ok=True)
    infos = [BackendInfo(backend, problem="no device"), *map(BackendInfo, others)]
    results = [made_result(Status.PASS, LINES[0], other) for other in others]
    archive.write_run(folder, made_document(infos, results) | document)
    return folder


def test_a_backend_that_is_gone_from_a_later_run_is_a_regression(made, tmp_path):
    first, second = made("a"), gone(tmp_path / "b", "cudnn")
    status, text = told_by(first, second, "--json", tmp_path / "c.json")
    assert status == 1
    assert "B:cudnn: 3 cases that A judged could not run there: no device\n" in text
    (lost,) = json.loads((tmp_path / "c.json").read_text())["lost"]
    assert (lost["backend"], lost["first"], lost["second"], lost["cases"]) == ("cudnn", "A", "B", 3)
    assert compared(second, first).exit_status == 2  # the other way round it came
    refusing = made("d", status=dict.fromkeys(LINES, Status.UNSUPPORTED).get)
    assert compared(refusing, second).exit_status == 2  # what was only refused is not lost
    other = machine() | {"host": "host-00000000"}  # has not lost what it never had, if it is of another kind
    for backends, environment, lost in ((["miopen"], other, 0), (["miopen"], machine(), 1), ([], other, 1)):
        found = compared(first, gone(tmp_path / "b", "cudnn", backends, environment=environment))
        assert len(found.lost) == lost, (backends, environment)
        assert ("B:cudnn: 3 cases that A judged could not run there: no device" in found.notices) == (not lost)


def test_a_later_run_that_is_not_complete_has_lost_the_rest(made):
    first, second = made("a"), made("b", lines=LINES[:1], document={"complete": False})
    found, pair = only_pair(first, second)
    assert (pair.outcomes, found.exit_status) == ({"equal": 1}, 1)
    told = "B:cudnn: 2 cases that A judged were not run there: it is not complete"
    assert [compare.lost_text(item) for item in found.lost] == [told]
    assert only_pair(second, first)[0].exit_status == 0
    assert only_pair(first, made("c", document={"complete": False}))[0].exit_status == 0


@pytest.mark.slow
def test_cases_of_one_run_only_are_named(made):
    folders = made("a", lines=LINES[:2]), made("b", lines=LINES[1:])
    found, pair = only_pair(*folders)
    assert found.only == {"A": LINES[:1], "B": LINES[2:]}
    assert (pair.only_first, pair.only_second) == (LINES[:1], LINES[2:])
    status, text = told_by(*folders)
    assert status == 0
    only = "libcudnn 1.0.0 (A) to libcudnn 1.0.0 (B): no change in 1 case"
    only += "".join(f"; 1 case only in libcudnn 1.0.0 ({side}), not compared" for side in "AB")
    assert text.endswith(f"\n{only}.\n")
    assert compare_document.document(found)["conclusions"] == [{"sentence": f"{only}.", "good": True}]
    for side, line in (("A", LINES[0]), ("B", LINES[2])):
        assert f"only in {side}: 1 case\n    {line}\n" in text


@pytest.mark.slow
def test_nothing_comparable_exits_with_2(made, tmp_path):
    first, second = made("reports/run", lines=LINES[:1]), made("b", lines=LINES[1:])
    refusing = made("c", "miopen", status=dict.fromkeys(LINES, Status.UNSUPPORTED).get)
    for words, told in (
        ([], "RUN"),
        ([first, second], "Nothing to compare"),
        ([first], "Nothing to compare: this is one run of one library."),
        ([tmp_path / "reports", second], f"(did you mean '{tmp_path}/reports/run'?)"),
        ([first, refusing], ""),
        ([first, first, "--html", f"{__file__}/x"], f"--html: got {__file__}/x, allowed: a file that can be written"),
    ):
        status, text = told_by(*words)
        assert (status, told in text) == (2, True), text


def test_runs_of_another_version_or_incomplete_are_noticed(made):
    environment = machine() | {"pybnorm": "99.0"}
    first = made("a", lines=LINES[:1])
    later = made("b", lines=LINES[:1], document={"environment": environment, "complete": False})
    notices = only_pair(first, later)[0].notices
    assert any(f"B is of pybnorm 99.0, this is {pybnorm.__version__}: " in notice for notice in notices)
    assert "B is not complete" in notices
    later = made("c", lines=LINES[:1], document={"environment": environment, "schema": "pybnorm.check/2"})
    told = (
        rf"pybnorm 99\.0 wrote it as 'pybnorm\.check/2'; this is pybnorm {pybnorm.__version__}, which reads .*check/1'"
    )
    with pytest.raises(ArgumentError, match=told):
        compare.read([later])


def test_a_line_of_a_later_language_is_compared_by_status(tmp_path):
    result = made_result(Status.PASS, LINES[0] + ",an_option_of_the_future=1", saved="outputs/none.npz")
    archive.write_run(tmp_path, made_document([BackendInfo("cudnn")], [result]))
    assert only_pair(tmp_path / "run.json", tmp_path / "run.json")[1].outcomes == {"agree": 1}


def test_an_interrupted_run_is_compared_from_its_journal(made):
    first, second = made("a"), made("b")
    document = archive.read_run(second)
    (second / "run.json").unlink()
    with archive.Journal(second, resume=True) as journal:
        journal.begin(document["backends"])
        journal.append(document["cases"][0])
    found, pair = only_pair(first, second)
    assert (pair.outcomes, pair.only_first) == ({"equal": 1}, LINES[1:])
    assert "B is not complete" in found.notices


@pytest.mark.slow
def test_real_runs_are_compared(tmp_path, onednn):
    case = "train/infer/backward,spatial,f32/f64,nchw/nhwc,8x40x9x9,fill=randn,kappa=3"
    words = ("check", "--backend", "onednn", "--jobs", "1", "--case", case, "--save")
    for name, isa in (("a", "AVX2"), ("b", "SSE41")):
        done = run(*words, tmp_path / name, ONEDNN_MAX_CPU_ISA=isa)
        assert done.returncode == 0, done.stdout + done.stderr
    status, text = told_by(tmp_path / "a", tmp_path / "b", "--json", tmp_path / "c.json")
    assert status == 0, text
    data = json.loads((tmp_path / "c.json").read_text())
    (pair,) = data["pairs"]
    assert pair["kind"] == "settings"
    assert pair["outcomes"]["refused"] == 6
    assert pair["outcomes"].get("equal", 0) + pair["outcomes"].get("within", 0) == 6
    assert [run_["outputs"] for run_ in data["runs"]] == [6, 6]


# ---------------------------------------------------------------- known defects


@pytest.mark.parametrize("known", ["", "X-1"])
def test_a_run_beside_itself_has_no_change_and_one_voice(made, known):
    folder = made("a", "onednn", change=halved, known=known)
    found = compared(folder, folder)
    assert (found.alone, found.exit_status) == ([], 0)
    (said,) = compare_conclusions.found(found)
    assert said.good
    assert "no change in 3 cases, 1 of them wrong in both." in said.sentence


@pytest.mark.slow
def test_known_defects_are_counted_apart_and_can_be_allowed(made):
    first = made("a", "onednn")
    both = made("b", "onednn", LINES, (2, 0), halved, known="X-1"), made("c", "cudnn", change=halved, known="Y-1")
    for allows in (False, True):
        found = compared(first, *both, allow_known=allows)
        assert found.exit_status == (0 if allows else 1)
        said = compare_conclusions.found(found)
        assert all(f.good for f in said) == allows
        texts = " ".join(f.sentence for f in said)
        assert f"1 newly failing (1 by known defects{', allowed' if allows else ''})" in texts
    assert compared(first, made("new", "onednn", LINES, (2, 0), halved), allow_known=True).exit_status == 1
    # both wrong alike: the reference stands alone
    assert told_by(*both, "--allow-known")[0] == 0
    status, text = told_by(*both)
    assert status == 1
    assert "In 1 case all libraries agree with one another and not with the reference, by known defects." in text
    assert "Where the reference stands alone, it is wrong or all libraries share a convention" in text


def test_changed_bits_are_within_the_bounds_and_may_be_wrong_in_both(made):
    def first(line, name, array):
        return halved(line, name, array) if "seed=2" in line else None

    def second(line, name, array):
        changed = first(line, name, array)
        return nudged(array if changed is None else changed) if name.startswith("running") else None

    lines = [f"{LINES[0]},seed={seed}" for seed in (1, 2, 3)]
    folders = made("a", "onednn", lines, change=first), made("b", "onednn", lines, (2, 0), second)
    *_, said = compare_conclusions.found(compared(*folders))
    wrong = "all changes are within the sum of both bounds, 1 of them wrong in both."
    assert said.sentence.endswith(f"bits changed in 3 cases, {wrong}")
