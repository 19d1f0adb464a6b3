"""The beginning of the command: interrupts, and libraries that print or hang while they are loaded."""

import os
import shlex
import subprocess
import sys

import pytest
from command_here import run
from simulated import interruptible

import pybnorm

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
@pytest.mark.parametrize(
    ("program", "module"),
    [
        (("-m", "pybnorm"), "pybnorm._core"),
        (("-c", "from _pybnorm_command import main; main()"), "click"),
        (("-m", "pybnorm"), "pybnorm.check.report.html"),
    ],
)
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
def test_a_library_that_hangs_while_it_loads_costs_info_its_time(tmp_path, monkeypatch):
    file = library(tmp_path, "for (;;) pause();")
    monkeypatch.setattr(pybnorm, "backends", lambda: ("onednn",))
    done = run("info", "--timeout", "2", PYBNORM_LIB_ONEDNN=str(file))
    assert done.returncode == 0, done.stderr
    assert "onednn  oneDNN\n  absent     did not answer in 2 s (--timeout)\n" in done.stdout
    assert str(file) in done.stdout
    done = run("info", "--claims", "onednn", "--timeout", "1", PYBNORM_LIB_ONEDNN=str(file))
    assert (done.returncode, done.stderr) == (1, "Error: onednn: did not answer in 1 s (--timeout)\n")
    for seconds in ("0", "nan", "inf"):
        assert run("info", "--timeout", seconds).returncode == 2
