"""Loading for real, each time in another process: doubles of all three libraries, and the real ones of this machine."""

import importlib.metadata
import os
import re
from pathlib import Path

import pytest
from doubles.build import VENDORS
from tables import table

VERSIONS = {"cudnn": [9, 19, 0], "miopen": [3, 4, 0], "onednn": [3, 2, 0]}
VENDOR_FILES = ("libcudnn", "libMIOpen", "libdnnl", "libcuda", "libamdhip64", "libhsa-runtime64")
each_vendor = pytest.mark.parametrize("backend", VENDORS)


def variable(backend):
    return f"PYBNORM_LIB_{backend.upper()}"


def unavailable(backend, reason):
    """Skip with the reason, or fail where PYBNORM_REQUIRE lists the backend."""
    if backend in os.environ.get("PYBNORM_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"{backend} is required (PYBNORM_REQUIRE) but {reason}")
    pytest.skip(reason)


def distribution_file(*names, soname):
    """(distribution, path) of an installed wheel's library."""
    for name in names:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == soname:
                return name, str(Path(str(file.locate())).resolve())
    unavailable("onednn" if "dnnl" in soname else "cudnn", f"none of {names} is installed with {soname}")


@pytest.fixture
def load(child):
    """What loading says, by a path or a search, and the vendors' files that are mapped then."""

    def run(backend, file=None, env=None, first="", variables=None):
        return child(
            """
            import ctypes, pybnorm
            os.environ.update(values["variables"])
            held = values["first"] and ctypes.CDLL(values["first"], mode=ctypes.RTLD_GLOBAL)
            report([attempt(lambda: pybnorm.load(values["backend"], values["file"])), mapped(*values["names"])])
            """,
            env=env,
            backend=backend,
            file=file,
            first=first,
            variables=variables or {},
            names=VENDOR_FILES,
        )

    return run


# ---- importing


def test_importing_loads_no_vendor_library(child):
    answer = child(
        """
        import pybnorm
        pybnorm.backends(), pybnorm.loaded("cudnn"), pybnorm.Mode.SPATIAL
        import pybnorm.devices
        report(mapped(*values["names"]))
        """,
        env={},
        names=VENDOR_FILES,
    )
    assert answer == []


NEXT = {"cudnn": ("libcudnn.so.10", 100000), "miopen": ("libMIOpen.so.2", 4000000), "onednn": ("libdnnl.so.4", 4000000)}


@pytest.mark.parametrize("newer", [False, True])
@each_vendor
def test_a_copy_in_the_process_is_preferred(load, doubles, tmp_path, backend, newer):
    """Before what is installed; one of the next version, too, which is spoken to as the newest that is known."""
    soname, number = NEXT[backend] if newer else (None, None)
    mine, other = doubles.build(backend, soname=soname, version=number), doubles.build(backend)
    conda = tmp_path / "conda/lib"
    conda.mkdir(parents=True)
    (conda / other.name).symlink_to(other)
    variables = {"CONDA_PREFIX": conda.parent, "LD_LIBRARY_PATH": other.parent}
    loaded, files = load(backend, first=mine, variables=variables)
    loaded = loaded["value"]
    assert (loaded["found_via"], loaded["path"]) == ("already in the process", str(mine))
    assert loaded["attempts"] == [] or newer
    assert loaded["version"] == ([10 if backend == "cudnn" else 4, 0, 0] if newer else VERSIONS[backend])
    assert files == [str(mine)]


@table("status", [0, 1002])
@table("number", [9, 10])
def test_cudnn_opens_parts_of_its_own_number_and_of_one_version(load, doubles, number, status):
    defines = (f"DOUBLE_MISMATCH={status}",)
    library = doubles.build("cudnn", soname=f"libcudnn.so.{number}", version=number * 10000, defines=defines)
    for part in ("graph", "ops"):
        (library.parent / f"libcudnn_{part}.so.{number}").symlink_to(doubles.plain(f"libcudnn_{part}.so.{number}"))
    answer, files = load("cudnn", library)
    assert {f"libcudnn_{part}.so.{number}" for part in ("graph", "ops")} <= set(map(os.path.basename, files))
    if status == 0:
        assert answer["value"]["version"] == [number, 0, 0]
    else:
        assert answer["error"] == "LibraryVersionError", answer
        assert "cudnnOpsVersionCheck() says" in answer["text"]
        assert f"libcudnn_ops.so.{number}" in answer["text"]


# ---- doubles: what can be wrong with a named file


@each_vendor
def test_a_named_library_is_loaded(child, doubles, backend):
    library, second = doubles.build(backend), doubles.build(backend)
    before, same, other, loaded, files = child(
        """
        import pybnorm
        backend = values["backend"]
        os.environ[values["variable"]] = values["file"]
        before = pybnorm.loaded(backend)
        library = pybnorm.load(backend)
        same = pybnorm.load(backend, library.path) is library is pybnorm.loaded(backend)
        other = attempt(lambda: pybnorm.load(backend, values["second"]))
        report([before, same, other, library._asdict(), mapped(*values["names"])])
        """,
        backend=backend,
        variable=variable(backend),
        file=library,
        second=second,
        names=VENDOR_FILES,
    )
    assert (before, same) == (None, True)
    assert (other["error"], str(library) in other["text"]) == ("LibraryLoadError", True)
    assert (loaded["backend"], loaded["version"]) == (backend, VERSIONS[backend])
    assert (loaded["path"], loaded["found_via"], loaded["attempts"]) == (str(library), variable(backend), [])
    assert files == [str(library)]


@each_vendor
def test_what_a_named_file_can_be_instead(child, doubles, tmp_path, backend):
    """The library of this machine is not taken in its place, and what was refused is gone."""
    vendor = VENDORS[backend]
    text, folder, short = tmp_path / vendor.soname, tmp_path / "folder", tmp_path / "short.so"
    text.write_text("not a library\n")
    folder.mkdir()
    short.write_bytes(doubles.build(backend).read_bytes()[:100])
    needy = doubles.plain("needy.so", "int pbn_nowhere(void); int pbn_call(void) { return pbn_nowhere(); }")
    expected = {
        text: ("LibraryLoadError", "file too short|invalid ELF header"),
        folder: ("LibraryLoadError", "is a directory"),
        short: ("LibraryLoadError", "cannot read file data"),
        tmp_path / "missing" / vendor.soname: ("LibraryLoadError", "no such file"),
        doubles.plain(vendor.soname): ("SymbolNotFoundError", doubles.symbols(backend, "REQUIRED")[0]),
        needy: ("LibraryLoadError", "undefined symbol: pbn_nowhere"),
        doubles.build(backend, version=vendor.other_version): ("LibraryVersionError", r"7605|1\.5\.0|2\.7\.0"),
    }
    result, still_mapped = child(
        """
        import pybnorm
        backend, variable = values["backend"], values["variable"]
        result = {}
        for file in values["files"]:
            by_path = attempt(lambda: pybnorm.load(backend, file))
            os.environ[variable] = file
            result[file] = {"path": by_path, variable: attempt(lambda: pybnorm.load(backend))}
            del os.environ[variable]
        report([result, mapped(*values["names"])])
        """,
        backend=backend,
        variable=variable(backend),
        files=list(map(str, expected)),
        names=VENDOR_FILES,
    )
    for file, (error, said) in expected.items():
        for how, got in result[str(file)].items():
            assert got.get("error") == error, (file, got)
            assert re.search(said, got["text"]), (file, got)
            assert str(file) in got["text"]
            assert [attempt[:2] for attempt in got["attempts"]] == [[how, str(file)]]
    assert still_mapped == []


@each_vendor
def test_every_required_symbol_is_missed_by_name(child, doubles, backend):
    names = doubles.symbols(backend, "REQUIRED")
    assert len(names) >= 15
    answer = child(
        """
        import pybnorm
        report({name: attempt(lambda: pybnorm.load(values["backend"], file)) for name, file in values["files"].items()})
        """,
        backend=backend,
        files={name: str(doubles.build(backend, without=[name])) for name in names},
    )
    for name in names:
        result = answer[name]
        assert result.get("error") == "SymbolNotFoundError", (name, result)
        assert f" {name} " in f" {result['attempts'][0][2]} ", result
        assert "AttributeError" in result["classes"]


@each_vendor
@table("half", [0, 1])
def test_every_optional_symbol_may_be_missing(child, doubles, backend, half):
    """Each is missing in one half, and there in the other."""
    names = doubles.symbols(backend, "OPTIONAL")
    assert names
    script = """
        import pybnorm
        pybnorm.load(values["backend"], values["file"])
        report([pybnorm.has_symbol(values["backend"], name) for name in [*values["names"], "no_such_symbol"]])
        """
    file = doubles.build(backend, without=names[half::2])
    answer = child(script, backend=backend, file=str(file), names=names)
    assert answer == [name not in names[half::2] for name in names] + [None]


def test_symbols_come_from_the_opened_file_only_and_stay_local(load, child, doubles):
    whole, part = doubles.build("miopen", soname="libwhole.so"), doubles.build("miopen", without=["miopenDestroy"])
    answer, _ = load("miopen", part, first=whole)
    assert (answer["error"], "miopenDestroy" in answer["text"]) == ("SymbolNotFoundError", True)
    answer = child(
        """
        import ctypes, pybnorm
        pybnorm.load("cudnn", values["file"])
        report([hasattr(ctypes.CDLL(None), "cudnnGetVersion"), hasattr(ctypes.CDLL(values["file"]), "cudnnGetVersion")])
        """,
        file=doubles.build("cudnn"),
    )
    assert answer == [False, True]


def test_a_oneDNN_without_a_cpu_runtime_is_refused(load, doubles):
    answer, _ = load("onednn", doubles.build("onednn", defines=["DOUBLE_CPU_RUNTIME=0"]))
    assert (answer["error"], "CPU runtime" in answer["text"]) == ("LibraryVersionError", True)


@table("runtime", [2, 512])
@table(("own", "beside"), [("", True), ("mine", True), ("", False)])
def test_sycl_finds_opencls_driver_beside_the_library(child, doubles, runtime, own, beside):
    """While the library is loaded, and never against the user's word."""
    library = doubles.build("onednn", defines=[f"DOUBLE_CPU_RUNTIME={runtime}"])
    driver = library.with_name("libintelocl.so")
    if beside:
        driver.touch()
    seen, after = child(
        """
        import ctypes, pybnorm
        os.environ.update(values["variables"])
        library = ctypes.CDLL(pybnorm.load("onednn", values["f"]).path)
        seen = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "double_driver"))).decode()
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        report([seen, (getenv(b"OCL_ICD_FILENAMES") or b"").decode()])
        """,
        variables={"OCL_ICD_FILENAMES": own} if own else {},
        f=library,
    )
    assert after == own
    assert seen == (str(driver) if runtime == 512 and beside and not own else own)


@table(
    ("runtime", "exports", "refused"),
    [(2, (), True), (512, (), True), (2, ("DOUBLE_EXPORTS=__kmpc_fork_call",), False), (4, (), False)],
)
def test_a_forked_child_is_refused_where_openmp_cannot_be_kept_to_one_thread(child, doubles, runtime, exports, refused):
    """An OpenMP that is inside the library, say, or SYCL; not Intel's and LLVM's, and TBB."""
    answers = child(
        """
        import pybnorm
        pybnorm.load("onednn", values["file"])
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = [attempt(lambda: pybnorm.Handle("onednn").closed)]
            if "error" in answers[0]:
                answers.append(attempt(lambda: pybnorm.Handle.from_pointer("onednn", 1)))
            os.write(writing, json.dumps(answers).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            report(json.load(pipe))
        os.waitpid(pid, 0)
        """,
        file=doubles.build("onednn", defines=[f"DOUBLE_CPU_RUNTIME={runtime}", *exports]),
    )
    assert ("error" in answers[0]) == refused, answers
    for error in answers if refused else ():
        assert error["error"] == "UnsupportedError"
        assert "spawn" in error["text"]
        assert "forkserver" in error["text"]


# ---- doubles: the search


def test_many_threads_load_once(child, doubles):
    answer = child(
        """
        import threading, pybnorm
        from pybnorm import _find
        os.environ["PYBNORM_LIB_MIOPEN"] = values["file"]
        searches, found, barrier = [], [], threading.Barrier(8)
        original = _find.find
        def counted(*arguments):
            searches.append(1)
            return original(*arguments)
        _find.find = counted
        def work():
            barrier.wait()
            found.append(pybnorm.load("miopen"))
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        report([len(searches), len(found), len({id(f) for f in found})])
        """,
        file=doubles.build("miopen"),
    )
    assert answer == [1, 8, 1]


# ---- the real libraries


def test_the_real_onednn_of_its_wheel(load):
    name, path = distribution_file("onednn-cpu-gomp", "onednn-cpu-iomp", "onednn-cpu-tbb", soname="libdnnl.so.3")
    loaded, files = load("onednn")
    loaded = loaded["value"]
    assert loaded["found_via"] == f"distribution {name}"
    assert Path(loaded["path"]).resolve() == Path(path)
    assert (loaded["version"][0], loaded["device_type"]) == (3, 1)
    assert [Path(file).resolve() for file in files] == [Path(path)]


CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")


def test_the_real_cudnn_without_pathfinder(child):
    name, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    loaded, files = child(
        """
        sys.modules["cuda.pathfinder"] = None  # as if not installed
        import pybnorm
        report([pybnorm.load("cudnn")._asdict(), mapped("libcudnn.so")])
        """
    )
    assert loaded["found_via"] == f"distribution {name}"
    assert Path(loaded["path"]).resolve() == Path(path)
    assert (loaded["version"][0], loaded["device_type"]) == (9, 2)
    assert [Path(file).resolve() for file in files] == [Path(path)]
    assert any(how == "cuda.pathfinder" and "ModuleNotFoundError" in why for how, _, why in loaded["attempts"])


@table(
    ("kept", "error", "what"),
    [
        ("libcudnn_graph.so.9", "SymbolNotFoundError", "symbol cudnnCreateTensorDescriptor is missing"),
        ("libcudnn.so.9 libcudnn_graph.so.9", "LibraryLoadError", "libcudnn_ops.so.9 cannot be opened"),
    ],
)
def test_the_real_cudnn_without_its_batch_norm_calls(load, tmp_path, kept, error, what):
    """An installation for graphs alone: loading says what it lacks, where a call would abort the process."""
    _, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    for name in kept.split():
        (tmp_path / name).symlink_to(Path(path).resolve().parent / name)
    answer, _ = load("cudnn", tmp_path / kept.partition(" ")[0])
    assert (answer["error"], what in answer["text"]) == (error, True), answer


def test_the_real_cudnn_through_pathfinder(load, doubles):
    _, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    try:
        version = importlib.metadata.version("cuda-pathfinder")
    except importlib.metadata.PackageNotFoundError:
        unavailable("cudnn", "cuda-pathfinder is not installed")
    if tuple(map(int, version.split(".")[:2])) < (1, 7):
        pytest.skip(f"cuda-pathfinder {version} does not know cuDNN, 1.7 does")
    # Pathfinder loads cuBLAS first, which cuDNN's wheel need not have beside it; binding needs none of it.
    cublas = doubles.plain("libcublasLt.so.12")
    loaded = load("cudnn", env={"LD_LIBRARY_PATH": cublas.parent})[0]["value"]
    assert loaded["found_via"] == "cuda.pathfinder"
    assert Path(loaded["path"]).resolve() == Path(path)
    assert loaded["version"][0] == 9
