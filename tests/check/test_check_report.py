"""What is printed and written about a run: terminal, JSON and its schema, JUnit XML, HTML."""

import dataclasses
import html.parser
import importlib.resources
import io
import json
import math
import os
import platform
import re
import sys
import tracemalloc
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from command_here import run
from made_runs import made_document, made_result, make_run, nudged
from tables import table

import pybnorm
from pybnorm import cli
from pybnorm.check.compare import comparison as compare
from pybnorm.check.compare import conclusions as compare_conclusions
from pybnorm.check.compare import document as compare_document
from pybnorm.check.compare import pages, versions
from pybnorm.check.judging.bounds import Point, Status, Verdict
from pybnorm.check.judging.results import (
    allow_known,
    cell_text,
    exit_status,
    from_json,
    host_digest,
    json_parts,
    ratio_text,
    repro,
    to_json,
)
from pybnorm.check.language import vendor_lines
from pybnorm.check.report import html as page
from pybnorm.check.report import junit, markdown, terminal
from pybnorm.check.report import plots as drawings
from pybnorm.check.report.conclusions import conclusions
from pybnorm.check.report.console import Console
from pybnorm.check.report.patterns import causes
from pybnorm.check.run import archive, environment, support
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.defects import DEFECTS

INFOS = [
    BackendInfo("cudnn", "cuDNN", (9, 2, 0), "/lib/libcudnn.so.9", "made", device="NVIDIA <made>"),
    BackendInfo("miopen", problem="no libMIOpen.so.1"),
]
HERE = machine()
EVERY = [made_result(s, f"train,spatial,f32,nchw,2x3x4x5,seed={i}") for i, s in enumerate(Status)]


def printed(function, *arguments):
    stream = io.StringIO()
    function(Console(file=stream, width=200), *arguments)
    return stream.getvalue()


# ---------------------------------------------------------------- environment


