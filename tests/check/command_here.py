"""The command ``pybnorm`` within the tests' process: whether it is one of its own matters to few tests."""

import inspect
import os
from types import SimpleNamespace

from click.testing import CliRunner

from pybnorm.check.run import runner
from pybnorm.cli import main

_DROPPED = ("PYBNORM_REQUIRE", "PYBNORM_LIB_", "FORCE_COLOR")


def clean_environment():
    """The surroundings of a process of the command."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)}


def run(*arguments, **variables):
    """Run the command, whose workers have the variables, too; a library is loaded here by --executor process only."""
    separate = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    runner._described.cache_clear()  # of a library with the variables of another call
    absent = dict.fromkeys(os.environ.keys() - clean_environment().keys())
    done = CliRunner(**separate).invoke(main, [*map(str, arguments)], env=absent | variables)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)
