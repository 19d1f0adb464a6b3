"""The package as others use it: submodules on first use, headers for compilers."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pybnorm

FOLDER = Path(pybnorm.__file__).parent
ROOT = Path(__file__).parents[2]
INTERNAL = {"cli", "pytest_plugin", "backends", "include"}  # reached by a command, an option or get_include()

MODULE = """
from pybnorm._shim cimport PBN_FLOAT16, PBN_MAX_RANK, pbn_tensor

def facts():
    cdef pbn_tensor tensor
    tensor.rank = PBN_MAX_RANK
    return PBN_FLOAT16, tensor.rank
"""


def test_submodules_are_imported_when_they_are_used(child):
    loaded = child(
        """
        import warnings
        warnings.simplefilter("error")
        import pybnorm
        names = [n for n in sys.modules if n.startswith('pybnorm.')]
        pybnorm.functional.batch_norm_training
        pybnorm.reference, pybnorm.check.language.problem
        report(names)
        """,
        env={},
    )
    names = "_arguments _arrays _core _find _text _words defects defects.cudnn defects.kinds defects.miopen"
    names += " defects.onednn diagnostics enums errors"
    assert set(loaded) == {f"pybnorm.{name}" for name in names.split()}


@pytest.mark.slow
def test_a_source_tree_that_is_not_built_says_so_in_one_sentence(tmp_path):
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.h")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "pybnorm", tree / "pybnorm", ignore=left_out)
    for file in ("_pybnorm_command.py", "_pybnorm_pytestplugin.py", "pyproject.toml"):
        shutil.copy2(ROOT / file, tree)
    (tree / "tests").mkdir()
    shutil.copy2(ROOT / "tests" / "conftest.py", tree / "tests")
    wanted = f"pybnorm is imported from its source tree {tree}, where its extension is not built for Python "

    def last(*arguments):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode not in (0, None), done.stdout
        return done.stderr.strip()

    code = last("-c", "import pybnorm").splitlines()[-1]
    assert code.startswith(f"ImportError: {wanted}")
    assert "pip install -e ." in code
    for module, head in (("pybnorm", "pybnorm: "), ("pytest", "ERROR: ")):
        said = last("-m", module)
        assert said == head + code.removeprefix("ImportError: ")
    (tree / "pybnorm" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("not ELF")
    assert "_core" in (other := last("-c", "import pybnorm").splitlines()[-1])  # what else is wrong stays visible
    assert "not built" not in other


def test_every_public_submodule_is_listed():
    there = {path.stem for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    public = {name for name in there if not name.startswith("_")} - INTERNAL
    assert public == pybnorm._SUBMODULES
    assert public <= set(dir(pybnorm))
    assert set(pybnorm.__all__) <= set(dir(pybnorm))


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pybnorm' has no attribute 'functionnal'"):
        _ = pybnorm.functionnal
    inspect.getmembers(pybnorm)


def test_a_submodule_whose_package_is_missing_is_an_attribute_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [n for n in sys.modules if n == "pybnorm.torch" or n.startswith("pybnorm.torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pybnorm, "torch", raising=False)
    with pytest.raises(AttributeError, match=r"pybnorm\.torch cannot be imported: .*torch"):
        _ = pybnorm.torch


@pytest.mark.slow
def test_a_cython_module_compiles_against_the_headers(tmp_path):
    include = Path(pybnorm.get_include())
    assert (include / "pybnorm" / "shim.h").is_file()
    (tmp_path / "mine.pyx").write_text(MODULE)
    library = tmp_path / ("mine" + sysconfig.get_config_var("EXT_SUFFIX"))
    compiler = sysconfig.get_config_var("CC").split()
    folders = [f"-I{folder}" for folder in (include, sysconfig.get_path("include"))]
    for command in (
        [sys.executable, "-m", "cython", "-3", "mine.pyx"],
        [*compiler, "-shared", "-fPIC", "-O0", *folders, "mine.c", "-o", library],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    spec = importlib.util.spec_from_file_location("mine", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.facts() == (int(pybnorm.DataType.FLOAT16), 8)


@pytest.mark.parametrize("name", ["Handle", "TensorDescriptor"])
def test_classes_of_the_core_have_the_signature_of_their_stubs(name):
    """Python reads it from the docstring of a compiled class."""
    tree = ast.parse(Path(pybnorm.__file__).with_name("_core.pyi").read_text(encoding="utf-8"))
    (stub,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    (init,) = [node for node in stub.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    own = inspect.signature(getattr(pybnorm, name)).parameters.values()
    named = [*init.args.args[1:], *init.args.kwonlyargs]
    assert [p.name for p in own] == [argument.arg for argument in named]
    assert [p.name for p in own if p.kind == p.KEYWORD_ONLY] == [a.arg for a in init.args.kwonlyargs]
    assert not getattr(pybnorm, name).__doc__.startswith(name)


def test_the_conda_recipe_needs_what_the_package_needs():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    recipe = (ROOT / "recipe/recipe.yaml").read_text()

    def listed(section):
        block = re.search(rf"^  {section}:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1]
        return {line.removeprefix("    - ").replace(" ", "") for line in block.splitlines()}

    assert listed("run") - {"python"} == set(project["project"]["dependencies"])
    assert listed("host") - {"python", "pip"} == set(project["build-system"]["requires"])
    assert f'default="{pybnorm.__version__}"' in recipe


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_installs_and_runs_what_there_is(name):
    from pybnorm.cli import main

    lines = (ROOT / f"docker/{name}.Dockerfile").read_text().splitlines()
    said = [line.partition(" ")[::2] for line in lines if line[0] != "#"]
    assert {word for word, _ in said} <= {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
    given = dict(said)
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = re.search(r"pip install \S+ '/source\[(.*)\]'", given["RUN"])[1].split(",")
    assert [e for e in extras if f"\n{e} = [" not in f"\n{section}"] == []
    assert given["COPY"] == ". /source"
    command, *options = json.loads(given["CMD"])
    assert json.loads(given["ENTRYPOINT"]) == ["pybnorm"]
    context = main.get_command(None, command).make_context(command, options)
    assert set(context.params["backends"]) <= set(pybnorm.backends())


def test_every_extra_for_users_is_documented():
    settings = (ROOT / "pyproject.toml").read_text()
    section = settings.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)) - {"test-full", "lint"}
    text = " ".join(f.read_text() for f in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert {"onednn", "rocm"} <= extras
    assert {e for e in extras if not re.search(rf"\.\[[\w,]*\b{e}\b|[Ee]xtras? (`\w+`, )*`{e}`", text)} == set()
