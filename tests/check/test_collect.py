"""`pybnorm collect`: one file for a report, without names, that `report` and `compare` read."""

import getpass
import itertools
import json
import os
import platform
import re
import tempfile
import zipfile

import pytest
from click.testing import CliRunner
from tables import table

from pybnorm.check.run import archive, collection
from pybnorm.cli import main
from pybnorm.errors import ArgumentError


@pytest.mark.slow
def test_one_file_has_what_a_report_needs(tmp_path, onednn, monkeypatch):
    suites = ["--suite", "smoke", "--suite", "bugs"]

    def output(name, words, seconds, step, output=collection._output):
        assert ("check" in words) == (words[2:6] == suites)
        case = ["--case", "infer,spatial,f32,nchw,2x3x4x5", "--jobs", "1"]  # in place of the suites, in which is time
        return output(name, [*words[:2], *case, *words[6:]] if "check" in words else words, seconds, step)

    monkeypatch.setattr(collection, "_output", output)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    file = tmp_path / "report.zip"
    done = CliRunner().invoke(main, ["collect", "--backend", "onednn", "-o", str(file)])
    assert done.exit_code == 0, done.output
    with zipfile.ZipFile(file) as found:
        texts = {name: found.read(name).decode() for name in found.namelist()}
    names = {"README", "bench", "check", "environment", "info", "miopen"}
    assert set(texts) == {*(f"{name}.txt" for name in names), "info.json", "run.json"}
    assert not re.search(rf"{re.escape(tempfile.gettempdir())}/tmp[^./]*/", texts["check.txt"])  # a folder that is gone
    assert "LD_LIBRARY_PATH=/somewhere\n" in texts["environment.txt"]
    assert re.search(r"^(package .*dnnl|onednn.*==)", texts["environment.txt"], re.MULTILINE)
    for call in itertools.product(("forward_training", "forward_inference", "backward"), ("f32", "bf16")):
        line = rf"^onednn {' '.join(call)} 16x64x28x28: +\d+\.\d us by \w+$"
        assert re.search(line, texts["bench.txt"], re.MULTILINE), texts["bench.txt"]
    assert all(f"  {name} " in done.output for name in texts)
    assert all(name in texts["README.txt"] for name in texts if name != "README.txt")
    assert any(b["backend"] == "onednn" and b["digest"] for b in json.loads(texts["info.json"])["backends"])
    assert "onednn" in texts["info.txt"]
    assert all(os.path.expanduser("~") + "/" not in text for text in texts.values())
    shown = CliRunner().invoke(main, ["report", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "oneDNN" in shown.output
    assert CliRunner().invoke(main, ["compare", str(file), str(file)]).exit_code == 0
    again = CliRunner().invoke(main, ["collect", "-o", str(file)])
    assert (again.exit_code, "is there already" in again.output) == (2, True)


@table(
    ("host", "user", "text", "left"),
    [
        ("tux7", "ada", "/srv/people/ada/lib.so on tux7, /home/bob/x /Users/eve/y of ada: adapter, tux77",
         "~/lib.so on HOST, ~/x ~/y of USER: adapter, tux77"),
        *((host, user, f"{host} is {user}", f"{host} is {user}")  # a letter, and words of the documents
          for host, user in (("q", "v"), ("miopen", "train"), ("backends", "nhwc"))),
    ],
)  # fmt: skip
def test_names_are_taken_out(monkeypatch, host, user, text, left):
    monkeypatch.setattr(platform, "node", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    monkeypatch.setenv("HOME", "/srv/people/ada")
    assert collection.without_names(text) == left


@table(
    ("member", "said"),
    [
        (None, "no archive of pybnorm collect"),
        ("another", "no archive of pybnorm collect"),
        ("run.json", "more than 4000"),
    ],
)
def test_an_archive_that_is_none_is_refused_by_name(tmp_path, monkeypatch, member, said):
    file = tmp_path / "report.zip"
    file.write_text("nothing")
    if member:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            made.writestr(member, "[" * 5000)
    monkeypatch.setattr(archive, "_UNPACKED", 4000)
    with pytest.raises(ArgumentError, match=said):
        archive.read_run(file)


def test_what_tuning_chose_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", str(tmp_path))
    (tmp_path / "batchnorm_gfx1100.udb.txt").write_text("4x3=BnBwdTrainingSpatial:Variant1-1\n")
    (tmp_path / "gfx1100.ukdb").write_bytes(bytes(9))
    assert collection._databases().splitlines()[1:] == [
        f"{9:>12} {tmp_path / 'gfx1100.ukdb'}", "4x3=BnBwdTrainingSpatial:Variant1-1"
    ]  # fmt: skip
