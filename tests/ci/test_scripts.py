"""The scripts of ci/ over stand-ins for what they call: what fails is told in the last line, nothing passes unrun."""

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from tables import table

ROOT = Path(__file__).parents[2]
REASON = "Debian's archive cannot be had: the test says so"
RIG = f"""#!/bin/bash
[ "$1" = --root ] && echo "$*" >>"$CALLS"
[ -z "${{VERSION:-}}" ] || STATUS=${{NEWER:-$STATUS}}
[ "$STATUS" != 75 ] || echo "{REASON}" >"$2/unavailable"
[ "$STATUS" != nothing ] || exit 75
[ -z "${{LAZY:-}}" ] || printf '%s\n' '3 skipped: miopen: no graphs' '9 skipped: another'
[ "$STATUS" != 1 ] || echo 'FAILED tests/a/test_b.py::test_c - no'
exit "$STATUS"
"""
# A Python that makes environments of further stand-ins, logs what it is asked and fails where FAIL says so.
PYTHON = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "${@: -1}/bin"; cp "$BIN"/* "${@: -1}/bin" ;;
    *getwidth* | *get_path*) echo . ;;
esac
case "${0##*/} $*" in *$FAIL*) echo 'it broke here' >&2; exit 3 ;; esac
"""


class Tree:
    """A copy of the scripts, with stand-ins first in the path."""

    def __init__(self, folder):
        self.root, self.bin, self.calls = folder / "tree", folder / "bin", folder / "calls"
        shutil.copytree(ROOT / "ci", self.root / "ci")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        suites = self.root / "pybnorm/check/language/suites"
        suites.mkdir(parents=True)
        shutil.copy(ROOT / suites.relative_to(self.root) / "bugs.txt", suites)
        self.bin.mkdir()
        self.stand_in(self.bin / "id", "#!/bin/sh\necho 0\n")

    @staticmethod
    def stand_in(path, text):
        path.unlink(missing_ok=True)  # a link is replaced, not the program of the machine that it leads to
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, script, *arguments, **variables):
        """The exit status and the lines of both outputs."""
        self.calls.write_text("")
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "TMPDIR": str(self.root.parent), "CALLS": str(self.calls)}
        environment |= {"BIN": str(self.bin), "HOME": str(self.root)} | variables
        done = subprocess.run(
            ["bash", str(self.root / script), *arguments], env=environment, cwd=self.root.parent, timeout=120,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


# ---------------------------------------------------------------- MIOpen's rig


@pytest.fixture
def rig(tree):
    tree.stand_in(tree.root / "ci/miopen-on-cpu/run.sh", RIG)
    tree.stand_in(tree.root / "ci/cpu.sh", '#!/bin/bash\nexit "${CPU:-0}"\n')
    return tree


def test_all_parts_run_in_the_rig(rig):
    status, lines = rig.run(".ci/run", STATUS="0")
    assert status == 0, lines
    assert "NOT TESTED" not in "".join(lines)
    calls = rig.calls.read_text()
    assert calls.count(" -- ") == len([line for line in lines if line.startswith("== MIOpen on the CPU: ")]) - 1 > 8
    for folder in ("abi", "backends", "devices", "fuzz", "operations", "layer", "graph", "functional"):
        assert f"tests/{folder}" in calls


def test_only_an_archive_that_cannot_be_had_passes_and_the_last_line_says_so(rig):
    assert rig.run("ci/rocm-rig.sh", STATUS="75")[0] == 75
    status, lines = rig.run(".ci/run", STATUS="75")
    assert (status, lines[-1]) == (0, f"MIOpen NOT TESTED: {REASON}")
    assert rig.run(".ci/run", STATUS="nothing")[0] == 75  # the rig did not say what cannot be had


def test_a_newer_version_that_cannot_be_had_is_told_and_all_else_counts(rig):
    status, lines = rig.run("ci/rocm-rig.sh", STATUS="0", NEWER="75", LAZY="1")
    told = lines.index("== what no part ran, and why")
    found = [line.partition(" here:")[0] for line in lines[told + 1 : told + 5]]
    assert found == ["    left out", "    left out", "    miopen: no graphs", ""]
    assert status == 0
    assert any("MIOpen 3.5, the check: NOT TESTED" in line for line in lines)
    status, lines = rig.run("ci/rocm-rig.sh", STATUS="0", NEWER="1")
    assert (status, "    MIOpen 3.5, the check (exit status 1)" in lines) == (1, True)
    assert rig.run("ci/rocm-rig.sh", STATUS="0", NEWER="70")[0] == 70


@table("fault", ["64", "77"])
def test_a_rig_that_cannot_run_is_a_failure(rig, fault):
    status, lines = rig.run(".ci/run", STATUS=fault)
    assert (status, "FAILED: the rig cannot run" in lines[-1]) == (int(fault), True)


def test_a_failed_part_is_named_at_the_end_with_its_tests(rig):
    status, lines = rig.run(".ci/run", STATUS="1")
    assert status == 1
    end = "\n".join(lines[lines.index("ci/rocm-rig.sh: FAILED:") :])
    assert "random calls, guard pages (exit status 1)" in end
    assert "FAILED tests/a/test_b.py::test_c - no" in end


def test_without_root_or_with_failed_checks_nothing_passes(rig):
    status, _ = rig.run(".ci/run", STATUS="0", CPU="4")
    assert status == 4
    assert " -- " not in rig.calls.read_text()
    rig.stand_in(rig.bin / "id", "#!/bin/sh\necho 1000\n")
    status, lines = rig.run(".ci/run", STATUS="0")
    assert status == 77
    assert "FAILED" in lines[-1]


# ---------------------------------------------------------------- the others


@pytest.fixture
def python(tree):
    tools = ("python", "python3", "ruff", "cython-lint", "mypy", "shellcheck", "zizmor", "actionlint", "pytest",
             "pybnorm", "gcc", "clang", "aarch64-linux-gnu-gcc", "cc", "apt-get", "sphinx-build", "uv")  # fmt: skip
    for name in tools:
        tree.stand_in(tree.bin / name, PYTHON)
    return tree


@table(
    ("fail", "step"),
    [("uv pip install --quiet -r pyproject.toml", "environment: "), ("no-build-isolation .", "build"), ("mypy", "lint"),
     ("sphinx-build", "documentation"), ("gcc -std", "every C file"), ("tbb", "libraries"),
     ("pytest --full", "pytest"), ("selftest", "selftest"), ("--suite standard", "the judge")],
)  # fmt: skip
def test_a_failed_step_of_the_checks_is_in_the_last_line(python, fail, step):
    (python.root / "pybnorm/backends").mkdir(exist_ok=True)
    (python.root / "pybnorm/backends/a.c").touch()
    status, lines = python.run("ci/cpu.sh", FAIL=fail)
    assert status not in (0, None)
    assert re.search(rf"FAILED \(exit status \d+\) after \d+ s in the step: {step}", lines[-1])
    assert "it broke here" in lines
    assert not list(python.root.parent.glob("tmp.*"))  # its environment is gone


def test_pages_are_seen_in_a_browser_where_there_is_one(python):
    for name in ("chromium", "chromedriver"):
        python.stand_in(python.bin / name, "#!/bin/sh\n")
    python.stand_in(python.bin / "pytest", '#!/bin/sh\necho "pytest $PYBNORM_REQUIRE_PACKAGES" >>"$CALLS"\n')
    status, lines = python.run("ci/cpu.sh", FAIL="nothing")
    calls = python.calls.read_text()
    assert (status, "FAILED" in "".join(lines)) == (0, False)
    assert "python tests/check/browser.py" in calls
    assert re.search(r"^pytest \S+,chromium$", calls, re.MULTILINE)
    status, lines = python.run("ci/cpu.sh", FAIL="browser.py")
    assert (status, "documentation" in lines[-1]) == (3, True)


@pytest.mark.slow
def test_a_service_gets_a_browser_and_goes_on_without(rig):
    """The service's machine here has none: its programs are those that are linked."""
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if not (program.name.startswith("chrom") or (rig.bin / program.name).exists()):
                (rig.bin / program.name).symlink_to(program)
    own = rig.root / "of the machine"
    own.write_text("its own")
    (rig.bin / "apt-get").unlink(missing_ok=True)
    (rig.bin / "apt-get").symlink_to(own)
    for number in (0, 5):
        rig.stand_in(rig.bin / "apt-get", f'#!/bin/sh\necho "apt-get $*" >>"$CALLS"; echo no host; exit {number}\n')
        status, lines = rig.run(".ci/run", STATUS="0", CI="true", PATH=str(rig.bin))
        assert status == 0, lines
        assert "apt-get -qq update" in rig.calls.read_text()
        assert ("no host" in lines) == bool(number)
        assert "apt-get" not in (rig.run(".ci/run", STATUS="0", PATH=str(rig.bin)), rig.calls.read_text())[1]
    assert own.read_text() == "its own"


