"""Running an example in this process, as its command does, where one start of Python per example has shown that."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_here(name, *options):
    """What `subprocess.run` gives of the example with these options."""
    file = str(EXAMPLES / f"{name}.py")
    out, err = io.StringIO(), io.StringIO()
    command = [file, *options]
    before, path, loaded = sys.argv, sys.path[:], sys.modules.pop("example", None)
    sys.argv, sys.path[0:0] = command, [str(EXAMPLES)]
    status = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv, sys.path[:] = before, path
        sys.modules.pop("example", None)
        if loaded is not None:
            sys.modules["example"] = loaded
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
