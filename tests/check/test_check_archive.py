"""Runs kept in a folder: outputs bit for bit, and journals that outlive a kill."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
from tables import table

from pybnorm.check.judging.bounds import Point, Status, Verdict
from pybnorm.check.judging.results import SCHEMA, from_json, to_json
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import archive, environment
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError

LINE = "train,spatial,bf16,nhwc,2x3x4x5"
PROBLEM = Problem.parse(LINE)
INFO = BackendInfo("onednn", "oneDNN", (3, 8, 1), "/lib/libdnnl.so.3", "loader", (), "CPU")
OTHER = LINE + ",seed=1"
ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)


def result(case=LINE, **values):
    point = Point((0, 1, 2, 3), 1.5, float("nan"), 1e-7, float("inf"))
    verdict = Verdict("y", Status.FAIL, "B", float("inf"), {"A": float("inf"), "B": 3.0}, 120, 1, worst=[point])
    return CaseResult("onednn", case, Status.FAIL, [verdict], "text\x00\n", "equal", "RUNS", 0.25, **values)


def written(folder, outputs, line=LINE, backend="onednn"):
    return archive.write_outputs(folder, backend, Problem.parse(line), outputs)


def noted(folder, *results):
    """A journal of a run that ended after these."""
    with archive.Journal(folder) as journal:
        journal.begin([INFO])
        for one in results:
            journal.append(one)


def finished(folder, *more, infos=()):
    """What a run that is resumed takes from its journal; it notes more."""
    with archive.Journal(folder, resume=True) as journal:
        if infos:
            journal.begin(infos)
        found = journal.finished()
        for one in more:
            journal.append(one)
    return found


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("dtype", list(DataType), ids=lambda d: d.short)
def test_outputs_come_back_in_every_bit(tmp_path, dtype):
    words = np.random.default_rng(1).integers(0, 256, (2, 3, 4, 5, dtype.itemsize), np.uint8)  # NaN payloads included
    values = words.view(numpy_dtype(dtype))[..., 0]
    special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45]).astype(numpy_dtype(dtype))
    outputs = {"y": values, "strided": values.transpose(0, 2, 3, 1)[::2], "special": special, "saved_mean": values[:0]}
    saved = written(tmp_path, outputs)
    back = archive.read_outputs(tmp_path, saved)
    assert list(back) == list(outputs)
    for name, array in outputs.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()
        assert archive.output_digests(tmp_path, saved)[name] == archive.digest(array)
    assert (tmp_path / saved).is_file()


def test_a_digest_tells_what_comparison_by_value_does_not():
    assert archive.digest(ZEROS) == archive.digest(ZEROS.copy())
    for other in (-ZEROS, ZEROS.reshape(3, 1), ZEROS.view(np.int32)):
        assert archive.digest(ZEROS) != archive.digest(other)


def test_outputs_are_compressed(tmp_path):
    values = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    for array, share in ((values, 0.9), (np.tile(values[:8], 25_000), 0.05)):  # interleaved bytes do not get there
        assert (tmp_path / written(tmp_path, {"y": array})).stat().st_size < share * array.nbytes


def test_each_backend_and_case_has_its_own_file_and_the_last_write_counts(tmp_path):
    first, *others = written(tmp_path, {"y": ONES}), written(tmp_path, {"y": ZEROS}, backend="cudnn")
    others.append(written(tmp_path, {"y": ZEROS}, OTHER))
    assert len({first, *others}) == 3
    assert archive.read_outputs(tmp_path, first)["y"][0] == 1
    assert written(tmp_path, {"y": ZEROS}) == first
    assert archive.read_outputs(tmp_path, first)["y"][0] == 0
    assert len(list((tmp_path / "outputs").iterdir())) == 3  # nothing temporary is left


def test_a_damaged_or_absent_output_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"0\.npz.*No such file"):
        archive.output_digests(tmp_path, f"outputs/{'0' * 32}.npz")
    with pytest.raises(ArgumentError, match=r"absent\.npz"):
        archive.output_digests(tmp_path, "outputs/absent.npz")
    for few in (1, 121):
        saved = written(tmp_path, outputs() | {"y": np.ones(few, np.float32)})
        with pytest.raises(ArgumentError, match="its y has the shape"):
            archive.output_digests(tmp_path, saved, "onednn", LINE)


@pytest.mark.slow
def test_every_damaged_byte_of_an_output_file_is_an_argument_error(tmp_path):
    """An encrypted member, a compression that nobody has, a shape that no memory holds."""
    saved = written(tmp_path, {"y": np.arange(6, dtype=np.float32)})
    whole = (tmp_path / saved).read_bytes()
    kinds, texts = set(), []
    for place, bits in itertools.product(range(len(whole)), (1, 0x40)):
        (tmp_path / saved).write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
        for read in (archive.read_outputs, archive.output_digests):
            try:
                read(tmp_path, saved)
            except ArgumentError as error:
                assert saved in str(error)
                kinds.add(type(error.__context__).__name__)
                texts.append(str(error))
    assert {"NotImplementedError", "ValueError", "BadZipFile"} <= kinds
    assert any("is encrypted" in text for text in texts)


def test_a_file_whose_values_were_exchanged_has_not_its_digest(tmp_path):
    saved = written(tmp_path, {"y": np.ones(8, np.float32)})
    with np.load(tmp_path / saved) as members:
        header = members["header"]
    np.savez(tmp_path / saved, header=header, y=np.zeros((4, 8), np.uint8))
    with pytest.raises(ArgumentError, match="y does not have its digest"):
        archive.read_outputs(tmp_path, saved)


def test_only_floating_point_outputs_are_taken(tmp_path):
    with pytest.raises(ArgumentError, match="int32"):
        written(tmp_path, {"y": np.zeros(3, np.int32)})
    assert not list(tmp_path.rglob("*.npz"))


# ---------------------------------------------------------------- results


def test_results_and_libraries_survive_json():
    for original in (result(known="X-1", saved="outputs/x.npz"), CaseResult("cudnn", LINE, Status.CRASHED)):
        text = json.dumps(to_json(original), allow_nan=False)
        back = from_json(CaseResult, json.loads(text))
        assert repr(back) == repr(original)  # not ==, for NaN
    info = BackendInfo("cudnn", "cuDNN", (9, 1, 0), "/x", "loader", (("a", "b", "c"),), problem="no device")
    assert from_json(BackendInfo, json.loads(json.dumps(to_json(info)))) == info


def test_results_of_other_versions_are_read():
    data = to_json(result()) | {"a_field_of_the_future": 1}
    del data["known"]
    assert from_json(CaseResult, data).known == ""
    with pytest.raises(TypeError):
        from_json(CaseResult, {"backend": "onednn", "case": LINE})


# ---------------------------------------------------------------- journal


def test_a_journal_gives_back_what_was_finished(tmp_path):
    with archive.Journal(tmp_path) as journal:
        journal.begin([INFO])
        journal.append(result())
        stream = journal._stream
        journal._stream = types.SimpleNamespace(write=lambda data: stream.write(data[:100]), close=stream.close)
        journal.append(result(OTHER))
        assert len(journal.finished()) == 2
    found = finished(tmp_path, infos=[INFO])
    assert list(found) == [("onednn", LINE), ("onednn", OTHER)]
    assert repr(dataclasses.asdict(found["onednn", LINE])) == repr(dataclasses.asdict(result()))
    document = archive.read_run(tmp_path)
    assert (document["complete"], document["backends"]) == (False, [INFO])
    assert [c.case for c in document["cases"]] == [LINE, OTHER]
    assert document["environment"]["pybnorm"] == machine()["pybnorm"]


def test_a_truncated_last_line_is_cut_off(tmp_path):
    noted(tmp_path, result(), result(OTHER))
    file = tmp_path / "journal.jsonl"
    whole = file.read_bytes()
    for lost in (1, 2, 100, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-lost])
        assert len(archive.read_run(tmp_path)["cases"]) == 1
        assert list(finished(tmp_path, result(LINE + ",seed=2"))) == [("onednn", LINE)]
        assert [c.case for c in archive.read_run(tmp_path)["cases"]] == [LINE, LINE + ",seed=2"]


def test_a_damaged_line_before_the_last_is_an_error_with_its_number(tmp_path):
    noted(tmp_path, result())
    file = tmp_path / "journal.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for bad in (b"{}", b"[1]", b'{"backend": "onedn', b'{"schema": "other/1"}', b"[" * 100_000):
        file.write_bytes(lines[0] + bad + b"\n" + lines[1])
        with pytest.raises(ArgumentError, match=r"journal\.jsonl:2"):
            archive.Journal(tmp_path, resume=True)
        with pytest.raises(ArgumentError, match=r"journal\.jsonl:2"):
            archive.read_run(tmp_path)


def outputs():
    """Of the shapes that the problem's own have."""
    statistics = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
    rng = np.random.default_rng(5)
    made = {name: rng.standard_normal(PROBLEM.parameter_dims).astype(np.float32) for name in statistics}
    return {"y": rng.standard_normal(PROBLEM.dims).astype(numpy_dtype(PROBLEM.dtype))} | made


