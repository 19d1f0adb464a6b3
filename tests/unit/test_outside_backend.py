"""A fourth backend, of another distribution: examples/loop_backend, installed and used; and those that are broken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pybnorm

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop_backend"
OURS = ["cudnn", "miopen", "onednn", "native", "native_cuda", "native_rocm"]
PACKAGES = Path(pybnorm.__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the example's distribution, installed as its README says."""
    pytest.importorskip("setuptools", minversion="77")  # builds it, as no index is asked
    folder = tmp_path_factory.mktemp("loop")
    shutil.copytree(EXAMPLE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(folder / "target"), str(folder / "source")]
    status, text = started(command, folder, CFLAGS="-O0 -g0", PYTHONPATH=str(PACKAGES))
    assert status == 0, text
    return folder / "target"


def started(command, cwd, **environment):
    environment = os.environ | environment
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outside(tmp_path_factory, doubles):
    """Makes a folder of distributions that only name backends, from {name: what is behind the entry point}."""

    def make(**points):
        folder = tmp_path_factory.mktemp("outside")
        (folder / "them-1.dist-info").mkdir()
        (folder / "them-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: them\nVersion: 1\n")
        lines = [f"{name} = them:{name}" for name in points]
        (folder / "them-1.dist-info" / "entry_points.txt").write_text("\n".join(["[pybnorm.backends]", *lines, ""]))
        (folder / "them.py").write_text("".join(f"{name} = {value}\n" for name, value in points.items()))
        return folder

    def library(name, replace=(), flags=()):
        text = (EXAMPLE / "loop.c").read_text()
        for old, new in replace:
            assert text.count(old) == 1
            text = text.replace(old, new)
        folder = tmp_path_factory.mktemp(name)
        (folder / "loop.c").write_text(text)
        file = str(folder / f"{name}.so")
        command = [*doubles.compiler, "-O0", "-fPIC", "-shared", *flags, f"-I{pybnorm.get_include()}", "-o", file]
        subprocess.run([*command, str(folder / "loop.c"), "-lm"], check=True, timeout=120)
        return file

    make.library = library
    return make


def path(*folders):
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])}


@pytest.mark.slow
def test_it_is_a_backend_like_ours(child, installed):
    told = child(
        """
        import numpy as np, pybnorm
        from pybnorm import functional
        built_in = set(pybnorm._core._find.SPECS)
        told = {"before": sorted(built_in), "backends": pybnorm.backends(), "library": pybnorm.load("loop")._asdict()}
        told["device_types"] = pybnorm._core.device_types("loop")
        told["capability"] = [pybnorm.capability("loop", "backward", "spatial", d, 0, 4) for d in ("f64", "bf16")]
        x = np.random.default_rng(1).standard_normal((4, 3, 5, 2))
        one, zero, y = np.ones(3), np.zeros(3), np.empty_like(x)
        with pybnorm.Handle("loop") as handle:
            handle.forward_training(x, one, zero, y, epsilon=1e-5)
            plain = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
            told["error"] = float(abs(y - plain).max())
            y, mean, inverse = functional.batch_norm_training(x, one, zero, handle=handle)
            told["functional"] = float(abs(y - plain).max())
            told["stream"] = attempt(lambda: handle.set_stream(64))
        report(told)
        """,
        env=path(installed),
    )
    (file,) = (installed / "pybnorm_loop").glob("library*.so")
    assert told["before"] == sorted(OURS)
    assert told["backends"] == [*OURS, "loop"]
    assert told["library"]["path"] == str(file)
    assert (told["library"]["version"], told["library"]["found_via"]) == ([1, 0, 0], "the backend's own file")
    assert told["device_types"] == [1]
    assert told["capability"][0] == [int(pybnorm.Capability.RUNS | pybnorm.Capability.BLEND_NATIVE), ""]
    assert told["capability"][1] == [0, "the loops are written for float32 and float64"]
    assert told["error"] < 1e-13
    assert told["functional"] < 1e-13
    assert told["stream"]["error"] == "UnsupportedError"
    assert "the loops have no streams" in told["stream"]["text"]


CASES = [
    "train,spatial,f32,nhwc,4x3x5x2",
    "train,peract,f64,nchw,4x3x5,running=0,saved=0",
    "infer,spatial,f64,nchw,4x3x5x2",
    "backward,spatial,f32,nchw,4x3x5x2,alpha=0.5,beta=2",
    "backward,peract,f32,nhwc,4x3x5x2",
    "train,spatial,bf16,nchw,4x3x5x2",  # which it has not
]


