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

COMMANDS = {
    "info": (main, ["info"]),
    "bench-reference": (benchmarks.command.bench, ["reference", "--repeats", "1"]),
}


@pytest.mark.parametrize("name", [pytest.param("info", marks=pytest.mark.slow), "bench-reference"])
def test_a_command_writes_its_document(name, monkeypatch, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    text = (importlib.resources.files("pybnorm.check") / "schema.json").read_text()
    schema = jsonschema.Draft202012Validator(json.loads(text))
    whole, small = benchmarks.reference.run, {"shapes": ((2, 3, 4, 5),), "dtypes": ("f32",), "repeats": 1}
    monkeypatch.setattr(benchmarks.reference, "run", lambda repeats: whole(**small))
    command, arguments = COMMANDS[name]
    file = tmp_path / "document.json"

    def invoke(*option):
        return CliRunner().invoke(command, [*arguments, *option])

    done = invoke("--json", str(file))
    assert done.exit_code in (0, 1), done.output  # 1: slower
    assert "{" not in done.stdout.partition("\n")[0]  # what a person reads is there, too
    document = json.loads(file.read_text())
    assert document["schema"] == f"pybnorm.{name}/1"
    assert document["environment"]["pybnorm"] == pybnorm.__version__
    assert [f"{e.json_path}: {e.message}" for e in schema.iter_errors(document)] == []
    for key in document.keys() - {"environment"}:
        assert not schema.is_valid({k: v for k, v in document.items() if k != key}), key
    assert not schema.is_valid(document | {"unknown": 1})
    file.write_text("a thesis")
    done = invoke("--json", str(file))
    assert (done.exit_code, "--json" in done.output, file.read_text()) == (2, True, "a thesis")
    if name == "bench-reference":  # without a file it is all of standard output
        for option in (["--json"], ["--json", "-"]):
            assert json.loads(invoke(*option).stdout)["schema"] == f"pybnorm.{name}/1"
