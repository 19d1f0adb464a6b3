"""``pybnorm versions``: first bad and first good version of each case, as tables, Markdown, JSON and a page."""

import importlib.resources
import json

import pytest
from click.testing import CliRunner
from made_runs import made_document, made_result, make_run

from pybnorm.check.compare import versions
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo, to_json
from pybnorm.cli import main

SHAPES = "8x6x8x5", "3x5x4x7"  # of smoke
LINES = {f"train,spatial,f32,nchw,{SHAPES[0]}": "PFF", f"train,spatial,f32,nhwc,{SHAPES[0]}": "FFP"}
WORDS = {"P": Status.PASS, "F": Status.FAIL}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    own = {"smoke": [*LINES, f"infer,spatial,f32,nchw,{SHAPES[1]}"]}
    own["edges"] = [*own["smoke"], "infer,spatial,f32,nchw,7x7x7x7"]  # of which no version ran all
    monkeypatch.setattr(versions, "packaged_suites", lambda: tuple(own))
    monkeypatch.setattr(versions, "load_suite", lambda name: own[name])
    files = []
    for i, version in enumerate(((3, 2, 0), (3, 6, 2), (3, 13, 2))):
        results = [made_result(WORDS[statuses[i]], line, "onednn") for line, statuses in LINES.items()]
        results += [made_result(Status.PASS, f"infer,spatial,f32,nchw,{SHAPES[1]}", "onednn")]
        gone = "PART is missing" if i == 1 else ""
        results += [made_result(Status.CRASHED, "infer,spatial,bf16,nchw,2x2x2x2", "onednn", message=gone)]
        results += [made_result(Status.PASS, f"infer,spatial,f32,nchw,{i + 2}x9x9x9", "onednn")]
        infos = [BackendInfo("onednn", "oneDNN", version, "/lib/x", "made", device="a machine")]
        files.append(tmp_path / f"{version[1]}.json")
        files[-1].write_text(json.dumps(to_json(made_document(infos, results))))
    return files


def command(*arguments):
    return CliRunner().invoke(main, ["versions", *map(str, arguments)])


def test_first_bad_and_first_good_are_told(runs):
    done = command("--without", "PART", *runs)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "- 3.2.0: 1 of 3 cases is wrong.",
        "- 3.6.2: 2 of 3 cases are wrong; 1 newly.",
        "- 3.13.2: 1 of 3 cases is wrong; 1 no longer.",
    ]
    assert lines[6] == "| 3.2.0 | a machine | 5 | 3 | 0 | 0 | 0 | 1 CRASHED, 1 FAIL |"
    assert [line.rsplit(" | ", 2)[1:] for line in lines if line.startswith("| `train")] == [
        ["3.6.2", "- |"],
        ["3.2.0", "3.13.2 |"],
    ]
    assert "| smoke | 2/3 | 1/3 | 2/3 |" in lines
    assert "edges" not in done.stdout
    (told,) = [line for line in lines if "ran on all" in line]
    assert told.startswith("1 case is left out. 3 cases ran on all.")
    assert "PASS" in lines[-2]
    assert "FAIL" in lines[-1]


def test_every_report_is_written(runs, tmp_path, plots):
    jsonschema = pytest.importorskip("jsonschema")
    files = {name: tmp_path / f"new.{name}" for name in ("json", "html", "markdown")}
    done = command(*runs, *(word for name, file in files.items() for word in (f"--{name}", file)))
    assert done.exit_code == 0, done.output
    schema = json.loads((importlib.resources.files("pybnorm.check") / "schema.json").read_text())
    document = json.loads(files["json"].read_text())
    assert [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(document)] == []
    assert [(c["first_bad"], c["first_good"]) for c in document["cases"]] == [
        ("3.2.0", ""),
        ("3.6.2", ""),
        ("3.2.0", "3.13.2"),
    ]
    assert files["markdown"].read_text() == "# pybnorm versions\n\n" + done.stdout
    page = files["html"].read_text()
    assert "3.6.2: 3 of 4 cases are wrong; 1 newly." in page
    assert "3.13.2: 2 of 4 cases are wrong; 1 no longer." in page
    assert json.loads(command(*runs, "--json").stdout)["schema"] == "pybnorm.versions/1"
    assert command(*runs, *(w for n, f in files.items() for w in (f"--{n}", f))).exit_code == 0  # over its own


def test_what_is_no_run_of_one_library_is_refused(runs, tmp_path):
    other = tmp_path / "other.json"
    info = BackendInfo("cudnn", "cuDNN", (9,), "/lib/y", "made", device="a GPU")
    other.write_text(json.dumps(to_json(made_document([info], [made_result(Status.PASS)]))))
    done = command(*runs, other)
    assert done.exit_code == 2
    assert "a run of one library, onednn" in done.output
    done = command(tmp_path / "none")
    assert done.exit_code == 2


@pytest.fixture
def no_suites(monkeypatch):
    monkeypatch.setattr(versions, "packaged_suites", lambda: ())  # to read them takes seconds


def test_runs_of_one_version_are_told_apart(tmp_path, no_suites):
    for name in ("debian", "pip"):
        make_run(tmp_path / name, "onednn", ["infer,spatial,f32,nchw,2x3x4x5"])
    found = versions.matrix(versions.read([tmp_path / "debian", tmp_path / "pip"]))
    assert [v.name for v in found.versions] == ["1.0.0 (debian)", "1.0.0 (pip)"]
    assert [text for text, _ in versions.sentences(found)] == [
        f"1.0.0 ({name}): none of 1 case is wrong{more}." for name, more in (("debian", ""), ("pip", "; no change"))
    ]


@pytest.mark.slow
def test_a_page_on_which_all_is_right_has_no_empty_table(tmp_path, no_suites, plots):
    for name in ("a", "b"):
        make_run(tmp_path / name, "onednn", ["infer,spatial,f32,nchw,2x3x4x5"])
    assert command("--html", tmp_path / "page.html", tmp_path / "a", tmp_path / "b").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert "No change: every case is correct on every version." in text
    assert 'id="cases"' not in text


def test_a_suite_that_a_version_ran_in_part_and_known_defects_are_told_as_that(runs):
    whole, part = versions.read(runs[:2])
    name = f"infer,spatial,f32,nchw,{SHAPES[1]}"
    del part.results[name]
    for version in (whole, part):
        for result in version.results.values():
            result.known = "" if result.status.good else "X-1"
    found = versions.matrix([whole, part])
    assert [str(share) for share in found.suites["smoke"]] == ["2/3", "0/2, 2 of 3 run"]
    text = versions.markdown(found)
    assert "2 of 3 cases are wrong (2 by known defects: X-1)." in text
    assert "1 CRASHED (0 new, 1 known), 1 FAIL (0 new, 1 known)" in text
    assert "| FAIL inf (X-1) |" in text
    same = versions.sentences(versions.matrix([whole, whole]))
    assert same[1][0].endswith("; no change.")
