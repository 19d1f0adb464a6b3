"""``--json`` of info and bench reference: a file or standard output, and a document that meets the schema.

Of bench device: test_bench_device.py; of the others: tests/check/test_check_detection.py (selftest),
test_check_report.py (check, compare), test_check_versions.py.
"""

import importlib.resources
import json

import pytest
from click.testing import CliRunner

import benchmarks.command
import benchmarks.reference
import pybnorm
from pybnorm.cli import main


@pytest.fixture(scope="module")
def schema():
    jsonschema = pytest.importorskip("jsonschema")
    data = json.loads((importlib.resources.files("pybnorm.check") / "schema.json").read_text())
    return jsonschema.Draft202012Validator(data)


def small_reference(monkeypatch):
    whole = benchmarks.reference.run
    monkeypatch.setattr(
        benchmarks.reference, "run", lambda repeats: whole(shapes=((2, 3, 4, 5),), dtypes=("f32",), repeats=1)
    )


COMMANDS = {
    "info": (main, ["info"]),
    "bench-reference": (benchmarks.command.bench, ["reference", "--repeats", "1"]),
}


@pytest.mark.parametrize("name", [pytest.param("info", marks=pytest.mark.slow), "bench-reference"])
def test_a_command_writes_its_document(name, schema, monkeypatch, tmp_path):
    small_reference(monkeypatch)
    command, arguments = COMMANDS[name]
    file = tmp_path / "document.json"
    done = CliRunner().invoke(command, [*arguments, "--json", str(file)])
    assert done.exit_code in (0, 1), done.output  # 1: slower
    assert "{" not in done.stdout.partition("\n")[0]  # what a person reads is there, too
    document = json.loads(file.read_text())
    assert document["schema"] == f"pybnorm.{name}/1"
    assert document["environment"]["pybnorm"] == pybnorm.__version__
    assert [f"{e.json_path}: {e.message}" for e in schema.iter_errors(document)] == []
    for key in document:
        if key != "environment":
            less = {k: v for k, v in document.items() if k != key}
            assert not schema.is_valid(less), key
    assert not schema.is_valid(document | {"unknown": 1})
    file.write_text("a thesis")
    done = CliRunner().invoke(command, [*arguments, "--json", str(file)])
    assert (done.exit_code, file.read_text()) == (2, "a thesis")
    assert "--json" in done.output


@pytest.mark.parametrize("flag", [["--json"], ["--json", "-"]])
@pytest.mark.parametrize("name", ["bench-reference"])
def test_without_a_file_the_document_is_all_of_standard_output(name, flag, monkeypatch, tmp_path):
    small_reference(monkeypatch)
    command, arguments = COMMANDS[name]
    done = CliRunner().invoke(command, [*arguments, *flag])
    assert json.loads(done.stdout)["schema"] == f"pybnorm.{name}/1"