def test_only_results_of_an_earlier_run_are_replaced(python, tmp_path):
    python.stand_in(python.bin / "nvidia-smi", "#!/bin/sh\necho 'CUDA Version: 13.0'\n")
    folder, thesis = tmp_path / "out", tmp_path / "thesis"
    folder.mkdir()
    thesis.write_text("of years")
    for part, name in (("info", "cuda-info.txt"), ("full", "full.json"), ("bench", "bench.svg")):
        file = folder / name
        for make, *what in ((file.write_text, "of years"), (file.symlink_to, thesis), (file.mkdir,)):
            make(*what)
            status, lines = python.run("ci/cuda.sh", str(folder), "info", part, FAIL="nothing", VENV="none")
            assert (status, str(file) in lines[-1]) == (2, True), lines
            assert thesis.read_text() == "of years"
            assert [f.name for f in folder.iterdir()] == [name]
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                assert file.read_text() == "of years"
                file.unlink()
    (folder / "cuda-info.txt").touch()
    for _ in range(2):
        status, lines = python.run("ci/cuda.sh", str(folder), "info", FAIL="nothing", VENV="none")
        assert status == 0, lines
        (folder / "cuda-info.txt").write_text("of the run before")
    assert {f.name for f in folder.iterdir()} == {".cuda.sh", "cuda-info.txt"}