def test_the_environment_names_versions_and_processor_and_no_person(monkeypatch):
    monkeypatch.setenv("MIOPEN_FIND_MODE", "3")
    monkeypatch.setenv("A_SECRET", "x")
    found = machine()
    assert found["pybnorm"] == pybnorm.__version__
    assert found["processors_usable"] <= found["processors"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert (found["variables"]["MIOPEN_FIND_MODE"], "A_SECRET" in found["variables"]) == ("3", False)
    text = json.dumps(found | {"platform": ""})
    for private in (platform.node(), os.environ.get("USER")):
        assert not private or private not in text
    assert host_digest("one") != host_digest("two")
    assert host_digest(found["host"]) == found["host"]
    data = to_json(dataclasses.replace(EVERY[0], host="node17.example:4711"))
    assert data["host"] == host_digest("node17.example") + ":4711"
    assert to_json(from_json(CaseResult, data))["host"] == data["host"]


def test_the_processor_and_drivers_are_read_from_what_linux_says(tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: fpu avx2 amx_bf16 avx512_fp16 other\n")
    assert environment.cpuinfo("model name", "cpu model", file=str(file)) == "A CPU @ 2 GHz"
    assert environment.cpu_flags(str(file)) == ["avx2", "avx512_fp16", "amx_bf16"]
    file.write_text("processor: 0\nFeatures: fp asimd asimdhp bf16\n")
    assert environment.cpu_flags(str(file)) == ["asimd", "asimdhp", "bf16"]
    assert environment.cpu_flags(str(tmp_path / "absent")) == []
    pattern = environment._DRIVERS["nvidia"][1]
    monkeypatch.setattr(environment, "_DRIVERS", {"nvidia": (str(file), pattern), "amdgpu": ("/nonexistent", ".")})
    for name in ("x86_64 Kernel Module", "Open Kernel Module for x86_64"):
        file.write_text(f"NVRM version: NVIDIA UNIX {name}  550.54.15  Release Build\nGCC version: 12")
        assert environment._drivers() == {"nvidia": "550.54.15"}


# ---------------------------------------------------------------- terminal


def test_every_status_has_a_style_and_a_row():
    text = printed(terminal.print_results, EVERY)
    for i, status in enumerate(Status):
        assert any(line.split()[:1] == [status.value] and f"seed={i}" in line for line in text.splitlines() if line)
        assert status in terminal.STYLES
        assert status.value in drawings.COLOURS


@table(
    ("status", "values", "there", "absent"),
    [
        (Status.FAIL, {"known": "CUDNN-X"}, ["known defect: CUDNN-X"], []),
        (Status.FAIL, {"claim": support.NEWLY_UNSUPPORTED}, ["newly unsupported"], []),
        (Status.WARN, {"claim": support.CLAIMED}, [], ["claimed", "index", "MIOpenDriver"]),
        (Status.FAIL, {"allowed": True}, [], ["index", "MIOpenDriver"]),
        (Status.FAIL, {}, ["index", "MIOpenDriver"], []),
        (Status.CRASHED, {"message": "\x1b[2J [bold]gone"}, ["\\x1b[2J [bold]gone"], ["\x1b"]),
        (
            Status.UNSUPPORTED,
            {"message": "a CPU has no streams"},
            ["UNSUPPORTED cudnn: a CPU has no streams (1 case)\n"],
            [],
        ),
        (Status.FAIL, {"message": "E: cudnn f: PBN_E_LIBRARY (-4): odd"}, ["E: cudnn f: odd\n"], ["PBN_E_LIBRARY"]),
    ],
)
def test_details_of_one_case(status, values, there, absent):
    result = made_result(status, **values)
    text, whole = printed(terminal.print_details, [result]), printed(terminal.print_details, [result], True)
    assert [word for word in there if word not in text] == []
    assert [word for word in absent if word in text] == []
    assert text.startswith(f"{status.value} ")
    assert status.good or all(line.splitlines()[0] in whole for line in vendor_lines.of_case(result.case).values())
    assert ("PBN_E_LIBRARY" in absent) == ("PBN_E_LIBRARY" in whole)


def test_known_defects_are_counted_apart():
    known = made_result(Status.FAIL, known="CUDNN-X")
    other = made_result(Status.FAIL, "train,spatial,f32,nchw,2x3x4x6")
    (row,) = [line for line in printed(terminal.print_results, [known, other]).splitlines() if "4x5" in line]
    assert "CUDNN-X" in row
    assert "2 FAIL (1 new, 1 known)" in printed(terminal.print_totals, [known, other], 1.0)
    assert "known" not in printed(terminal.print_results, [other])


def concluded(*results, infos=INFOS, **options):
    stream = io.StringIO()
    terminal.print_conclusions(Console(file=stream, width=40), infos, results, **options)
    (line,) = stream.getvalue().splitlines()  # however narrow the terminal is, so that it can be copied
    return line


def test_a_run_is_concluded_in_one_sentence():
    def case(status, number=0, ratio=0.5, **fields):
        found = Status.FAIL if status == Status.FAIL else Status.PASS
        verdicts = [dataclasses.replace(v, ratio=ratio, ratios={"A": ratio}) for v in made_result(found).verdicts]
        line = f"backward,spatial,f16,nhwc,2x3x4x{number + 1}"
        return CaseResult("cudnn", line, status, verdicts, **fields)

    passed, refused, loose = case(Status.PASS), case(Status.UNSUPPORTED), case(Status.WARN)
    output = passed.verdicts[0].output
    assert concluded(passed, passed) == "cuDNN 9.2.0: all 2 supported cases are within their bounds."
    assert concluded(passed, refused, complete=False) == (
        "cuDNN 9.2.0: so far, the one supported case is within its bounds; 1 is not supported."
    )
    assert concluded(passed, loose, refused, refused) == (
        "cuDNN 9.2.0: all 2 supported cases are within their bounds, 1 only within a looser one (WARN); "
        "2 are not supported."
    )
    assert concluded(refused, refused) == "cuDNN 9.2.0: none of 2 cases is supported."
    wrong = [case(Status.FAIL, 0, 2.5), case(Status.FAIL, 1, 38.4), case(Status.FAIL, 2, 3.0, known="CUDNN-X")]
    assert concluded(passed, *wrong, loose, refused) == (
        f"cuDNN 9.2.0: 3 of 6 cases are wrong (2 new, 1 known), worst: {output} of backward, spatial, f16, nhwc "
        "(38.4 times its bound); 1 is within its bounds; 1 is only within a looser bound (WARN); "
        "1 is not supported. See it again: pybnorm check --backend cudnn --case 'backward,spatial,f16,nhwc,2x3x4x2'"
    )
    for judge, told in (("numpy", ""), ("torch", "--judge torch ")):
        assert f"pybnorm check --backend cudnn {told}--case" in concluded(dataclasses.replace(wrong[0], judge=judge))
    assert "(infinitely many times its bound)" in concluded(case(Status.FAIL, 0, math.inf))
    hung = concluded(case(Status.MISTRUSTED), case(Status.TIMEOUT, 4), case(Status.RAISED), case(Status.RAISED))
    assert hung.startswith(
        "cuDNN 9.2.0: 1 of 4 cases did not end in time, such as backward, spatial, f16, nhwc; 2 raised an exception; "
        "1 could not have failed, which shows nothing. See it again: "
    )
    assert hung.endswith("2x3x4x5'")
    lost = concluded(made_result(Status.FAIL, claim=support.NEWLY_UNSUPPORTED), passed)
    assert lost.startswith("cuDNN 9.2.0: 1 of 2 cases is newly refused, ")
    broken = [
        CaseResult("cudnn", f"{word},spatial,f32,nchw,2x3", Status.BUILD_FAILED) for word in ("train", "backward")
    ]
    said = concluded(*broken, made_result(Status.PASS, "infer,spatial,f32,nchw,2x3x4x5"))
    assert "2 of 3 cases could not be compiled (infer did compile)" in said
    assert "could not be compiled (no operation did compile)" in concluded(*broken)


def test_the_worst_is_what_the_status_was_made_by():
    """Of a case that is wrong the ratio to the bound that failed, not a larger one to a bound that need not hold."""

    def case(seed, status, **classes):
        verdict = Verdict("y", status, list(classes)[-1], classes["A"], classes, 120, over=int(status == Status.FAIL))
        return CaseResult("cudnn", f"train,spatial,f32,nchw,2x3x4x{seed}", status, [verdict])

    low, high = case(1, Status.FAIL, A=400.0, B=1.91), case(2, Status.FAIL, A=30.0, B=2.92)
    loose = case(3, Status.WARN, A=3.67, B=0.5)
    infinite = case(4, Status.WARN, A=0.03)  # infinity for NaN, say: no bound made it
    every = [low, high, loose, infinite]
    (said,) = conclusions(INFOS[:1], every)
    assert said.worst is high
    assert "worst: y of train, spatial, f32, nchw (2.92 times its bound)" in said.sentence
    assert [cell_text(r.verdicts[0]) for r in every] == ["1.91B", "2.92B", "3.67B", "0.03"]
    assert page._times([low, high]) == "2.92 times the bound"
    assert page._times([loose]) == "3.67 times the bound"
    assert page._times([infinite]) == ""
    assert page._group_cell(every)["ratio"] == "2.92B"
    text = io.StringIO()
    markdown.write(text, INFOS[:1], every)
    assert text.getvalue().index("2.92B") < text.getvalue().index("1.91B")


ONE = re.compile(r"\b(1( \w+)? cases|all 1|1 case are)\b")


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, Status.UNSUPPORTED, Status.CRASHED, Status.ERROR])
def test_one_case_is_one_case(tmp_path, monkeypatch, status):
    """But in the line that scripts read, ``cudnn: 1 cases, 1 PASS``."""
    monkeypatch.setattr(versions, "packaged_suites", lambda: ())  # to read them takes seconds
    case = ["train,spatial,f32,nchw,2x3x4x5"]
    make_run(tmp_path / "a", "cudnn", case, status=lambda line: status)
    make_run(tmp_path / "b", "cudnn", case, (2, 0), lambda line, name, array: nudged(array, 10**6))
    make_run(tmp_path / "c", "cudnn", ["infer,spatial,f32,nchw,2x3x4x5"])
    make_run(tmp_path / "d", "cudnn", case, status=lambda line: status)
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    for arguments in (["report", a], ["report", a, "--markdown"], ["compare", a, b], ["compare", a, d],
                      ["compare", a, c], ["versions", a, b], ["versions", a, d]):  # fmt: skip
        text = CliRunner().invoke(cli.main, arguments).output
        text = re.sub(r"(?m)^\w+: 1 cases, 1 \w+$", "", text)
        assert "case" in text
        assert ONE.findall(text) == [], text


