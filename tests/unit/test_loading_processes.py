"""Loading for real, each time in a fresh process: doubles of all three libraries, and the real ones of this machine."""

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import pytest

BACKENDS = ("cudnn", "miopen", "onednn")
VERSIONS = {"cudnn": [9, 19, 0], "miopen": [3, 4, 0], "onednn": [3, 2, 0]}
VENDOR_FILES = ("libcudnn", "libMIOpen", "libdnnl", "libcuda", "libamdhip64", "libhsa-runtime64")


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


# ---- importing


def test_importing_loads_no_vendor_library(child):
    answer = child(
        """
        import pybnorm
        pybnorm.backends(), pybnorm.loaded("cudnn"), pybnorm.Mode.SPATIAL
        import pybnorm.devices
        report(mapped(*values["names"]))
        """,
        {},
        names=VENDOR_FILES,
    )
    assert answer == []


def test_the_check_of_the_process_map_sees_a_loaded_library(child, doubles):
    library = doubles.build("miopen")
    answer = child("import pybnorm; pybnorm.load('miopen'); report(mapped('libMIOpen'))", {variable("miopen"): library})
    assert answer == [str(library)]


NEXT = {"cudnn": ("libcudnn.so.10", 100000), "miopen": ("libMIOpen.so.2", 4000000), "onednn": ("libdnnl.so.4", 4000000)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_version_of_a_library_is_loaded(child, doubles, backend):
    """It is spoken to as the newest that is known, and a mapped one goes before a known one elsewhere."""
    soname, number = NEXT[backend]
    library = doubles.build(backend, soname=soname, version=number)
    answer = child(
        """
        import ctypes, pybnorm
        held = ctypes.CDLL(values["file"])
        report(pybnorm.load(values["backend"])._asdict())
        """,
        {"LD_LIBRARY_PATH": doubles.build(backend).parent},
        backend=backend,
        file=str(library),
    )
    assert (answer["found_via"], answer["path"]) == ("already in the process", str(library))
    assert answer["version"] == [10 if backend == "cudnn" else 4, 0, 0]


def test_the_next_nvrtc_is_loaded(child, doubles):
    native = Path(__file__).parents[2] / "pybnorm" / "backends" / "native"
    shared = re.findall(r"\bof##(\w+),", (native / "driver.h").read_text())
    names = {f"nvrtc{name}" for name in shared if name != "Version"}
    names |= set(re.findall(r"\b(nvrtc\w+),", (native / "cuda.c").read_text()))
    assert len(names) > 9
    source = "int nvrtcVersion(int *major, int *minor) { *major = 14, *minor = 1; return 0; }"
    source += "".join(f"int {name}(void) {{ return 0; }}" for name in names)
    library = doubles.plain("libnvrtc.so.14", source)
    answer = child(
        """
        import ctypes, pybnorm
        held = ctypes.CDLL(values["file"])
        report(pybnorm.load("native_cuda")._asdict())
        """,
        file=str(library),
    )
    found = answer["found_via"], answer["path"], answer["version"]
    assert found == ("already in the process", str(library), [14, 1, 0])


@pytest.mark.parametrize("status", [0, 1002])
@pytest.mark.parametrize("number", [9, 10])
def test_cudnn_opens_parts_of_its_own_number_and_of_one_version(child, doubles, number, status):
    defines = (f"DOUBLE_MISMATCH={status}",)
    library = doubles.build("cudnn", soname=f"libcudnn.so.{number}", version=number * 10000, defines=defines)
    for part in ("graph", "ops"):
        (library.parent / f"libcudnn_{part}.so.{number}").symlink_to(doubles.plain(f"libcudnn_{part}.so.{number}"))
    script = """
    import pybnorm
    report([attempt(lambda: pybnorm.load("cudnn", values["file"])._asdict()), mapped("libcudnn_")])
    """
    answer, files = child(script, file=str(library))
    names = sorted(map(os.path.basename, files))  # they come in the order of addresses, which is one of chance
    assert names == [f"libcudnn_{part}.so.{number}" for part in ("graph", "ops")]
    if status == 0:
        assert answer["value"]["version"] == [number, 0, 0]
    else:
        assert answer["error"] == "LibraryVersionError", answer
        assert "cudnnOpsVersionCheck() says" in answer["text"]
        assert f"libcudnn_ops.so.{number}" in answer["text"]


# ---- doubles: what can be wrong with a named file


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_named_library_is_loaded(child, doubles, vendors, backend):
    library = doubles.build(backend)
    answer = child(
        """
        import pybnorm
        before = pybnorm.loaded(values["backend"])
        library = pybnorm.load(values["backend"])
        same = pybnorm.load(values["backend"], library.path) is library is pybnorm.loaded(values["backend"])
        report([before, same, library._asdict(), mapped(values["soname"])])
        """,
        {variable(backend): library},
        backend=backend,
        soname=vendors[backend].soname,
    )
    before, same, loaded, files = answer
    assert before is None
    assert same
    assert (loaded["backend"], loaded["version"]) == (backend, VERSIONS[backend])
    assert (loaded["path"], loaded["found_via"], loaded["attempts"]) == (str(library), variable(backend), [])
    assert files == [str(library)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_named_file_can_be_instead(child, doubles, vendors, tmp_path, backend):
    soname = vendors[backend].soname
    text, folder = tmp_path / soname, tmp_path / "folder"
    text.write_text("not a library\n")
    folder.mkdir()
    short = tmp_path / "short.so"
    short.write_bytes(doubles.build(backend).read_bytes()[:100])
    files = {
        "text": text,
        "folder": folder,
        "short": short,
        "missing": tmp_path / "missing" / soname,
        "other": doubles.plain(soname),
        "needy": doubles.plain("needy.so", "int pbn_nowhere(void); int pbn_call(void) { return pbn_nowhere(); }"),
        "version": doubles.build(backend, version=vendors[backend].other_version),
    }
    answer = child(
        """
        import pybnorm
        backend, variable = values["backend"], values["variable"]
        result = {}
        for name, file in values["files"].items():
            by_path = attempt(lambda: pybnorm.load(backend, file))
            os.environ[variable] = file
            result[name] = {"path": by_path, variable: attempt(lambda: pybnorm.load(backend))}
            del os.environ[variable]
        report([result, mapped(*values["names"])])
        """,
        backend=backend,
        variable=variable(backend),
        files={name: str(file) for name, file in files.items()},
        names=VENDOR_FILES,
    )
    result, still_mapped = answer
    expected = {
        "text": ("LibraryLoadError", ("file too short", "invalid ELF header")),
        "folder": ("LibraryLoadError", ("is a directory",)),
        "short": ("LibraryLoadError", ("cannot read file data",)),
        "missing": ("LibraryLoadError", ("no such file",)),
        "other": ("SymbolNotFoundError", tuple(doubles.symbols(backend, "REQUIRED")[:1])),
        "needy": ("LibraryLoadError", ("undefined symbol: pbn_nowhere",)),
        "version": ("LibraryVersionError", ("7605", "1.5.0", "2.7.0")),
    }
    for name, (error, texts) in expected.items():
        assert set(result[name]) == {"path", variable(backend)}
        for how, got in result[name].items():
            assert got.get("error") == error, (name, got)
            assert any(text in got["text"] for text in texts), (name, got)
            assert str(files[name]) in got["text"]
            assert [attempt[:2] for attempt in got["attempts"]] == [[how, str(files[name])]]
    # The real library of this machine has not been taken instead, and what was refused is gone.
    assert still_mapped == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_required_symbol_is_missed_by_name(child, doubles, backend):
    names = doubles.symbols(backend, "REQUIRED")
    assert len(names) >= 15
    files = {name: str(doubles.build(backend, without=[name])) for name in names}
    answer = child(
        """
        import pybnorm
        report({name: attempt(lambda: pybnorm.load(values["backend"], file)) for name, file in values["files"].items()})
        """,
        backend=backend,
        files=files,
    )
    assert set(answer) == set(names)
    for name, result in answer.items():
        assert result.get("error") == "SymbolNotFoundError", (name, result)
        assert f" {name} " in f" {result['attempts'][0][2]} ", result
        assert "AttributeError" in result["classes"]


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
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


def test_symbols_come_from_the_opened_file_only(child, doubles):
    whole = doubles.build("miopen", soname="libwhole.so")
    part = doubles.build("miopen", without=["miopenDestroy"])
    answer = child(
        """
        import ctypes, pybnorm
        ctypes.CDLL(values["whole"], mode=ctypes.RTLD_GLOBAL).miopenDestroy
        report(attempt(lambda: pybnorm.load("miopen", values["part"])))
        """,
        whole=str(whole),
        part=str(part),
    )
    assert answer["error"] == "SymbolNotFoundError"
    assert "miopenDestroy" in answer["text"]


def test_what_is_loaded_stays_local(child, doubles):
    answer = child(
        """
        import ctypes, pybnorm
        pybnorm.load("cudnn", values["file"])
        report([hasattr(ctypes.CDLL(None), "cudnnGetVersion"), hasattr(ctypes.CDLL(values["file"]), "cudnnGetVersion")])
        """,
        file=str(doubles.build("cudnn")),
    )
    assert answer == [False, True]


def test_a_oneDNN_without_a_cpu_runtime_is_refused(child, doubles):
    library = doubles.build("onednn", defines=["DOUBLE_CPU_RUNTIME=0"])
    answer = child("import pybnorm; report(attempt(lambda: pybnorm.load('onednn', values['f'])))", f=str(library))
    assert answer["error"] == "LibraryVersionError"
    assert "CPU runtime" in answer["text"]


@pytest.mark.parametrize("runtime", [2, 512])
@pytest.mark.parametrize(("set_by_user", "beside"), [(False, True), (True, True), (False, False)])
def test_sycl_finds_opencls_driver_beside_the_library(child, doubles, runtime, set_by_user, beside):
    """While the library is loaded, and never against the user's word."""
    library = doubles.build("onednn", defines=[f"DOUBLE_CPU_RUNTIME={runtime}"])
    driver = library.with_name("libintelocl.so")
    if beside:
        driver.touch()
    seen, after = child(
        """
        import ctypes, pybnorm
        library = ctypes.CDLL(pybnorm.load("onednn", values["f"]).path)
        seen = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "double_driver"))).decode()
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        report([seen, (getenv(b"OCL_ICD_FILENAMES") or b"").decode()])
        """,
        {"OCL_ICD_FILENAMES": "mine"} if set_by_user else {},
        f=str(library),
    )
    own = "mine" if set_by_user else ""
    assert after == own
    assert seen == (str(driver) if runtime == 512 and beside and not set_by_user else own)


@pytest.mark.slow
def test_a_forked_child_is_refused_where_openmp_cannot_be_kept_to_one_thread(child, doubles):
    """An OpenMP that is inside the library, say, or SYCL. The doubles make no handles: what else is asked ends the
    process."""
    answers = []
    for runtime, extra in ((2, ()), (512, ()), (2, ("DOUBLE_EXPORTS=__kmpc_fork_call",)), (4, ())):
        library = doubles.build("onednn", defines=[f"DOUBLE_CPU_RUNTIME={runtime}", *extra])
        answers.append(
            child(
                """
                import pybnorm
                pybnorm.load("onednn", values["file"])
                reading, writing = os.pipe()
                pid = os.fork()
                if pid == 0:
                    answer = [attempt(lambda: pybnorm.Handle("onednn")),
                              attempt(lambda: pybnorm.Handle.from_pointer("onednn", 1))]
                    os.write(writing, json.dumps(answer).encode())
                    os._exit(0)
                os.close(writing)
                with open(reading) as pipe:
                    report(pipe.read())
                os.waitpid(pid, 0)
                """,
                file=str(library),
            )
        )
    for refused in json.loads(answers[0]) + json.loads(answers[1]):
        assert refused["error"] == "UnsupportedError"
        assert "spawn" in refused["text"]
        assert "forkserver" in refused["text"]
    assert answers[2:] == ["", ""]  # Intel's and LLVM's, and TBB: it went on to the vendor


# ---- doubles: the search


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_in_the_process_is_preferred(child, doubles, vendors, tmp_path, backend):
    """Also one that was opened by absolute path, and before anything that is installed."""
    mine, other = doubles.build(backend), doubles.build(backend)
    conda = tmp_path / "conda/lib"
    conda.mkdir(parents=True)
    (conda / other.name).symlink_to(other)
    answer = child(
        """
        import ctypes, pybnorm
        ctypes.CDLL(values["mine"])
        report([pybnorm.load(values["backend"])._asdict(), mapped(values["soname"])])
        """,
        {"CONDA_PREFIX": conda.parent, "LD_LIBRARY_PATH": other.parent},
        mine=str(mine),
        backend=backend,
        soname=vendors[backend].soname,
    )
    loaded, files = answer
    assert loaded["path"] == str(mine)
    assert loaded["found_via"] == "already in the process"
    assert loaded["attempts"] == []
    assert files == [str(mine)]


# A soname that no machine has: what is installed here cannot answer for the place under test.
OWN_SONAME = """
        import dataclasses, pybnorm
        from pybnorm import _find
        folders = (os.getcwd() + "/opt/rocm-*/lib",)
        _find.SPECS["miopen"] = dataclasses.replace(
            _find.SPECS["miopen"], sonames=("libMIOpen.so.987",), loaded_names=(), folders=folders
        )
"""


def test_nothing_anywhere_lists_everything_and_is_not_cached(child, doubles):
    library = doubles.build("miopen", soname="libMIOpen.so.987")
    answer = child(
        OWN_SONAME
        + """
        first = attempt(lambda: pybnorm.load("miopen"))
        handle = attempt(lambda: pybnorm.Handle("miopen"))
        os.environ["PYBNORM_LIB_MIOPEN"] = values["file"]
        report([first, handle, attempt(lambda: pybnorm.load("miopen"))])
        """,
        file=str(library),
    )
    first, handle, then = answer
    assert first["error"] == handle["error"] == "LibraryNotFoundError"
    assert "ImportError" in first["classes"]
    hows = list(dict.fromkeys(how for how, _, _ in first["attempts"]))
    assert (hows[:2], hows[-1]) == (["already in the process", "rocm_sdk"], "fixed directory")
    assert all(f"{how}: {file}: {why}" in first["text"] for how, file, why in first["attempts"])
    assert "PYBNORM_LIB_MIOPEN" in first["text"]
    assert then["value"]["found_via"] == "PYBNORM_LIB_MIOPEN"


def test_many_threads_load_once(child, doubles):
    answer = child(
        """
        import threading, pybnorm
        from pybnorm import _find
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
        {variable("miopen"): doubles.build("miopen")},
    )
    assert answer == [1, 8, 1]


def test_a_second_file_is_refused_once_one_is_loaded(child, doubles):
    one, two = doubles.build("miopen"), doubles.build("miopen")
    answer = child(
        """
        import pybnorm
        pybnorm.load("miopen", values["one"])
        report([attempt(lambda: pybnorm.load("miopen", values[k])) for k in ("one", "two")])
        """,
        one=str(one),
        two=str(two),
    )
    assert answer[0]["value"]["path"] == str(one)
    assert answer[1]["error"] == "LibraryLoadError"
    assert str(one) in answer[1]["text"]


# ---- the real libraries


def test_the_real_onednn_of_its_wheel(child):
    name, path = distribution_file("onednn-cpu-gomp", "onednn-cpu-iomp", "onednn-cpu-tbb", soname="libdnnl.so.3")
    answer = child("import pybnorm; report([pybnorm.load('onednn')._asdict(), mapped('libdnnl')])")
    loaded, files = answer
    assert loaded["found_via"] == f"distribution {name}"
    assert Path(loaded["path"]).resolve() == Path(path)
    assert loaded["version"][0] == 3
    assert loaded["device_type"] == 1
    assert [Path(file).resolve() for file in files] == [Path(path)]


CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")


def test_the_real_cudnn_without_pathfinder(child):
    name, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    answer = child(
        """
        sys.modules["cuda.pathfinder"] = None  # as if not installed
        import pybnorm
        report([pybnorm.load("cudnn")._asdict(), mapped("libcudnn.so")])
        """
    )
    loaded, files = answer
    assert loaded["found_via"] == f"distribution {name}"
    assert Path(loaded["path"]).resolve() == Path(path)
    assert loaded["version"][0] == 9
    assert loaded["device_type"] == 2
    assert [Path(file).resolve() for file in files] == [Path(path)]
    assert any(how == "cuda.pathfinder" and "ModuleNotFoundError" in why for how, _, why in loaded["attempts"])


@pytest.mark.parametrize(
    ("kept", "error", "what"),
    [
        ("libcudnn_graph.so.9", "SymbolNotFoundError", "symbol cudnnCreateTensorDescriptor is missing"),
        ("libcudnn.so.9 libcudnn_graph.so.9", "LibraryLoadError", "libcudnn_ops.so.9 cannot be opened"),
    ],
)
def test_the_real_cudnn_without_its_batch_norm_calls(child, tmp_path, kept, error, what):
    """An installation for graphs alone: loading says what it lacks, where a call would abort the process."""
    _, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    for name in kept.split():
        (tmp_path / name).symlink_to(Path(path).resolve().parent / name)
    answer = child(
        "import pybnorm; report(attempt(lambda: pybnorm.load('cudnn', values['file'])))",
        file=tmp_path / kept.partition(" ")[0],
    )
    assert answer["error"] == error, answer
    assert what in answer["text"]


def test_the_real_cudnn_through_pathfinder(child, doubles):
    _, path = distribution_file(*CUDNN_WHEELS, soname="libcudnn.so.9")
    try:
        version = importlib.metadata.version("cuda-pathfinder")
    except importlib.metadata.PackageNotFoundError:
        unavailable("cudnn", "cuda-pathfinder is not installed")
    if tuple(map(int, version.split(".")[:2])) < (1, 7):
        pytest.skip(f"cuda-pathfinder {version} does not know cuDNN, 1.7 does")
    # Pathfinder loads cuBLAS first, which cuDNN's wheel need not have beside it; binding needs none of it.
    cublas = doubles.plain("libcublasLt.so.12")
    answer = child(
        "import pybnorm; report(pybnorm.load('cudnn')._asdict())",
        {"LD_LIBRARY_PATH": cublas.parent},
    )
    assert answer["found_via"] == "cuda.pathfinder"
    assert Path(answer["path"]).resolve() == Path(path)
    assert answer["version"][0] == 9


def test_the_search_leaves_the_environment_alone(child):
    answer = child(
        """
        before = dict(os.environ)
        import pybnorm
        for backend in pybnorm.backends():
            attempt(lambda: pybnorm.load(backend))
        report([dict(os.environ) == before, sys.prefix])
        """,
        {},
    )
    assert answer == [True, sys.prefix]
