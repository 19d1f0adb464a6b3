"""The report of a machine, as texts by file name: its libraries, and the findings of a short check."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import importlib.resources
import itertools
import json
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
from pybnorm._find import SPECS
from pybnorm.check.judging.results import SCHEMA, json_parts
from pybnorm.check.language.calls import METHODS, TENSORS
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.language.problem import LAYOUTS, MODES, OPERATIONS
from pybnorm.check.run import archive, environment
from pybnorm.devices import device_for, hip
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, PybnormError

SECONDS = 180
"""Seconds that all commands together may take."""
_LAST = 15
"""Seconds of those that an interrupted check may take to print."""
_INFO = 40
"""Seconds that each of those may take that only look around."""
_DIMS = (16, 64, 28, 28)
_PLACES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_PREFIX", "VIRTUAL_ENV", "PYTORCH_MIOPEN_SUGGEST_NHWC")
_OF_VENDORS = re.compile(
    r"(nvidia|cuda|cupy|torch|triton|jax|rocm|hip|onednn|dnnl|intel|tensorflow|paddle)", re.IGNORECASE
)
_README = """What `pybnorm collect` writes, for a report. Nothing was sent anywhere.

info.txt, info.json   libraries, their versions, digests and paths; devices; what each can do; known defects
environment.txt       variables by which libraries are found and set, drivers, and the packages that libraries are from
bench.txt             the time of three calls of each backend
run.json              the cases of the suites smoke and bugs that were done in time: `pybnorm report FILE.zip` shows it
check.txt             what the check printed, and the standard error of the libraries
miopen.txt            MIOpen's databases of this user: names and sizes, and what tuning has chosen for batch norm

Home folders, the user's name and the machine's are taken out of every file.
"""


def without_names(text: str) -> str:
    """The text without home folders, the user's name and the machine's."""
    text = text.replace(os.path.expanduser("~"), "~") if os.path.expanduser("~") != "/" else text
    text = re.sub(r"/(home|Users)/[^/\s\"':]+", "~", text)
    for name, word in ((platform.node(), "HOST"), (_user(), "USER")):
        if len(name) > 1 and name not in _words():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return text


@functools.cache
def _words() -> set[str]:
    """Words of our own: a user called miopen, or train, takes none of them out of the documents."""
    schema = importlib.resources.files("pybnorm.check").joinpath("schema.json").read_text("utf-8")
    return {*re.findall(r"\w+", schema), *OPERATIONS, *MODES, *LAYOUTS, *pybnorm.backends()}


def _user() -> str:
    with contextlib.suppress(OSError, KeyError):  # a process of no user
        if (name := getpass.getuser()) != "root":
            return name
    return ""


def collected(backend: str | None, step: Callable[[str], object]) -> dict[str, str]:
    """Run what a report needs, within `SECONDS`: texts by file name; ``run.json`` is there where a case was done.

    `backend`: check this one alone. `step` is given each command before it runs, and the time that it may take.
    """
    end = time.monotonic() + SECONDS
    found = {"README.txt": _README, "miopen.txt": _databases(), "bench.txt": ""}
    ask = functools.partial(_output, step=step)
    with tempfile.TemporaryDirectory() as folder:
        words = ["pybnorm", "info", "-v", "--json", f"{folder}/info.json"]
        found["info.txt"] = ask("info", words, min(_INFO, end - time.monotonic()))
        found["info.json"] = file.read_text("utf-8") if (file := Path(folder, "info.json")).exists() else ""
        found["environment.txt"] = _environment(found["info.json"])
        for name in [backend] if backend else pybnorm.backends():
            words = ["pybnorm.check.run.collection", name]
            found["bench.txt"] += ask(f"bench of {name}", words, min(_INFO, end - time.monotonic()) / 2)
        words = ["pybnorm", "check", "--suite", "smoke", "--suite", "bugs", "--save", f"{folder}/run"]
        words += ["--backend", backend] if backend else []
        printed = ask("check of smoke and bugs", words, end - _LAST - time.monotonic())
        found["check.txt"] = "".join(line for line in printed.splitlines(True) if folder not in line)
        try:
            document = archive.read_run(f"{folder}/run")
        except ArgumentError:
            found["check.txt"] += "\nno case was done\n"
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


def _output(name: str, words: list[str], seconds: float, step: Callable[[str], object]) -> str:
    """The output of a command on both streams; it is interrupted after `seconds`, and then killed."""
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as child:
        try:
            step(f"{name}, at most {seconds:.0f} s")
            out, _ = child.communicate(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                out, _ = child.communicate(timeout=max(_LAST, 10))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                out, _ = child.communicate()
            out += f"\n(interrupted after {seconds:.0f} s)\n".encode()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return out.decode(errors="replace")


def _environment(info: str) -> str:
    """Variables, drivers, and which package each library's file is of: the system's, or a distribution of Python."""
    here = environment.machine()
    roots = {name for spec in (*SPECS.values(), hip.SPEC) for name in spec.roots}
    chosen = here["variables"] | {k: v for k, v in sorted(os.environ.items()) if k in roots or k in _PLACES}
    lines = [f"{name}={value}" for name, value in chosen.items()]
    lines += [f"driver {name} {version}" for name, version in here["drivers"].items()]
    for path in [b["path"] for b in json.loads(info or '{"backends": []}')["backends"] if b["path"]]:
        for owner in (["dpkg-query", "-S"], ["rpm", "-qf"]):
            with contextlib.suppress(OSError):
                done = subprocess.run([*owner, os.path.realpath(path)], capture_output=True, text=True, check=False)
                lines += [f"package {done.stdout.strip()}"] if done.returncode == 0 else []
    names = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    lines += [f"{name}=={names[name]}" for name in sorted(filter(None, names)) if _OF_VENDORS.match(name)]
    return "\n".join([*lines, ""])


def _databases() -> str:
    folder = Path(os.environ.get("MIOPEN_USER_DB_PATH") or "~/.config/miopen")
    try:
        files = sorted(folder.expanduser().iterdir())
        tuned = [file.read_text(errors="replace")[:20_000] for file in files if file.match("batchnorm_*.udb.txt")]
        return "".join([*(f"{file.stat().st_size:>12} {file}\n" for file in files), *tuned])
    except (OSError, RuntimeError) as error:
        return f"{folder}: {type(error).__name__}\n"


if __name__ == "__main__":
    bench(sys.argv[1])
