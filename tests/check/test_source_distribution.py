"""The source distribution has all that a build and the tests need; the wheel has every module and no C source."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("pybnorm", "benchmarks", "include", "tests", "examples", "ci", ".ci", ".github")
FILES = ("LICENSE", "README.md", "MANIFEST.in", "pyproject.toml", "setup.py", "_pybnorm_pytestplugin.py")
MADE = (".pyc", ".so", ".o")


@pytest.mark.slow
def test_what_the_distributions_have(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    pytest.importorskip("Cython", reason="Cython is not installed")
    copy = tmp_path / "copy"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for file in FILES:
        shutil.copy2(ROOT / file, copy)
    (copy / "pybnorm" / "_core.so").touch()
    (copy / "tests" / "double.so").touch()
    done = subprocess.run(
        [
            *(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path / "dist")),
            *("build_py", "--build-lib", str(tmp_path / "wheel")),  # all of a wheel but the extension
        ],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = (tmp_path / "dist").glob("pybnorm-*.tar.gz")
    with tarfile.open(archive) as tar:
        members = {name.partition("/")[2] for name in (m.name for m in tar.getmembers() if m.isfile())}
    files = {str(f.relative_to(copy)) for folder in FOLDERS for f in (copy / folder).rglob("*") if f.is_file()}
    assert (copy / "pybnorm" / "_core.c").is_file()  # the build made it, so that its absence below says something
    wanted = {f for f in files if not f.endswith(MADE)} - {"pybnorm/_core.c"} | set(FILES)
    for known in ("pybnorm/_core.pyx", "pybnorm/_shim.pxd", "pybnorm/_core.pyi", "pybnorm/py.typed"):
        assert known in wanted
    assert wanted - members == set()
    extra = {m for m in members - wanted if not m.startswith("pybnorm.egg-info/")}
    assert extra == {"PKG-INFO", "setup.cfg"}
    wheel = {str(f.relative_to(tmp_path / "wheel")) for f in (tmp_path / "wheel").rglob("*") if f.is_file()}
    assert {f for f in wanted if f.startswith("pybnorm/") and f.endswith(".py")} <= wheel
    assert {
        f for f in wheel if f.endswith((".c", ".pyx", ".pxi")) or not f.startswith(("pybnorm/", "_pybnorm_"))
    } == set()
