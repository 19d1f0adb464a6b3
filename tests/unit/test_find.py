"""The search itself: order, memory of failures, overrides. Nothing is loaded here."""

import dataclasses
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tables import table

from pybnorm import _find, errors
from pybnorm._find import SPECS, LibrarySpec, OpenFailed, find
from pybnorm.devices import hip

VARIABLES = ("CONDA_PREFIX", "PYBNORM_DEBUG_LOAD", "CUDNN_PATH", "CUDA_PATH", "CUDA_HOME", "ROCM_PATH", "ROCM_HOME")
VARIABLES += ("HIP_PATH", "DNNLROOT", "FOO_ROOT", "FOO_HOME", "PYBNORM_LIB_FOO")
VARIABLES += tuple(spec.variable for spec in SPECS.values())


class Opener:
    """Opens what it was told to; remembers what it was asked."""

    def __init__(self, opens=()):
        self.opens = dict(opens)
        self.asked = []

    def __call__(self, file, no_load):
        self.asked.append((file, no_load))
        answer = self.opens.get(f"{file} in process" if no_load else file, OpenFailed("open", "cannot open it"))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def files(self):
        """Paths among what it was asked for."""
        return [file for file, _ in self.asked if "/" in file]


def not_found(spec, opener):
    with pytest.raises(errors.LibraryNotFoundError) as caught:
        find(spec, opener)
    return caught.value