@table(
    "damage",
    [
        lambda whole, other: None,
        *(lambda whole, other, left=left: whole[:left] for left in (0, 20, 100, 700, -1)),
        lambda whole, other: whole[:-900] + bytes(16) + whole[-884:],
        lambda whole, other: other,
    ],
)
def test_a_case_whose_outputs_are_not_whole_is_not_finished_and_is_written_anew(tmp_path, damage):
    saved, other = written(tmp_path, outputs()), written(tmp_path, outputs(), OTHER)
    noted(tmp_path, result(saved=saved), result(OTHER, saved=other))
    assert len(finished(tmp_path)) == 2
    content = damage((tmp_path / saved).read_bytes(), (tmp_path / other).read_bytes())
    (tmp_path / saved).unlink() if content is None else (tmp_path / saved).write_bytes(content)
    assert list(finished(tmp_path)) == [("onednn", OTHER)]
    assert written(tmp_path, outputs()) == saved
    assert len(finished(tmp_path)) == 2


def test_a_journal_that_names_other_files_has_none_of_them_removed(tmp_path):
    mine = tmp_path / "thesis"
    mine.write_text("of years")
    folder = tmp_path / "run"
    names = ("../thesis", str(mine), "journal.jsonl", "outputs/../../thesis")
    noted(folder, *(result(f"{LINE},seed={number}", saved=saved) for number, saved in enumerate(names, 1)))
    assert not finished(folder)
    assert mine.read_text() == "of years"
    with pytest.raises(ArgumentError, match="a run has no such file"):
        archive.read_outputs(folder, "../thesis")


