"""A run as Markdown, as annotations of a CI service, and `pybnorm report`, which renders runs that are kept."""

import io
import re

import pytest
from command_here import run
from made_runs import made_document, made_result
from tables import table

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import LostNode, json_parts
from pybnorm.check.report import markdown
from pybnorm.check.run import archive
from pybnorm.check.run.runner import BackendInfo

INFOS = [
    BackendInfo("cudnn", "cuDNN", (9, 2, 0), "/lib/libcudnn.so.9", "made", device="a [device](there)", digest="abc"),
    BackendInfo("miopen", problem="no libMIOpen.so.1"),
]
GOOD = [made_result(s, f"train,spatial,f32,nchw,2x3x4x5,seed={i}") for i, s in enumerate(Status) if s.good]
EVERY = [made_result(s, f"train,spatial,f32,nchw,2x3x4x5,seed={i}") for i, s in enumerate(Status)]


def markdown_of(results, **options):
    stream = io.StringIO()
    markdown.write(stream, INFOS, results, **options)
    return stream.getvalue()


def tables(text):
    """The rows of each table, which all have as many cells as its titles."""
    found = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(re.split(r"(?<!\\)\|", line)[1:-1])
        elif found[-1]:
            found.append([])
    found = [rows for rows in found if rows]
    assert all({len(row) for row in rows} == {len(rows[0])} for rows in found)
    return found


def test_the_verdict_comes_first_and_what_is_wrong_has_its_command():
    text = markdown_of(EVERY)
    bad = [r for r in EVERY if not r.status.good]
    assert text.splitlines()[2].startswith("- **FAIL**: cuDNN 9.2.0: 1 of ")
    assert "  - cuDNN 9.2.0 was not run: it is taken to have every known defect" in text
    assert "- miopen did not run: no libMIOpen.so.1" in text
    _, wrong, refused = tables(text)
    assert [row[0].strip() for row in wrong[2:]] == [
        r.status.value for r in sorted(bad, key=lambda r: (-r.status.severity, -r.ratio))
    ]
    for result in bad:
        assert f"pybnorm check --backend cudnn --case '{result.case}'" in text
    assert refused[2][1].strip() == "1"
    assert "(there)" in text
    assert "[device](" not in text  # neither a link


def test_a_run_that_is_right_says_so_and_lists_nothing():
    text = markdown_of(GOOD)
    assert text.splitlines()[2].startswith(f"- **right**: cuDNN 9.2.0: all {len(GOOD) - 1} supported cases")
    assert ("What is wrong" in text, "so far" in markdown_of(GOOD, complete=False)) == (False, True)
    assert markdown.ci_annotations(GOOD) == []


def test_of_many_failures_the_first_are_listed_and_all_are_counted():
    many = [made_result(Status.FAIL, f"train,spatial,f32,nchw,2x3x4x5,seed={i}") for i in range(30)]
    assert "and 10 more." in markdown_of(many)
    lines = markdown.ci_annotations(many)
    assert len(lines) == 11
    assert lines[-1].startswith("::notice::20 more")


def test_text_of_a_library_gives_no_command_to_the_runner():
    evil = made_result(Status.CRASHED, message="100%\r\n::set-env name=X::y")
    (line,) = markdown.ci_annotations([evil])
    assert line.startswith("::error title=cudnn%3A CRASHED::")
    assert ("\n" in line, "\r" in line, "100%25%0D" in line) == (False, False, True)
    table = tables(markdown_of([made_result(Status.CRASHED, message="a | b `c` <i>")]))[1]
    assert "a \\| b \\`c\\` \\<i\\>" in "|".join(table[2])


@pytest.fixture
def kept(tmp_path):
    document = made_document(INFOS, EVERY) | {"lost_nodes": [LostNode("rank 1", "host-00112233", "cudnn", "it died")]}
    archive.write_run(tmp_path, document)
    return tmp_path


def test_a_kept_run_is_rendered_again(kept, tmp_path, plots):
    files = {o: tmp_path / f"report.{o}" for o in ("json", "junit", "html", "markdown")}
    done = run("report", kept, *(word for o, f in files.items() for word in (f"--{o}", f)))
    assert done.returncode == 0, done.stderr
    assert "cuDNN 9.2.0: 1 of " in done.stdout.splitlines()[-1]
    assert files["markdown"].read_text() == markdown_of(EVERY)
    assert "it died" in files["html"].read_text()
    assert files["junit"].read_text().count("<testcase") == len(EVERY) + 1
    assert [r.case for r in archive.read_run(files["json"])["cases"]] == [r.case for r in EVERY]
    assert run("report", kept, "--markdown").stdout == markdown_of(EVERY)
    assert run("report", kept, "--annotations").stdout.splitlines() == markdown.ci_annotations(EVERY)


def test_a_file_of_json_is_a_run_too(tmp_path):
    file = tmp_path / "run.json"
    file.write_text("".join(json_parts(made_document(INFOS, GOOD))))
    assert f"all {len(GOOD) - 1} supported cases" in run("report", file).stdout
    done = run("report", file, "--json", file)
    assert (done.returncode, "would overwrite the run" in done.stderr) == (2, True)


@table(
    ("words", "said"),
    [
        (("nowhere",), "RUN"),
        ((), "Missing argument 'RUN'"),
        (("RUN", "--json", "--markdown"), "--markdown"),
        (("RUN", "--annotations", "--markdown"), "--annotations"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(kept, words, said):
    done = run("report", *(kept if word == "RUN" else word for word in words))
    assert (done.returncode, said in done.stderr, done.stdout) == (2, True, "")