class World:
    """A machine on which every step of the search has something to look at."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.monkeypatch = monkeypatch
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        # None in sys.modules makes an import fail, also where the real package is installed.
        for name in ("cuda", "cuda.pathfinder", "rocm_sdk"):
            monkeypatch.setitem(sys.modules, name, None)
        self.distributions({})
        monkeypatch.setattr(sys, "prefix", str(root / "prefix"))
        self.spec = LibrarySpec(
            backend="foo",
            label="Foo",
            sonames=("libfoo.so.9", "libfoo.so.8"),
            hint="install foo",
            loaded_names=("libfoo.so",),
            pathfinder="foo",
            rocm_sdk="foo",
            rocm_sdk_needs=("runtime", "compiler"),
            distributions=("foo-cu13", "foo-cu12"),
            roots=("FOO_ROOT", "FOO_HOME"),
            folders=(str(root / "opt/foo-*/lib"), "{prefix}/lib"),
        )

    def file(self, *parts):
        path = self.root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path))
        return str(path)

    def module(self, name, **functions):
        module = ModuleType(name)
        vars(module).update(functions)
        self.monkeypatch.setitem(sys.modules, name, module)

    def pathfinder(self, answer):
        asked = []

        def load_nvidia_dynamic_lib(name):
            asked.append(name)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(abs_path=answer)  # no other attribute may be used

        self.module("cuda")
        self.module("cuda.pathfinder", load_nvidia_dynamic_lib=load_nvidia_dynamic_lib)
        return asked

    def rocm_sdk(self, answer, preload=lambda *_, **__: None):
        calls = []

        def find_libraries(*names):
            calls.append(("find", names))
            print("the tool says something")
            if isinstance(answer, Exception):
                raise answer
            return [Path(str(answer))]

        def preload_libraries(*names, rtld_global=True):
            calls.append(("preload", names, rtld_global))
            preload()

        self.module("rocm_sdk", find_libraries=find_libraries, preload_libraries=preload_libraries)
        return calls

    def distributions(self, files):
        def listed(name):
            if name not in files:
                raise importlib.metadata.PackageNotFoundError(name)
            return [SimpleNamespace(name=Path(f).name, locate=lambda f=f: Path(f)) for f in files[name]]

        self.monkeypatch.setattr(_find.importlib.metadata, "files", listed)

    def variable(self, name, value):
        self.monkeypatch.setenv(name, str(value))

    def furnish(self):
        """Puts a library everywhere; returns the (how, file, no_load) in the order of the search."""
        wheel_path = self.file("pathfinder/libfoo.so.9")
        rocm_path = self.file("rocm/libfoo.so.9")
        cu13, cu12 = self.file("cu13/libfoo.so.9"), self.file("cu12/libfoo.so.8")
        self.pathfinder(wheel_path)
        self.rocm_sdk(rocm_path)
        self.distributions({"foo-cu13": [self.file("cu13/readme"), cu13], "foo-cu12": [cu12]})
        conda = [self.file("conda/lib", soname) for soname in self.spec.sonames]
        self.variable("CONDA_PREFIX", self.root / "conda")
        root = [self.file("root", lib, soname) for lib in ("lib", "lib64") for soname in self.spec.sonames]
        self.variable("FOO_ROOT", self.root / "root")
        home = [self.file("home/lib64/libfoo.so.9")]
        self.variable("FOO_HOME", self.root / "home")
        newest, older = self.file("opt/foo-6.10/lib/libfoo.so.9"), self.file("opt/foo-6.9.2/lib/libfoo.so.9")
        prefix = self.file("prefix/lib/libfoo.so.9")
        places = [
            ("already in the process", "libfoo.so.9", "libfoo.so.8", "libfoo.so"),
            ("cuda.pathfinder", wheel_path),
            ("rocm_sdk", rocm_path),
            ("rocm_sdk, what it needs preloaded", rocm_path),
            ("distribution foo-cu13", cu13),
            ("distribution foo-cu12", cu12),
            ("CONDA_PREFIX", *conda),
            ("system loader", "libfoo.so.9", "libfoo.so.8"),
            ("FOO_ROOT", *root),
            ("FOO_HOME", *home),
            ("fixed directory", newest, older, prefix),
        ]
        return [(how, file, how == "already in the process") for how, *files in places for file in files]


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


# ---- order


@table("index", range(21))
def test_the_first_that_opens_ends_the_search(world, index):
    """Of the last nothing opens."""
    places = world.furnish()
    assert len(places) == 20
    opener, tried = Opener(), places[: index + 1]
    if index == 20:
        attempts = not_found(world.spec, opener).attempts
    else:
        how, file, no_load = places[index]
        library = object()
        opener.opens = {f"{file} in process" if no_load else file: library}
        if how == "rocm_sdk, what it needs preloaded":  # opens only once its needs are there
            opener.opens = {}
            world.rocm_sdk(file, preload=lambda: opener.opens.update({file: library}))
        opened, found_via, attempts = find(world.spec, opener)
        assert (opened, found_via) == (library, how)
    assert opener.asked == [(file, no_load) for _, file, no_load in tried]
    failed = [(how, file) for how, file, why in attempts if why == "cannot open it"]
    assert failed == [(how, file) for how, file, _ in places[:index]]


def test_bare_machine_lists_every_place_with_its_reason(world):
    error = not_found(world.spec, Opener())
    reasons = {(how, file): why for how, file, why in error.attempts}
    assert reasons[("already in the process", "libfoo.so")] == "cannot open it"
    assert reasons[("cuda.pathfinder", "foo")].startswith("ModuleNotFoundError")
    assert reasons[("rocm_sdk", "foo")].startswith("ModuleNotFoundError")
    assert reasons[("distribution foo-cu12", "libfoo.so.9")] == "not installed"
    assert reasons[("CONDA_PREFIX", "$CONDA_PREFIX/lib")] == "the variable is not set"
    assert reasons[("system loader", "libfoo.so.8")] == "cannot open it"
    assert reasons[("FOO_HOME", "$FOO_HOME/lib")] == "the variable is not set"
    assert reasons[("fixed directory", str(world.root / "opt/foo-*/lib"))] == "no such directory"
    text = str(error)
    assert all(f"  {how}: {file}: {why}" in text for (how, file), why in reasons.items())
    assert "install foo" in text
    assert "PYBNORM_LIB_FOO" in text
    assert (error.backend, isinstance(error, ImportError)) == ("foo", True)


def test_a_variable_set_to_nothing_is_not_set(world):
    for name in ("PYBNORM_LIB_FOO", "CONDA_PREFIX", "FOO_ROOT"):
        world.variable(name, "")
    opened, found_via, attempts = find(world.spec, Opener({"libfoo.so.9": "system"}))
    assert (opened, found_via) == ("system", "system loader")
    assert ("CONDA_PREFIX", "$CONDA_PREFIX/lib", "the variable is not set") in attempts


@table("kind", ["symbol", "version", "open"])
@table("place", ["libfoo.so.9 in process", "libfoo.so.9"])
def test_a_library_that_does_not_serve_is_remembered_and_the_search_goes_on(world, kind, place):
    root = world.file("root/lib/libfoo.so.9")
    world.variable("FOO_ROOT", world.root / "root")
    opens = {place: OpenFailed(kind, "this and that"), root: "the root's"}
    opened, found_via, attempts = find(world.spec, Opener(opens))
    assert (opened, found_via) == ("the root's", "FOO_ROOT")
    how = "already in the process" if "process" in place else "system loader"
    assert (how, "libfoo.so.9", "this and that") in attempts


def test_one_file_by_two_ways_is_opened_once(world):
    file = world.file("conda/lib/libfoo.so.9")
    (world.root / "home").symlink_to(world.root / "conda")
    world.variable("CONDA_PREFIX", world.root / "conda")
    world.variable("FOO_HOME", world.root / "home")
    opener = Opener()
    attempts = not_found(world.spec, opener).attempts
    assert opener.files() == [file]
    assert ("FOO_HOME", str(world.root / "home/lib/libfoo.so.9"), "the same file as above") in attempts


def test_other_exceptions_of_the_opener_are_not_hidden(world):
    with pytest.raises(ZeroDivisionError):
        find(world.spec, Opener({"libfoo.so.9": ZeroDivisionError()}))


# ---- overrides


def test_a_named_file_is_opened_and_nothing_else(world):
    """The path goes before the variable; a bare name is a file of this directory, no search; home is expanded."""
    world.furnish()
    file, other = world.file("named/any name"), world.file("variable.so")
    opens = {file: "named", other: "other", "libfoo.so.9 in process": "loaded", "libfoo.so.9": "the system's"}
    for variable, path, how in (
        (file, None, "PYBNORM_LIB_FOO"),
        (other, Path(file), "path"),
        ("~/any name", None, "PYBNORM_LIB_FOO"),
        (other, "any name", "path"),
    ):
        world.monkeypatch.chdir(world.root / "named")
        world.variable("HOME", world.root / "named")
        world.variable("PYBNORM_LIB_FOO", variable)
        opener = Opener(opens)
        assert find(world.spec, opener, path) == ("named", how, ())
        assert opener.asked == [(file, False)]
    world.variable("PYBNORM_LIB_FOO", "libfoo.so.9")
    with pytest.raises(errors.LibraryLoadError, match=r"no such file"):
        find(world.spec, opener)


# ---- the vendors' Python packaging


@table("how", ["cuda.pathfinder", "rocm_sdk"])
@table("error", [RuntimeError("Unknown: 'foo'.\n  Known: cudart"), UnboundLocalError(), OSError()])
def test_a_vendors_package_that_fails_is_passed_by(world, how, error):
    asked = world.pathfinder(error) if how == "cuda.pathfinder" else world.rocm_sdk(error)
    opened, _, attempts = find(world.spec, Opener({"libfoo.so.9": 1}))
    assert (opened, asked) == (1, ["foo"] if how == "cuda.pathfinder" else [("find", ("foo",))])
    why = next(why for step, _, why in attempts if step == how)
    assert why.startswith(type(error).__name__)
    assert "\n" not in why


def test_pathfinder_without_a_path_is_passed_by(world):
    world.pathfinder(None)
    opener = Opener({"libfoo.so.9": 1})
    assert find(world.spec, opener)[0] == 1
    assert None not in [file for file, _ in opener.asked]


def test_rocm_sdk_preloads_only_after_the_loader_refused(world, capsys):
    file = world.file("rocm/libfoo.so.9")
    preload = ("preload", ("runtime", "compiler"), False)
    for opens, preloads in (
        ({file: 1}, []),
        ({file: OpenFailed("symbol", ""), "libfoo.so.9": 1}, []),
        ({file: OpenFailed("version", ""), "libfoo.so.9": 1}, []),
        ({"libfoo.so.9": 1}, [preload]),
    ):
        calls = world.rocm_sdk(file)
        assert find(world.spec, Opener(opens))[0] == 1
        assert calls == [("find", ("foo",)), *preloads]
    assert capsys.readouterr().out == ""  # what its tools print must not reach stdout, which may be JSON


def test_rocm_sdk_whose_preloading_fails_is_passed_by(world):
    file = world.file("rocm/libfoo.so.9")
    world.rocm_sdk(file, lambda: {}["runtime"])
    opener = Opener({"libfoo.so.9": 1})
    _, _, attempts = find(world.spec, opener)
    assert opener.files() == [file]
    assert ("rocm_sdk", file, "preloading what it needs: KeyError: 'runtime'") in attempts


def test_a_distribution_is_found_by_its_own_list_of_files(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    site = tmp_path / "user/lib/python/site-packages"
    info = site / "foo_cpu-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foo-cpu\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "foo_cpu-1.0.dist-info/METADATA,,\n../../libfoo.so.8,,\n../../libfoo.so.9,,\n../../gone,,\n"
    )
    monkeypatch.syspath_prepend(str(site))
    library = tmp_path / "user/lib/libfoo.so.9"
    spec = LibrarySpec("foo", "Foo", ("libfoo.so.9", "libfoo.so.8"), "", distributions=("foo-gpu", "foo-cpu"))
    why = {how: why for how, _, why in not_found(spec, Opener()).attempts}
    assert why["distribution foo-gpu"] == "not installed"
    assert "pip install --target" in why["distribution foo-cpu"]  # which writes such lists, and not the files
    library.write_text("")
    assert find(spec, Opener({str(library): 1}))[:2] == (1, "distribution foo-cpu")


def test_of_a_distributions_files_the_best_soname_goes_first(world):
    eight, nine = world.file("cu12/libfoo.so.8"), world.file("cu12/libfoo.so.9")
    world.distributions({"foo-cu12": [eight, nine]})
    assert find(world.spec, Opener({eight: 8, nine: 9}))[0] == 9
    assert find(world.spec, Opener({eight: 8}))[0] == 8
    world.distributions({"foo-cu13": [], "foo-cu12": ["/somewhere/libfoo.so"]})
    _, _, attempts = find(world.spec, Opener({"libfoo.so.9": 1}))
    for name in ("foo-cu13", "foo-cu12"):
        assert (f"distribution {name}", "libfoo.so.9", "not in its list of files") in attempts


# ---- numbers that no table has


@pytest.mark.parametrize("place", ["distribution foo-cu13", "FOO_ROOT", "fixed directory", "LD_LIBRARY_PATH"])
def test_of_many_versions_in_one_place_the_highest_comes_first(world, place):
    folder = "opt/foo-6/lib" if place == "fixed directory" else "root/lib"
    world.variable("FOO_ROOT", world.root / ("root" if place == "FOO_ROOT" else "nowhere"))
    world.variable("LD_LIBRARY_PATH", world.root / (folder if place == "LD_LIBRARY_PATH" else "nowhere"))
    names = ("libfoo.so.9.6", "libfoo.so.12", "libfoo.so.13-gdb.py", "libfoo.so.13.x", "xlibfoo.so.14")
    files = {name: world.file(folder, name) for name in names}
    if place.startswith("distribution"):
        world.distributions({"foo-cu13": [files[name] for name in names if name != "libfoo.so.9.6"]})
    opener = Opener(dict.fromkeys(files.values(), 1))
    assert find(world.spec, opener)[1] == place
    assert opener.asked[-1] == (files["libfoo.so.12"], False)
    seen = world.file(folder, "libfoo.so.8")
    if place in ("FOO_ROOT", "fixed directory"):  # the others ask the loader, or a list of files
        find(world.spec, opener := Opener({seen: 1} | opener.opens))
        assert opener.asked[-1] == (seen, False)


def test_a_mapped_file_of_such_a_name_is_in_the_process(world, monkeypatch):
    mapped = {"/somewhere/libfoo.so.9.6", "/somewhere/libfoo.so.10", "/somewhere/libfoo.so.9.6-gdb.py"}
    monkeypatch.setattr(_find, "_mapped_files", lambda: mapped)
    opener = Opener({f"{path} in process": path for path in mapped} | {"libfoo.so.8": 1})
    assert find(world.spec, opener)[:2] == ("/somewhere/libfoo.so.10", "already in the process")


@table("spec", [*SPECS.values(), hip.SPEC])
def test_the_next_number_of_every_library_is_found(world, monkeypatch, spec):
    if not spec.sonames:
        assert spec.file
        return
    family, _, number = spec.sonames[0].rpartition(".")
    file = world.file("root/lib", f"{family}.{int(number) + 1}")
    spec = dataclasses.replace(spec, pathfinder="", rocm_sdk="", distributions=(), folders=())
    world.variable("LD_LIBRARY_PATH", os.path.dirname(file))
    assert find(spec, Opener({file: 1}))[:2] == (1, "LD_LIBRARY_PATH")
    monkeypatch.setattr(_find, "_mapped_files", lambda: {file})
    assert find(spec, Opener({f"{file} in process": 1, spec.sonames[0]: 2}))[:2] == (1, "already in the process")
    world.variable("LD_LIBRARY_PATH", "")
    monkeypatch.setattr(_find, "_configured", lambda name: {os.path.basename(file)} if name == f"{family}.*" else set())
    assert find(spec, Opener({os.path.basename(file): 1}))[:2] == (1, "system loader")


def test_the_loaders_cache_and_the_map_of_the_process_are_read():
    assert "libc.so.6" in _find._configured("libc.so.*")
    assert _find._configured("libno-such.so.*") == set()
    assert any(re.fullmatch(r"libc[.-].*", os.path.basename(path)) for path in _find._mapped_files())


# ---- what the loader misses, beside the file


@table("named", [False, True])
def test_what_lies_beside_a_file_is_opened_before_it(world, monkeypatch, named):
    """Some wheels are linked without a run path; what is missed may miss something itself."""
    file, bar, baz = (world.file("root/lib", name) for name in ("libfoo.so.9", "libbar.so.12", "libbaz.so"))
    world.variable("FOO_ROOT", world.root / "root")
    needs = {file: [bar], bar: [baz], baz: []}
    opened = []

    def open_library(path, no_load):
        for need in needs.get(path, ["libc.so"]):
            if need not in opened:
                text = "cannot open shared object file: No such file or directory"
                raise OpenFailed("open", f"{os.path.basename(need)}: {text}")
        opened.append(path)
        return path

    def dependency(path):
        try:
            return open_library(path, False)
        except OpenFailed as error:
            raise OSError(error.message) from None

    monkeypatch.setattr(_find.ctypes, "CDLL", dependency)
    found, how, _ = find(world.spec, open_library, file if named else None)
    assert (found, how) == (file, f"{'path' if named else 'FOO_ROOT'}, what it needs preloaded")
    assert opened == [baz, bar, file]


@table("text", ["libbar.so.12: cannot open", "libbar.so.12: wrong ELF class", "no name in it"])
def test_what_cannot_be_opened_beside_a_file_does_not_go_round(world, monkeypatch, text):
    file = world.file("root/lib/libfoo.so.9")
    world.file("root/lib/libbar.so.12")
    world.variable("FOO_ROOT", world.root / "root")
    asked = []
    monkeypatch.setattr(_find.ctypes, "CDLL", asked.append)
    error = not_found(world.spec, Opener({file: OpenFailed("open", text)}))
    assert ("FOO_ROOT", file, text) in error.attempts
    assert len(asked) == (0 if text.startswith("no") else 1)


# ---- trace


def test_trace(world, capsys):
    for value in ("1", "0", "", None):
        if value is None:
            world.monkeypatch.delenv("PYBNORM_DEBUG_LOAD")
        else:
            world.variable("PYBNORM_DEBUG_LOAD", value)
        _, _, attempts = find(world.spec, Opener({"libfoo.so.8": 1}))
        lines = [f"pybnorm: foo: {how}: {file}: {why}" for how, file, why in attempts]
        lines.append("pybnorm: foo: system loader: libfoo.so.8: opened")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines() == (lines if value == "1" else [])


# ---- the table


def test_only_the_search_names_a_number_that_the_next_version_changes():
    """libcuda, libgomp and libstdc++ keep theirs; cuDNN's parts have the number of the file, which a test loads."""
    kept = {"libcuda.so.1", "libgomp.so.1", "libstdc++.so.6"}
    searched = {name for spec in (*SPECS.values(), hip.SPEC) for name in spec.sonames}
    source = Path(__file__).parents[2] / "pybnorm"  # what is installed has no C
    files = [f for f in source.rglob("*.*") if f.suffix in {".c", ".h", ".cuh", ".py", ".pxi"} and f.name != "_core.c"]
    named = {name for f in files for name in re.findall(r"lib[\w+-]+\.so\.\d+", f.read_text())}
    assert searched <= named
    others = {name for name in named - searched - kept if not re.fullmatch(r"libcudnn_\w+\.so\.[89]", name)}
    assert others == {"libz3.so.4"}, "a LibrarySpec finds every number"  # an example of _find.py


def test_fixed_directories_of_miopen(world):
    patterns = SPECS["miopen"].folders
    assert patterns == ("/opt/rocm/core*/lib", "/opt/rocm/lib", "/opt/rocm-*/lib")
    moved = tuple(str(world.root) + pattern for pattern in patterns)
    folders = ("rocm/core-7.10", "rocm/core-7.9", "rocm", "rocm-7.0", "rocm-6.4.1")
    files = [world.file(f"opt/{folder}/lib", "libMIOpen.so.1") for folder in folders]
    opener = Opener()
    not_found(dataclasses.replace(SPECS["miopen"], folders=moved), opener)
    assert opener.files() == files
    # The unversioned name is only looked up in the process.
    assert ("libMIOpen.so", True) in opener.asked
    assert "libMIOpen.so" not in [os.path.basename(f) for f, no_load in opener.asked if not no_load]


def test_the_prefix_may_hold_glob_characters(world):
    world.monkeypatch.setattr(sys, "prefix", str(world.root / "pre[fix]*"))
    file = world.file("pre[fix]*/lib/libdnnl.so.3")
    assert find(SPECS["onednn"], Opener({file: 1}))[:2] == (1, "fixed directory")