@table(("name", "resume"), itertools.product(["journal.jsonl", "run.json", "outputs", "a link"], [False, True]))
def test_a_folder_with_files_of_somebody_else_is_left_as_it_is(tmp_path, name, resume):
    """A journal without a newline was cut to nothing, and a run.json without a journal replaced."""
    folder, thesis = tmp_path / "run", tmp_path / "thesis"
    folder.mkdir()
    thesis.write_text("no newline")
    if name == "a link":
        (folder / "journal.jsonl").symlink_to(thesis)
    else:
        (folder / name).write_text("no newline")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArgumentError, match="--save"):
        archive.Journal(folder, resume=resume)
    assert thesis.read_text() == "no newline"
    assert {file.read_text() for file in folder.iterdir() if file.is_file()} == {"no newline"}
    assert set(sorted(tmp_path.rglob("*"))) - set(before) <= {folder / "outputs"}


def test_outputs_do_not_replace_a_file_of_somebody_else(tmp_path):
    saved = written(tmp_path, outputs())
    for content in (b"notes", b"PK\x03\x04 of another archive"):
        (tmp_path / saved).write_bytes(content)
        with pytest.raises(ArgumentError, match="outputs that pybnorm saved"):
            written(tmp_path, outputs())
        assert (tmp_path / saved).read_bytes() == content
    assert len(list((tmp_path / "outputs").iterdir())) == 1


