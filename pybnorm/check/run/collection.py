"""What a report of a machine needs, as texts by file name: what is here, and what a short check found."""

from __future__ import annotations

import functools
import getpass
import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pybnorm
from pybnorm.check.judging.results import SCHEMA, json_parts
from pybnorm.check.language.calls import METHODS, TENSORS
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.run import archive
from pybnorm.devices import device_for
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, PybnormError

__all__ = ["SECONDS", "bench", "collected", "without_names"]

SECONDS = 180
"""What all commands together may take."""
_INFO = 40
"""What those of them that only look around may take, each."""
_DIMS = (16, 64, 28, 28)
_README = """What `pybnorm collect` writes, for a report. Nothing was sent anywhere.

info.txt, info.json   libraries, their versions, digests and paths; devices; what each can do; known defects
bench.txt             the time of three calls of each backend
run.json              the cases of the suites smoke and bugs that were done in time: `pybnorm report FILE.zip` shows it
check.txt             what the check printed, and the standard error of the libraries
miopen.txt            MIOpen's databases of this user: names and sizes

Home folders, the user's name and the machine's are taken out of every file.
"""


def without_names(text: str) -> str:
    """The text without home folders, the user's name and the machine's."""
    text = text.replace(os.path.expanduser("~"), "~") if os.path.expanduser("~") != "/" else text
    text = re.sub(r"/(home|Users)/[^/\s\"':]+", "~", text)
    for name, word in ((platform.node(), "HOST"), (_user(), "USER")):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text) if len(name) > 1 else text
    return text


def _user() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a process of no user
        return ""
    return "" if name == "root" else name


def collected(backend: str | None, seconds: float = SECONDS, step: Callable[[str], object] = str) -> dict[str, str]:
    """Run what a report needs.

    Parameters
    ----------
    backend : str or None
        Check this one alone; None: every one that is here.
    seconds : float
        The check is interrupted where it takes longer.
    step : callable
        Is given each command before it runs.

    Returns
    -------
    dict
        Texts by file name. ``run.json`` is there where a case was done.
    """
    end = time.monotonic() + seconds
    found = {"README.txt": _README, "miopen.txt": _databases(), "bench.txt": ""}
    with tempfile.TemporaryDirectory() as folder:
        words = ["pybnorm", "info", "-v", "--json", f"{folder}/info.json"]
        found["info.txt"] = _output(words, min(_INFO, end - time.monotonic()), step)
        found["info.json"] = file.read_text("utf-8") if (file := Path(folder, "info.json")).exists() else ""
        for name in [backend] if backend else pybnorm.backends():
            words = ["pybnorm.check.run.collection", name]
            found["bench.txt"] += _output(words, min(_INFO, end - time.monotonic()) / 2, step)
        words = ["pybnorm", "check", "--suite", "smoke", "--suite", "bugs", "--save", f"{folder}/run"]
        found["check.txt"] = _output(words + (["--backend", backend] if backend else []), end - time.monotonic(), step)
        try:
            document = archive.read_run(f"{folder}/run")
        except ArgumentError as error:
            found["check.txt"] += f"\nno case was done: {error}\n"
        else:
            found["run.json"] = "".join(json_parts({"schema": SCHEMA} | document))
    return {name: without_names(text) for name, text in sorted(found.items())}


def bench(name: str) -> None:
    """Print the time of each call of a backend, by plans on arrays of the device."""
    try:
        device = device_for(pybnorm.load(name).device_type)
        handle = pybnorm.Handle(name, stream=device.stream or None, known_defects="ignore")
    except PybnormError as error:
        print(f"{name}: {error}".partition("\n")[0])
        return
    for operation, dtype in itertools.product(TENSORS, (DataType.FLOAT32, DataType.BFLOAT16)):
        values = np.random.default_rng(0).standard_normal(_DIMS, np.float32).astype(numpy_dtype(dtype))
        ones = np.ones(_DIMS[1], np.float32)
        arrays = [device.from_numpy(values if row.data else ones) for row in TENSORS[operation]]
        try:
            plan = getattr(handle, f"plan_{METHODS[operation]}")(arrays[0])
            memory = device.empty_bytes(plan.workspace_size + 1)
            call = functools.partial(plan, *(a.pointer for a in arrays), (memory.pointer, plan.workspace_size))
            took = min(device.time(call, repeats=5, calls=3, warmup=2))
            said = f"{took * 1e6:10.1f} us by {plan.algorithm}"
        except PybnormError as error:
            said = f"{error}".partition("\n")[0]
        print(f"{name} {METHODS[operation]} {dtype.short} {'x'.join(map(str, _DIMS))}: {said}", flush=True)


def _output(words: list[str], seconds: float, step: Callable[[str], object]) -> str:
    """What a command prints on both streams; it is interrupted after `seconds`, and then killed."""
    step(" ".join(words[:3]))
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as child:
        try:
            out, _ = child.communicate(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                out, _ = child.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, _ = child.communicate()
            out += f"\n(interrupted after {seconds:.0f} s)\n".encode()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return out.decode(errors="replace")


def _databases() -> str:
    folder = Path(os.environ.get("MIOPEN_USER_DB_PATH") or "~/.config/miopen")
    try:
        files = sorted(folder.expanduser().iterdir())
        return "".join(f"{file.stat().st_size:>12} {file}\n" for file in files)
    except (OSError, RuntimeError) as error:
        return f"{folder}: {type(error).__name__}\n"


if __name__ == "__main__":
    bench(sys.argv[1])