@pytest.mark.slow
def test_the_judge_checks_it(installed, outside, tmp_path):
    def check(folder, cases):
        words = [word for case in cases for word in ("--case", case)]
        command = [sys.executable, "-m", "pybnorm", "check", "--backend", "loop", *words, "-v"]
        return started(command, tmp_path, **path(folder))

    status, text = check(installed, CASES)
    assert status == 0, text
    assert "loop: 6 cases, 5 PASS, 1 UNSUPPORTED" in text
    wrong = outside.library("wrong", [("get(dy, i) - dbias / m - normal", "get(dy, i) - normal")])
    status, text = check(outside(loop=repr(wrong)), CASES[3:5])
    assert status == 1, text
    assert "2 FAIL" in text


@pytest.mark.slow
def test_its_library_is_searched_for_as_ours_are(child, outside, tmp_path):
    label = '.label = "Loop",'
    search = '.search = {.sonames = "libthem.so.1", .hint = "ask them", .roots = "THEIR_ROOT"},'
    opens = "(void)no_load; if (no_load || fopen(file, " + '"r") == NULL) return PBN_E_LIBRARY;'
    theirs = outside.library("theirs", [(label, f"{label} {search}"), ("(void)no_load;", opens)])
    folder = outside(loop=f"lambda: {theirs!r}")  # a function will do, too
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libthem.so.1").touch()

    def load(**variables):
        script = "import pybnorm; report(attempt(lambda: pybnorm.load('loop')))"
        return child(script, env=path(folder) | variables)

    missing = load()
    assert missing["error"] == "LibraryNotFoundError"
    assert "Loop: no usable libthem.so.1 found. To have one: ask them; or set PYBNORM_LIB_LOOP" in missing["text"]
    assert load(THEIR_ROOT=tmp_path)["value"]["found_via"] == "THEIR_ROOT"
    named = load(PYBNORM_LIB_LOOP="/nowhere.so")
    assert named["error"] == "LibraryLoadError"
    assert named["attempts"] == [["PYBNORM_LIB_LOOP", "/nowhere.so", "no such file"]]


@pytest.mark.slow
def test_those_that_are_broken_are_said_and_left_out(child, outside, doubles):
    older = doubles.plain("older.so", "const int pbn_backend_older[256] = {0};")
    folder = outside(
        cudnn=repr("/nowhere.so"),
        absent=repr("/nowhere/absent.so"),
        empty=repr(str(doubles.plain("empty.so"))),
        number="7",
        older=repr(str(older)),
        other=repr(outside.library("other", flags=("-Dpbn_backend_loop=pbn_backend_other",))),
        raising="lambda: 1 / 0",
    )
    names, warned, again, unknown = child(
        """
        import warnings, pybnorm
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            names = pybnorm.backends()
        again = {name: attempt(lambda: pybnorm.Handle(name)) for name in values["names"]}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            names = [names, pybnorm.backends()]
        report([names, [str(w.message) for w in caught], again, attempt(lambda: pybnorm.Handle("no such"))])
        """,
        env=path(folder),
        names=["absent", "empty", "number", "older", "other", "raising"],
    )
    assert names == [OURS] * 2
    said = {
        "absent": ("LibraryLoadError", "/nowhere/absent.so: cannot open shared object file"),
        "cudnn": ("LibraryLoadError", "there is a backend 'cudnn' already"),
        "empty": ("SymbolNotFoundError", "has no symbol pbn_backend_empty"),
        "number": ("LibraryLoadError", "TypeError: expected str, bytes or os.PathLike object, not int"),
        "older": ("LibraryVersionError", "was compiled for contract 0 of pybnorm/shim.h, this pybnorm has 5"),
        "other": ("LibraryLoadError", "is of a backend named b'loop'"),
        "raising": ("LibraryLoadError", "ZeroDivisionError: division by zero"),
    }
    assert len(warned) == len(said)
    for text, (name, (_, why)) in zip(warned, said.items(), strict=True):
        assert text.startswith(f"the entry point {name} = them:{name} of the group pybnorm.backends gives no backend: ")
        assert why in text
    for name, result in again.items():
        assert (result["error"], said[name][1] in result["text"]) == (said[name][0], True), result
    assert "allowed: one of 'cudnn', 'miopen', 'onednn', 'native'" in unknown["text"]