def test_what_would_unpack_without_end_is_refused(tmp_path):
    saved = written(tmp_path, {"y": np.ones(3, np.float32)})
    with np.load(tmp_path / saved) as members:
        header, y = members["header"], members["y"]
    for change in (
        {"header": np.zeros(1 << 24, np.uint8), "y": y},
        {"header": header, "y": np.zeros(1 << 24, np.uint8)},
    ):
        np.savez_compressed(tmp_path / saved, **change)
        with pytest.raises(ArgumentError, match="bytes, more than"):
            archive.read_outputs(tmp_path, saved)


@table("status", Status)
def test_what_was_the_machines_at_that_time_is_run_again(tmp_path, status):
    good = CaseResult("onednn", LINE, Status.PASS)
    noted(tmp_path, good, CaseResult("onednn", LINE, status))
    again = status in (Status.RESOURCE, Status.TIMEOUT, Status.ERROR)
    assert [r.status for r in finished(tmp_path, good).values()] == ([] if again else [status])
    assert [r.status for r in finished(tmp_path).values()] == [Status.PASS]
    assert [c.status for c in archive.read_run(tmp_path)["cases"]] == [Status.PASS]


def test_a_run_is_not_mixed_into_another_one_by_mistake(tmp_path):
    noted(tmp_path)
    with pytest.raises(ArgumentError, match="--resume to go on"):
        archive.Journal(tmp_path)
    with archive.Journal(tmp_path, resume=True), pytest.raises(ArgumentError, match="no other run"):
        archive.Journal(tmp_path, resume=True)


@table("change", [{"version": (3, 9, 0)}, {"path": "/other"}, {"device": "another CPU"}])
def test_a_journal_of_another_library_is_refused(tmp_path, change):
    noted(tmp_path)
    other = BackendInfo(**(vars(INFO) | change))
    for infos in ([other], [INFO, other]):
        with pytest.raises(ArgumentError, match=r"the onednn that ran its finished cases: 3\.8\.1, /lib/lib"):
            finished(tmp_path, infos=infos)
    finished(tmp_path, infos=[INFO, BackendInfo("cudnn", problem="absent")])  # one more that did not run then


def test_a_journal_of_another_environment_is_refused(tmp_path, monkeypatch):
    noted(tmp_path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    with pytest.raises(ArgumentError, match="ONEDNN_MAX_CPU_ISA=SSE"):
        finished(tmp_path, infos=[INFO])
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setenv("PYBNORM_REQUIRE", "onednn")  # changes no result
    finished(tmp_path, infos=[INFO])
    monkeypatch.setattr(environment, "machine", lambda: {"pybnorm": "0", "variables": {}})
    with pytest.raises(ArgumentError, match="the pybnorm that ran"):
        finished(tmp_path, infos=[INFO])


# ---------------------------------------------------------------- run.json


def test_a_run_is_read_from_its_folder_and_from_its_file(tmp_path):
    document = {"schema": SCHEMA, "environment": {}, "backends": [INFO], "cases": [result()], "complete": True}
    archive.write_run(tmp_path, document)
    for path in (tmp_path, tmp_path / "run.json"):
        back = archive.read_run(path)
        assert back["complete"]
        assert back["backends"] == [INFO]
        assert [repr(dataclasses.asdict(case)) for case in back["cases"]] == [repr(dataclasses.asdict(result()))]


@table("text", ["", "[]", "{}", '{"schema": "pybnorm.check/99", "cases": []}', "{1", "[" * 100_000])
def test_what_is_no_run_is_named(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=r"RUN: got .*x\.json"):
        archive.read_run(file)
    for path in (tmp_path, tmp_path / "absent"):  # a folder with neither run.json nor journal
        with pytest.raises(ArgumentError, match="RUN"):
            archive.read_run(path)