@table("script", ["ci/rocm.sh", "ci/cuda.sh"])
def test_what_a_machine_lacks_is_the_last_line(python, script, tmp_path):
    for fail, said, variables in (
        ("Python.h", "no headers of", {}),
        ("-m venv", "python3-venv", {}),
        ("pybnorm.Handle", "it broke here", {}),
        ("setup.py", "does not build", {"VENV": "none"}),
        ("--editable", "does not build", {}),
    ):
        status, lines = python.run(script, str(tmp_path / "out"), FAIL=fail, EXTRAS="test", **variables)
        assert status == 1
        assert said in lines[-1]
        assert "it broke here" in "".join(lines) or said not in ("does not build", "it broke here")
    (python.bin / "nvidia-smi").unlink(missing_ok=True)
    if script == "ci/cuda.sh":
        status, lines = python.run(script, str(tmp_path / "out"), FAIL="nothing")
        assert (status, lines[-1]) == (1, "ci/cuda.sh: nvidia-smi finds no driver of NVIDIA")


@table(
    ("script", "driver", "extras"),
    [("ci/rocm.sh", "", "test"), ("ci/cuda.sh", "12.9", "test,report,cuda12"),
     ("ci/cuda.sh", "13.1", "test,report,cuda13")],
)  # fmt: skip
def test_a_bare_machine_gets_an_environment(python, script, driver, extras, tmp_path):
    python.stand_in(python.bin / "nvidia-smi", f"#!/bin/sh\necho '| Driver 1  CUDA Version: {driver}  |'\n")
    parts = ["info"] if "cuda" in script else []
    status, lines = python.run(script, str(tmp_path / "out"), *parts, FAIL="nothing")
    assert status == 0, lines
    calls = python.calls.read_text()
    assert f"-m pip install --quiet --editable .[{extras}]\n" in calls
    assert "setup.py" not in calls
    assert not list(tmp_path.glob("pybnorm-venv.*"))
    status, lines = python.run(script, str(tmp_path / "out"), *parts, FAIL="nothing", VENV="none")
    assert status == 0, lines
    assert "pip" not in python.calls.read_text()
    assert "setup.py -q build_ext --inplace" in python.calls.read_text()
