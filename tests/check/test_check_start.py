"""The beginning of the command: interrupts, and libraries that print or hang while they are loaded."""

import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner
from simulated import interruptible

from pybnorm import backends, cli

# Interrupts the command while it imports the module that STOP names.
STOP = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP"]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [("-m", "pybnorm"), ("-c", "from _pybnorm_command import main; main()")])
@pytest.mark.parametrize("module", ["pybnorm._core", "click", "pybnorm.cli", "pybnorm.check.report.html"])
def test_an_interrupt_of_the_beginning_is_one_line(tmp_path, program, module):
    (tmp_path / "sitecustomize.py").write_text(STOP)
    done = subprocess.run(
        [sys.executable, *program, "check", "--list", "--case", "infer,spatial,f32,nchw,2x3"],
        env=os.environ | {"STOP": module, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=interruptible,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def library(folder, body):
    """A file that does something while it is loaded, and is no vendor's library."""
    source, file = folder / "made.c", folder / "libmade.so"
    source.write_text(
        f"#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) static void begin(void) {{ {body} }}\n"
    )
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", str(file), str(source)], check=True, timeout=300)
    return file


LOAD = """
import sys, pybnorm
print("before")
try:
    pybnorm.load("onednn", sys.argv[1])
except pybnorm.SymbolNotFoundError:
    print("after")
"""


@pytest.mark.parametrize("redirection", ["", "2>&-"])
def test_what_a_library_prints_while_it_loads_is_not_in_our_output(tmp_path, redirection):
    file = library(tmp_path, 'printf("by the stream\\n"); if (write(1, "by the number\\n", 14) != 14) _exit(7);')
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" "$2" {redirection}', sys.executable, LOAD, str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "before\nafter\n"), done.stderr
    assert sorted(done.stderr.splitlines()) == ([] if redirection else ["by the number", "by the stream"])


@pytest.mark.slow
def test_a_library_that_hangs_while_it_loads_costs_info_its_time(tmp_path):
    file = library(tmp_path, "for (;;) pause();")
    nowhere = {f"PYBNORM_LIB_{name.upper()}": "/nowhere/library.so" for name in backends()}

    def info(*options):
        return subprocess.run(
            [sys.executable, "-m", "pybnorm", "info", *options],
            env=os.environ | nowhere | {"PYBNORM_LIB_ONEDNN": str(file)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = info("--timeout", "3")
    assert done.returncode == 0, done.stderr
    assert "onednn  oneDNN\n  absent     did not answer in 3 s (--timeout)\n" in done.stdout
    assert str(file) in done.stdout
    done = info("--claims", "onednn", "--timeout", "1")
    assert (done.returncode, done.stderr) == (1, "Error: onednn: did not answer in 1 s (--timeout)\n")
    for seconds in ("0", "nan", "inf"):
        assert CliRunner().invoke(cli.main, ["info", "--timeout", seconds]).exit_code == 2