def test_every_status_is_counted_in_plain_words():
    for status in Status:
        text = concluded(made_result(status), made_result(Status.PASS))
        assert status in (Status.WARN, Status.CHAIN, Status.MISTRUSTED) or status.value not in text
        assert ("See it again" in text) != status.good
    both = [dataclasses.replace(INFOS[0], id=i, version=(9, int(i))) for i in "12"]
    results = [made_result(Status.PASS, library=i) for i in "12"]
    text = printed(terminal.print_conclusions, both, results)
    assert text.count("the one supported case") == 2
    assert "cuDNN 9.1 (cudnn@1): " in text


def test_the_conclusion_is_coloured_on_a_terminal():
    for status, colour in ((Status.PASS, "\x1b[32m"), (Status.FAIL, "\x1b[1;31m")):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, color_system="standard", no_color=False)
        terminal.print_conclusions(console, INFOS, [made_result(status), made_result(Status.UNSUPPORTED)])
        assert stream.getvalue().startswith(f"{colour}cuDNN 9.2.0: ")


def many():
    results = []
    for i in range(300):
        dtype, layout = ("f32", "bf16")[i % 2], ("nchw", "nhwc")[i // 2 % 2]
        status = Status.FAIL if i == 7 else Status.UNSUPPORTED if i % 10 == 3 else Status.PASS
        results.append(made_result(status, f"train,spatial,{dtype},{layout},2x3x4x5,seed={i}"))
    return results


def test_many_cases_are_shown_by_group_and_all_of_them_if_asked():
    results = many()
    text = printed(terminal.print_results, results)
    rows = [line.split() for line in text.splitlines()]
    groups = [row for row in rows if row[:1] == ["spatial"]]
    assert [row[1:3] for row in groups] == [["f32", "nchw"], ["f32", "nhwc"], ["bf16", "nchw"], ["bf16", "nhwc"]]
    assert [row[3] for row in groups] == ["75"] * 4
    assert sum("seed=" in line for line in text.splitlines()) == 1
    assert "seed=7" in text
    assert "300 cases; those that are neither PASS nor UNSUPPORTED (1) have a row, with -v all" in text
    full = printed(terminal.print_results, results, True)
    assert sum("seed=" in line for line in full.splitlines()) == 300
    few = printed(terminal.print_results, results[:200])
    assert sum("seed=" in line for line in few.splitlines()) == 200


def test_refusals_are_one_line_for_each_reason():
    text = printed(terminal.print_details, many())
    assert text.count("seed=") == 2  # the failure is named in its headline and in its repro line
    assert text.count("UNSUPPORTED cudnn") == 1
    assert printed(terminal.print_details, many(), True).count("seed=") >= 300
    said = "UnsupportedError: cudnn {}: PBN_E_UNSUPPORTED (-1): no [f64] here"
    every = [
        made_result(Status.UNSUPPORTED, f"train,spatial,f32,nchw,2x3x4x5,seed={i}", message=said.format(name))
        for i, name in enumerate(("batch_normalization_forward_training", "batch_normalization_backward"))
    ]
    assert printed(terminal.print_details, every) == "UNSUPPORTED cudnn: no [f64] here (2 cases)\n"
    whole = printed(terminal.print_details, every, True)
    assert whole.count("PBN_E_UNSUPPORTED") == 2
    assert [line.count("seed=") for line in whole.splitlines()] == [0, 1, 0, 1]


@pytest.mark.parametrize("columns", [20, 80, 119])
def test_cases_are_whole_and_come_first_on_a_narrow_terminal(columns):
    long = "train,spatial,f32,nchw,2x3x4x5,fill=randn,kappa=30,alpha=0.5,beta=-0.25,factor=0.125,saved=0,repeats=17"
    results = [*EVERY, made_result(Status.FAIL, long), made_result(Status.WARN, long + ",seed=99")]
    stream = io.StringIO()
    console = Console(file=stream, width=columns, force_terminal=True, color_system=None)
    terminal.print_results(console, results)
    terminal.print_details(console, results)
    lines = stream.getvalue().splitlines()
    for result in results:
        at = next(i for i, line in enumerate(lines) if line == result.case or line.startswith(f"{result.case}  "))
        told = lines[at].removeprefix(result.case) or lines[at + 1]
        assert told.split()[0] == result.status.value
        assert f"  {repro(result)}" in lines or result.status in (Status.PASS, Status.UNSUPPORTED)
    stream.truncate(0)
    terminal.print_results(console, many())
    assert "…" not in stream.getvalue() or columns < 60


def test_details_of_many_failures_are_cut_and_counted(monkeypatch):
    monkeypatch.setattr(terminal, "MANY", 12)
    monkeypatch.setattr(terminal, "DETAILS", 5)
    results = [made_result(Status.FAIL, f"train,spatial,f32,nchw,2x3x4x5,seed={i}") for i in range(15)]
    text = printed(terminal.print_details, results)
    assert text.count("FAIL cudnn train") == 5
    assert "and details of 10 more cases" in text
    assert printed(terminal.print_details, results, True).count("FAIL cudnn train") == 15
    assert printed(terminal.print_details, results[:12]).count("FAIL cudnn train") == 12


# ---------------------------------------------------------------- JSON


@pytest.fixture(scope="module")
def schema():
    jsonschema = pytest.importorskip("jsonschema")
    data = json.loads((importlib.resources.files("pybnorm.check") / "schema.json").read_text())
    kind = jsonschema.Draft202012Validator
    kind.check_schema(data)
    return kind(data, format_checker=kind.FORMAT_CHECKER)


def errors(schema, document):
    from jsonschema.exceptions import best_match

    error = best_match(schema.iter_errors(document))
    return "" if error is None else f"{error.json_path}: {error.message}"


def test_every_key_of_the_schema_is_described(schema):
    def walk(node, path):
        if isinstance(node, dict):
            for name, item in node.get("properties", {}).items():
                shared = item.get("$ref", "").rpartition("/")[2]
                target = schema.schema["$defs"][shared] if shared not in ("", "number", "index") else item
                plain = name == "index" or "const" in item  # which says what it is
                assert item.get("description") or target.get("description") or plain, f"{path}.{name}"
            if node.get("type") == "object" and "properties" in node:
                assert node["additionalProperties"] is False
                assert node["description"]
            for key, value in node.items():
                walk(value, f"{path}.{key}")
        elif isinstance(node, list):
            for value in node:
                walk(value, path)

    walk(schema.schema, "$")
    defined = schema.schema["$defs"]
    assert defined["status"]["enum"] == [s.value for s in Status]
    assert set(defined["outcome"]["enum"]) == {o.value for o in compare.Outcome}
    assert set(defined["change"]["enum"]) == {c.value for c in compare.Change}
    for status in Status:
        assert f"{status.value}:" in defined["status"]["description"]
    for name, kind in {"point": Point, "verdict": Verdict, "backend": BackendInfo}.items():
        assert set(defined[name]["properties"]) == {f.name for f in dataclasses.fields(kind)}
    assert set(defined["result"]["properties"]) == {f.name for f in dataclasses.fields(CaseResult)} | {"ratio", "repro"}


def test_documents_of_every_status_meet_the_schema(schema):
    more = made_result(Status.FAIL, known="X", claim="newly unsupported", host="h:1", saved="outputs/x.npz")
    document = json.loads(json.dumps(to_json(made_document(INFOS, [*EVERY, more])), allow_nan=False))
    assert errors(schema, document) == ""
    for change in ({"schema": "pybnorm.check/2"}, {"unknown": 1}, {"exit_status": 3}, {"complete": "yes"}):
        assert errors(schema, document | change)
    del document["cases"][0]["status"]
    assert errors(schema, document) == "$.cases[0]: 'status' is a required property"


@pytest.mark.parametrize("empty", [[], {}, (), "", None])
def test_a_document_written_in_parts_is_the_whole_one(empty):
    document = made_document(INFOS, EVERY) | {"empty": empty, "nested": [[], [[1]], {"a": [float("inf"), "b\nc"]}]}
    for whole in (document, {"empty": empty}, {}):
        text = "".join(json_parts(whole))
        assert json.loads(text) == json.loads(json.dumps(to_json(whole)))
        assert len(text.splitlines()) == text.count("\n")
    cases = [line for line in "".join(json_parts(document)).splitlines() if line.startswith('  {"backend": ')]
    assert len(cases) == len(EVERY) + len(INFOS)  # a line each


@pytest.mark.slow
def test_memory_of_writing_and_reading_a_run_does_not_grow_with_its_text(tmp_path, monkeypatch):
    """Each case's text and dictionaries are there while it is written or read, and not those of all."""
    monkeypatch.setattr(archive, "LARGEST", 1 << 20)  # as much is set aside before a file is read
    results = [dataclasses.replace(EVERY[0], case=f"train,spatial,f32,nchw,2x3x4x4,seed={i}") for i in range(1, 251)]
    tracemalloc.start()
    try:
        archive.write_run(tmp_path, made_document(INFOS, results))
        written = tracemalloc.get_traced_memory()[1]
        size = (tmp_path / "run.json").stat().st_size
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        document = archive.read_run(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(document["cases"]) == 250
    assert written < size / 2
    assert peak < held + 1.5 * size + before  # its bytes, and a part as text


def test_real_documents_meet_the_schema(schema, onednn):
    case = "train/infer/backward,spatial/peract,f32/bf16/f64,nchw,4x3x5x5,fill=exact/randn"
    words = ("--backend", "onednn", "--executor", "process", "--json", "--case", case)
    document = json.loads(run("check", *words).stdout)
    assert {c["status"] for c in document["cases"]} >= {"PASS", "UNSUPPORTED"}
    assert errors(schema, document) == ""


# ---------------------------------------------------------------- JUnit


def junit_of(results, infos=INFOS, missing=()):
    stream = io.StringIO()
    junit.write(stream, HERE, infos, results, missing)
    root = ET.fromstring(stream.getvalue())
    check_junit(root)
    return root


ELEMENTS = {  # with exactly these attributes, any of these children, and text or none
    "testsuites": ("name time tests failures errors", "testsuite", False),
    "testsuite": ("name time timestamp hostname tests failures errors skipped", "properties testcase", False),
    "properties": ("", "property", False),
    "property": ("name value", "", False),
    "testcase": ("classname name time", "skipped error failure system-out", False),
    **dict.fromkeys(("skipped", "error", "failure"), ("type message", "", True)),
    "system-out": ("", "", True),
}


def check_junit(root):
    """The structure that Jenkins (junit-10.xsd), GitLab and Surefire's schema all allow."""
    for element in root.iter():
        attributes, children, text = ELEMENTS[element.tag]
        assert set(element.attrib) | {"type"} == {*attributes.split(), "type"}
        assert {child.tag for child in element} <= set(children.split())
        assert re.fullmatch(r"\d+(\.\d{3})?", element.get("time", "0"))
        assert text or not "".join(filter(None, [element.text, *(child.tail for child in element)])).strip()
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in root:
        first, *cases = suite
        assert [first.tag, *(case.tag for case in cases)] == ["properties", *["testcase"] * len(cases)]
        assert all(len(case) <= 1 for case in cases)
        tags = {"failures": "failure", "errors": "error", "skipped": "skipped"}
        counted = {name: sum(case.find(tag) is not None for case in cases) for name, tag in tags.items()}
        for name, count in (counted | {"tests": len(cases)}).items():
            assert int(suite.get(name)) == count
            totals[name] += count
    assert all(int(root.get(name)) == totals[name] for name in ("tests", "failures", "errors"))


def test_every_status_has_its_junit_element():
    suite = junit_of(EVERY)[0]
    found = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    expected = {
        "PASS": [],
        "WARN": ["system-out"],
        "CHAIN": ["system-out"],
        "MISTRUSTED": ["system-out"],
        "UNSUPPORTED": ["skipped"],
        **{name: ["failure"] for name in ("INCONCLUSIVE", "NONDETERMINISTIC", "FAIL")},
        **{name: ["error"] for name in ("ERROR", "RESOURCE", "BUILD_FAILED", "RAISED", "CRASHED", "TIMEOUT")},
    }
    assert {r.status.value: found[r.case] for r in EVERY} == expected
    assert {case.get("classname") for case in suite.iter("testcase")} == {"cudnn.train"}
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    facts = {"library": "cuDNN", "version": "9.2.0", "device": "NVIDIA <made>", "pybnorm": pybnorm.__version__}
    assert properties.items() >= facts.items()


def test_a_junit_failure_holds_points_repro_and_known_defect():
    (failure,) = junit_of([made_result(Status.FAIL, known="CUDNN-X")]).iter("failure")
    assert failure.get("message") == "FAIL; known defect CUDNN-X; y: error / bound inf"
    assert failure.text.count("  [0,1,2,") == 10
    assert "[0,1,2,3] reference 4.25, got nan, bound 1e-06" in failure.text
    assert "pybnorm check --backend cudnn --case 'train,spatial" in failure.text


def test_junit_survives_what_libraries_say():
    text = '\x1b[31m<bad> & \x00 \ud800 \ufffe ]]> "quoted" ü 漢\n\tnext'
    (failure,) = junit_of([made_result(Status.FAIL, message=text)]).iter("failure")
    assert '\\x1b[31m<bad> & \\x00 \\ud800 \\ufffe ]]> "quoted" ü 漢\n\tnext' in failure.text


def test_absent_libraries_in_junit(tmp_path):
    assert junit_of(EVERY[:1])[1].find("testcase/skipped").get("message") == "no libMIOpen.so.1"
    error = junit_of(EVERY[:1], missing=["miopen"])[1].find("testcase/error")
    assert error.get("type") == "absent"
    named = [BackendInfo("onednn", problem="invalid ELF header", override="PYBNORM_LIB_ONEDNN")]
    assert junit_of([], named).find("testsuite/testcase/error") is not None
    two = [dataclasses.replace(INFOS[0], id=name) for name in "ab"]
    assert junit_of(EVERY[:1], two).get("tests") == "1"  # of no library that is known: told once
    junit.write(tmp_path / "x.xml", machine(), INFOS, EVERY)
    check_junit(ET.parse(tmp_path / "x.xml").getroot())


def test_an_allowed_defect_is_a_notice_in_every_report(plots):
    shown = io.StringIO()
    results = [made_result(Status.FAIL, known="CUDNN-X"), made_result(Status.PASS, "infer,spatial,f32,nchw,2x3x4x5")]
    assert not results[0].good
    assert exit_status(results, []) == 1
    allow_known(results)
    assert exit_status(results, []) == 0
    markdown.write(shown, INFOS, results)
    said = "cuDNN 9.2.0: 1 of 2 supported cases is wrong by known defects, which is allowed; all others are within"
    page, _ = page_of(results)
    assert "(0 new, 1 known, allowed)" in page
    for text in (printed(terminal.print_conclusions, INFOS, results), shown.getvalue(), page):
        assert said in text
        assert "See it again" not in text
    assert "1 FAIL (0 new, 1 known, allowed)" in printed(terminal.print_totals, results, 1.0)
    assert "known defect, allowed: CUDNN-X" in printed(terminal.print_details, results)
    assert "## Known defects, allowed: 1 case" in shown.getvalue()
    assert "What is wrong" not in shown.getvalue()
    (line,) = markdown.ci_annotations(results)
    assert line.startswith("::notice title=cudnn%3A FAIL::")
    suite = junit_of(results)[0]
    assert suite.get("failures") == "0"
    assert "known defect, allowed: CUDNN-X" in suite.find("testcase/system-out").text


# ---------------------------------------------------------------- HTML


class Page(html.parser.HTMLParser):
    """Elements, and that they nest."""

    VOID = frozenset(("meta", "input", "br", "wbr"))

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack, self.texts, self.styles, self.text = [], [], [], "", text
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in ("option", "p") and self.stack[-1] != tag:
            return
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] == ["style"]:
            self.styles += data
        else:
            self.texts.append(data)

    def check_that_it_loads_nothing(self):
        for tag, attributes in self.elements:
            assert tag not in ("link", "iframe", "object", "embed", "base")
            for name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
                value = attributes.get(name)
                assert value is None or value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
            assert not re.search(r"url\((?!#)", attributes.get("style") or "")
        assert "--back" in self.styles
        assert "@import" not in self.styles
        assert "url(" not in self.styles
        ids = [a["id"] for _, a in self.elements if "id" in a]
        assert len(ids) == len(set(ids))
        targets = {a.get("href", a.get("xlink:href")) for tag, a in self.elements if tag == "a"}
        assert {t for t in targets if not re.fullmatch(r"#(case|cause)-\d+", t)} <= {f"#{i}" for i in ids}
        for cell in (a for tag, a in self.elements if tag == "th"):
            assert cell.get("scope") in ("col", "row")
        assert sum(tag == "caption" for tag, _ in self.elements) == sum(tag == "table" for tag, _ in self.elements)

    @property
    def data(self):
        """What the page's script makes a table of; its rows as dictionaries, their cases and texts whole."""
        (found,) = re.findall(r'id="data">(.*?)</script>', self.text, re.S)
        data = json.loads(found)
        rows = [{} for _ in range(data["rows"])]
        for column in data["columns"]:
            cells = list(cells_of(column)) if rows else []
            assert len(cells) == len(rows)
            for row, cell in zip(rows, cells, strict=True):
                row[column["title"]] = cell
        return data | {"rows": rows}


def cells_of(column):
    """Whole texts of a column, as the page's script reads them."""
    line = []
    for part in column["cells"].split("|"):
        if column["kind"] == "case":
            shared, *others = (int(word, 36) for word in part.split())
            line = [*line[:shared], *(column["values"][word] for word in others)]
            yield ",".join(line)
        else:
            value, _, count = part.partition("*")
            yield from [column["values"][int(value, 36)]] * int(count or "1", 36)


def page_of(results, infos=INFOS):
    stream = io.StringIO()
    page.write(stream, HERE, infos, results)
    text = stream.getvalue()
    found = Page(text)
    found.check_that_it_loads_nothing()
    return text, found


@pytest.mark.slow
def test_the_page_shows_everything_and_loads_nothing(plots):
    known = made_result(Status.FAIL, "backward,spatial,bf16,nhwc,2x3x4x5", known=DEFECTS[0].id)
    every = [*EVERY, known]
    text, found = page_of(every)
    assert page_of(every)[0] == text  # the same run gives the same page
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert drawings.INK not in text
    assert sum(tag == "svg" for tag, _ in found.elements) == 2
    words = " ".join(found.texts)
    assert DEFECTS[0].what in words
    assert "libMIOpen" in words
    assert "NVIDIA <made>" in words
    (verdict,) = (found.sentence for found in conclusions(INFOS, every))
    assert words.index(verdict) < words.index("What did not pass")
    data = found.data
    assert [(row["status"], row["operation"], row["case"]) for row in data["rows"]] == [
        (r.status.value, r.case.partition(",")[0], r.case) for r in every
    ]
    assert repro(dataclasses.replace(known, case="CASE")) == data["commands"]["cudnn"]
    assert sorted(map(int, data["details"])) == [
        i for i, r in enumerate(every) if r.status not in (Status.PASS, Status.UNSUPPORTED)
    ]
    for line in vendor_lines.of_case(known.case).values():
        assert line in words
        assert ["pre", line] in data["details"][str(len(EVERY))]
    (passed,) = (v for v in EVERY[0].verdicts if v.status == Status.PASS)
    ratio, noticed = map(float, data["rows"][0]["y"].split())
    assert (ratio, noticed) == (round(passed.ratio, 2), float(f"{passed.noticed:.0e}"))
    (points,) = (block[3] for block in data["details"][str(len(EVERY) - 1)] if block[0] == "table")  # EVERY's FAIL
    assert [p[:2] for p in points] == [[f"0,1,2,{i}", f"{1.25 + i:.9g}"] for i in range(10)]
    assert ["nan", "1e-06"] in [p[2:4] for p in points]


def test_causes_are_words_that_wrong_cases_have_and_right_ones_lack(plots):
    def made(dtype, layout, shape, status, outputs=("y",), **more):
        result = made_result(status, f"backward,spatial,{dtype},{layout},{shape},fill=randn", **more)
        wrong = [dataclasses.replace(v, output=name) for v in result.verdicts for name in outputs]
        return dataclasses.replace(result, verdicts=wrong)

    shapes = [f"{i}x3x4x5" for i in range(2, 20)]
    results = [
        made(d, n, s, Status.FAIL if (d, n) == ("bf16", "nhwc") else Status.PASS, ("y", "dx")[: 1 + (s < "15")])
        for d in ("f32", "bf16")
        for n in ("nchw", "nhwc")
        for s in reversed(shapes)
    ]
    results += [made("bf16", "nhwc", "1x3x4x5", Status.UNSUPPORTED), made("f16", "nchw", "1x9x9x9", Status.CRASHED)]
    wrong, crash = causes(results)
    assert crash.text == "f16: 1 of 1"
    assert wrong.text == "bf16 and nhwc: 18 of 18, y and dx"
    assert wrong.cases[0].case == "backward,spatial,bf16,nhwc,2x3x4x5,fill=randn"
    half = [made("f32", "nchw", s, Status.FAIL if i < 9 else Status.PASS) for i, s in enumerate(shapes)]
    assert sum(len(c.cases) for c in causes(half)) == 9  # no word in common, and none is lost
    known = [made("f32", "nchw", s, Status.FAIL, known="X") for s in shapes]
    assert [(c.known, len(c.cases)) for c in causes([*known, *results])] == [("", 18), ("X", 18), ("", 1)]
    text, _ = page_of(results)
    assert "<strong>bf16 and nhwc: 18 of 18, y and dx</strong>" in text


def test_every_result_has_a_point_and_a_cell(plots, monkeypatch):
    scattered, shown = [], []
    from matplotlib.axes import Axes

    scatter, imshow = Axes.scatter, Axes.imshow
    monkeypatch.setattr(Axes, "scatter", lambda *a, **k: (scattered.append(a[1:3]), scatter(*a, **k))[1])
    monkeypatch.setattr(Axes, "imshow", lambda *a, **k: (shown.append(a[1]), imshow(*a, **k))[1])
    both = [*EVERY, made_result(Status.FAIL, "train,spatial,f32,nchw,2x3x4x5,seed=0", "miopen")]
    page_of(both)
    crosses, *strips = scattered
    assert len(crosses[0]) == sum(not r.status.good for r in both)
    heights = [float(y) for _, ys in strips for y in ys]
    assert len(heights) == sum(len(r.verdicts) for r in both)
    assert heights.count(drawings.CEILING) == 2  # the infinite ones are not lost
    (grid,) = shown
    assert grid.shape == (2, len(EVERY))
    numbers = {s: i + 1 for i, s in enumerate(Status)}
    assert sorted(grid[0]) == sorted(numbers[r.status] for r in EVERY)
    assert list(grid[1]).count(0) == len(EVERY) - 1
    assert numbers[Status.FAIL] in grid[1]


def test_groups_count_what_is_right_and_what_is_refused(plots):
    some = [made_result(s, f"train,spatial,bf16,nhwc,2x3x4x5,seed={i}") for i, s in enumerate(Status)]
    (row,) = page._groups([*some[:2], some[3]], [("cudnn", "nhwc"), ("cudnn", "nchw")])
    assert row["name"] == ("train", "spatial", "bf16")
    assert row["cells"] == [{"status": "WARN", "right": "2/2", "ratio": "3.00B", "refused": 1}, None]
    (row,) = page._groups(some, [("cudnn", "nhwc")])
    assert row["cells"] == [{"status": "FAIL", "right": f"3/{len(some) - 2}", "ratio": "inf", "refused": 1}]
    (row,) = page._groups(some[3:4], [("cudnn", "nhwc")])
    assert row["cells"] == [{"status": "UNSUPPORTED", "right": "", "ratio": "", "refused": 1}]


def test_a_run_without_results_has_a_page(plots):
    text, _ = page_of([])
    assert "No case was run" in text
    page_of([made_result(Status.CRASHED)])


@pytest.mark.slow
def test_a_page_of_many_cases_is_small(plots, tmp_path):
    outputs = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
    results = []
    for i in range(2000):
        status = list(Status)[i % 10] if i % 12 == 0 else Status.PASS
        case = f"train,spatial,{('f32', 'bf16')[i % 2]},{('nchw', 'nhwc')[i // 2 % 2]},64x256x56x56,fill=randn,seed={i}"
        result = made_result(status, case)
        for first in result.verdicts[:1]:
            result.verdicts = [
                dataclasses.replace(first, output=n, ratio=first.ratio * 0.9**j) for j, n in enumerate(outputs)
            ]
        results.append(result)
    file = tmp_path / "page.html"
    page.write(file, machine(), INFOS, results)
    assert file.stat().st_size < 300e3  # each case is another and one in twelve fails
    found = Page(file.read_text(encoding="utf-8"))
    found.check_that_it_loads_nothing()
    assert len(found.data["rows"]) == 2000


def test_details_beyond_the_limit_are_counted(plots, monkeypatch):
    monkeypatch.setattr(page, "DETAILS", 3)
    text, found = page_of(EVERY)
    assert f"Elements are shown of 3 cases; {len(EVERY) - 2 - 3} more are in the JSON document." in text
    assert sorted(map(int, found.data["details"])) == [len(EVERY) - number for number in (3, 2, 1)]


@pytest.mark.slow
def test_the_page_and_the_document_of_a_comparison(plots, schema, tmp_path):
    lines = [
        "train,spatial,f32,nchw,4x3x5x5,fill=randn",
        "train,spatial,f32,nchw,4x3x5x5,fill=randn,kappa=3",
        "backward,spatial,f32,nchw,4x3x5x5,fill=randn",
    ]

    def wrong(line, name, array):
        return nudged(array, 10**6) if name in ("y", "dbias") and "kappa" not in line else nudged(array)

    make_run(tmp_path / "a", "cudnn", lines)
    make_run(tmp_path / "b", "cudnn", lines, (2, 0), wrong)
    make_run(tmp_path / "c", "miopen", lines, status={lines[1]: Status.CRASHED}.get)
    comparison = compare.compare(compare.read([tmp_path / n for n in "abc"]))
    pages.write_comparison(tmp_path / "page.html", comparison)
    document = json.loads(json.dumps(compare_document.document(comparison), allow_nan=False))
    assert errors(schema, document) == ""
    assert document["alone"]
    assert errors(schema, document | {"unknown": 1})
    found = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    found.check_that_it_loads_nothing()
    words = " ".join(found.texts)
    assert "newly failing" in words
    assert "B:cudnn" in words
    verdicts = [f.sentence for f in compare_conclusions.found(comparison)]
    assert "libcudnn 2.0 stands alone in 2 cases." in verdicts
    assert all(words.index(sentence) < words.index("Runs") for sentence in verdicts)
    data = found.data
    assert len(data["rows"]) == 9
    assert sorted({row["outcome"] for row in data["rows"]}) == ["beyond", "differ", "equal", "within"]
    point = next(o for c in comparison.cases for o in c.outputs if o.outcome.value == "beyond").worst[0]
    shown = [p for blocks in data["details"].values() for b in blocks if b[0] == "table" for p in b[3]]
    assert [f"{point.reference:.9g}", f"{point.first:.9g}", f"{point.second:.9g}"] in [p[1:4] for p in shown]


@table(
    ("command", "missing"),
    [(("check", "--case", "infer,spatial,f32,nchw,2x3x4x4"), "jinja2"), (("compare", "nowhere"), "matplotlib")],
)
def test_a_command_that_cannot_make_its_page_says_so_before_it_runs(monkeypatch, tmp_path, command, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    done = run(*command, "--html", tmp_path / "x.html")
    assert done.returncode == 2
    assert "pip install matplotlib jinja2" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "x.html").exists()


def test_ratios_are_short():
    texts = {0.0: "0", 0.123: "0.12", 1.0: "1.00", 99.99: "99.99", 1234.5: "1e+03", 1e-5: "1e-05", math.inf: "inf"}
    assert {value: ratio_text(value) for value in texts} == texts
