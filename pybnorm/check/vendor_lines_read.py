"""A case from a command of the vendors' own tools: the way back from `pybnorm.check.vendor_lines`.

A line names the call, the shapes and the layout; the data are this package's, by default of the fill exact. What a tool
would do otherwise is said in notes. A word that is not understood is an error that names it and what is allowed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm.check.problem import Problem
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

__all__ = ["TOOLS", "Read", "read", "read_benchdnn", "read_miopen_driver"]


class Read(NamedTuple):
    """A problem, and in what it is not what the tool would run."""

    problem: Problem
    notes: tuple[str, ...] = ()


def _words(line: str, tool: str, program: str) -> list[str]:
    line = _arguments.text(line, tool)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ArgumentError(tool, line, f"a command line of {tool} ({error})") from None
    if words and re.split(r"[/\\]", words[0])[-1] == program:
        del words[0]
    return words


def _whole(text: str, tool: str, word: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ArgumentError(tool, word, "a whole number there")
    return int(text)


# ---------------------------------------------------------------- benchdnn

_TAGS = {
    **dict.fromkeys(("abx", "ab", "abc", "abcd", "abcde", "nc", "ncw", "nchw", "ncdhw"), Layout.CHANNELS_FIRST),
    **dict.fromkeys(("axb", "acb", "acdb", "acdeb", "nwc", "nhwc", "ndhwc"), Layout.CHANNELS_LAST),
}
_DTYPES = {dtype.short: dtype for dtype in DataType if dtype != DataType.FLOAT64}
_SHAPE = re.compile(r"(mb|ic|id|ih|iw|eps)([0-9][0-9.]*(?:e[-+]?[0-9]+)?)")


def read_benchdnn(line: str) -> Read:
    """The case of a ``benchdnn --bnorm`` line, with or without the program's name.

    Raises
    ------
    ArgumentError
        A word that is not understood, or a call that the problem language does not have.
    """
    tool = "benchdnn"
    known = {"dir": "FWD_D", "flags": "", "dt": "f32", "tag": "abx", "strides": "", "inplace": "false"}
    shape = ""
    for word in _words(line, tool, tool):
        name, equals, value = word.partition("=")
        if word == "--bnorm":
            continue
        if name.removeprefix("--") in known and equals:
            known[name.removeprefix("--")] = value
        elif word.startswith("-") or shape:
            allowed = " ".join(f"--{name}=" for name in known)
            raise ArgumentError(tool, word, f"--bnorm {allowed} and one problem such as mb8ic64ih32iw16")
        else:
            shape = word
    dims, epsilon = _benchdnn_shape(shape)
    values, notes = _benchdnn_call(known["dir"], known["flags"])
    values |= {"mode": Mode.SPATIAL, "dtype": _one_of(known, "dt", _DTYPES), "dims": dims, "eps": epsilon}
    layout = _one_of(known, "tag", _TAGS)
    values["strides"] = _arguments.packed_strides(_arguments.dims(dims), layout)
    if known["strides"]:
        values["strides"] = _benchdnn_strides(known["strides"])
    values["inplace"] = _one_of(known, "inplace", {"false": False, "true": True})
    return Read(_made(values), tuple(notes))


def _one_of(given: dict[str, str], name: str, allowed: dict[str, Any]) -> Any:
    if given[name] not in allowed:
        raise ArgumentError("benchdnn", f"--{name}={given[name]}", " | ".join(allowed))
    return allowed[given[name]]


def _benchdnn_strides(text: str) -> tuple[int, ...]:
    parts = text.split(":")
    if len(parts) != 2 or parts[0] != parts[1]:
        allowed = "the same strides for input and output, as in 8x2:8x2"
        raise ArgumentError("benchdnn", f"--strides={text}", allowed)
    return tuple(_whole(part, "benchdnn", f"--strides={text}") for part in parts[0].split("x"))


def _benchdnn_shape(text: str) -> tuple[tuple[int, ...], float]:
    body = re.sub(r'n(".*"|[a-z].*)?$', "", text) if "n" in text else text  # its name comes last
    found = dict(_SHAPE.findall(body))
    if not body or _SHAPE.sub("", body) or "ic" not in found:
        raise ArgumentError("benchdnn", text, "mb, ic, id, ih, iw and eps with numbers, ic at least: mb8ic64ih32iw16")
    try:
        epsilon = float(found.pop("eps", "0.0625"))
    except ValueError:
        raise ArgumentError("benchdnn", text, "a number after eps") from None
    sizes = {name: _whole(size, "benchdnn", text) for name, size in found.items()}
    spatial = [name for name in ("id", "ih", "iw") if name in sizes]
    rank = {"id": 3, "ih": 2, "iw": 1}[spatial[0]] if spatial else 0
    last = 0
    inner = []
    for name in ("id", "ih", "iw")[3 - rank :]:
        last = sizes.get(name, last)  # a size that is left out is that before it
        inner.append(last)
    return (sizes.get("mb", 2), sizes["ic"], *inner), epsilon


def _benchdnn_call(direction: str, flags: str) -> tuple[dict[str, Any], list[str]]:
    notes = []
    if set(flags) - set("GCHSRA"):
        strange = "".join(dict.fromkeys(c for c in flags if c not in "GCHSRA"))
        raise ArgumentError("benchdnn", f"--flags={flags}", f"the letters G, C, H, S, R and A, and not {strange}")
    if direction not in ("FWD_D", "FWD_I", "BWD_DW", "BWD_D"):
        raise ArgumentError("benchdnn", f"--dir={direction}", "FWD_D | FWD_I | BWD_DW | BWD_D")
    if "S" not in flags and not {"C", "H"} <= set(flags):
        notes.append("scale and shift are given, which the line has not both")
    values: dict[str, Any] = {"operation": Operation.FORWARD_TRAINING}
    given = "G" in flags
    if direction.startswith("BWD"):
        values["operation"] = Operation.BACKWARD
        if given:
            values["composed"] = "frozen"
            if {"R", "A"} & set(flags):
                raise ArgumentError(
                    "benchdnn", f"--flags={flags}", "backward with G without R and A: frozen has no mask"
                )
        if direction == "BWD_D":
            notes.append("the gradients of scale and shift are computed, which the line does not ask for")
    elif given:
        values["operation"] = Operation.FORWARD_INFERENCE
    elif direction == "FWD_I":
        values |= {"running": False, "saved": False}
        notes.append("inference with the statistics of the batch is training that keeps none")
    if {"R", "A"} & set(flags):
        values |= {"activation": Activation.RELU, "residual": "A" in flags}
    return values, notes


# ---------------------------------------------------------------- MIOpenDriver

_NAMES = {
    **{"bnorm": DataType.FLOAT32, "bnormfp16": DataType.FLOAT16, "bnormbfp16": DataType.BFLOAT16},
    **{"bnormfp16fp32": DataType.FLOAT16, "bnormbfp16fp32": DataType.BFLOAT16},
}
_OPTIONS = {
    **{"n": "batchsize", "c": "in_channels", "D": "in_d", "H": "in_h", "W": "in_w", "L": "layout"},
    **{"m": "mode", "F": "forw", "b": "back", "r": "run", "s": "save"},
}
_IGNORED = {"i": "iter", "V": "verify", "t": "time", "w": "wall", "P": "printconv", "A": "alpha", "B": "beta"}
"""How the driver measures and checks; and two factors that it does not use."""
_LAYOUTS = {
    **{"NCHW": Layout.CHANNELS_FIRST, "NCDHW": Layout.CHANNELS_FIRST},
    **{"NHWC": Layout.CHANNELS_LAST, "NDHWC": Layout.CHANNELS_LAST},
}


def read_miopen_driver(line: str) -> Read:
    """The case of a ``MIOpenDriver bnorm...`` line, with or without the program's name.

    Raises
    ------
    ArgumentError
        A word that is not understood.
    """
    tool = "MIOpenDriver"
    words = _words(line, tool, tool)
    if not words or words[0] not in _NAMES:
        raise ArgumentError(tool, words[0] if words else line, " | ".join(_NAMES))
    given = {"n": "100", "c": "3", "D": "0", "H": "32", "W": "32", "m": "0", "F": "", "b": "0", "r": "0", "s": "0"}
    given["L"] = ""
    for name, value in _pairs(words[1:]):
        given[name] = value
    forward = given["F"] or ("0" if given["b"] == "1" else "1")
    notes: list[str] = []
    values: dict[str, Any]
    for name, value in (given | {"F": forward}).items():
        allowed = {"F": ("0", "1", "2")}.get(name, ("0", "1"))
        if name in "mFbrs" and value not in allowed:
            raise ArgumentError(tool, f"-{name} {value}", " | ".join(allowed))
    if (forward == "0") == (given["b"] == "0"):
        raise ArgumentError(tool, line, "one of forward (-F 1 or -F 2) and backward (-b 1)")
    dims = _driver_dims(given)
    layout = given["L"] or ("NCDHW" if len(dims) == 5 else "NCHW")
    if layout not in _LAYOUTS or len(layout) != len(dims):
        raise ArgumentError(tool, f"-L {layout}", " | ".join(name for name in _LAYOUTS if len(name) == len(dims)))
    run, saved = given["r"] == "1", given["s"] == "1"
    if forward == "2" and not run:
        notes.append("inference with the statistics of the batch is training that keeps none")
        saved = False
    if given["b"] == "1":
        values = {"operation": Operation.BACKWARD, "saved": saved}
    elif forward == "2" and run:
        values = {"operation": Operation.FORWARD_INFERENCE}
    else:
        values = {"operation": Operation.FORWARD_TRAINING, "running": run and forward == "1", "saved": saved}
    values |= {"mode": Mode.SPATIAL if given["m"] == "1" else Mode.PER_ACTIVATION, "dtype": _NAMES[words[0]]}
    values |= {"dims": dims, "strides": _arguments.packed_strides(dims, _LAYOUTS[layout])}
    return Read(_made(values), tuple(notes))


def _driver_dims(given: dict[str, str]) -> tuple[int, ...]:
    sizes = [_whole(given[name], "MIOpenDriver", f"-{name} {given[name]}") for name in "ncDHW"]
    if not sizes[2]:
        del sizes[2]
    return _arguments.dims(tuple(sizes))


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Options by their short names, and their values: ``-n 8``, ``-n8``, ``--batchsize 8`` or ``--batchsize=8``."""
    long = {name: short for short, name in (_OPTIONS | _IGNORED).items()}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:] in long:
            short = long[name[2:]]
        elif word.startswith("-") and word[1:2] in _OPTIONS | _IGNORED:
            short, equals, value = word[1], word[2:], word[2:]
        else:
            allowed = " ".join(f"-{short}" for short in _OPTIONS)
            raise ArgumentError("MIOpenDriver", word, f"{allowed}, each with a value")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ArgumentError("MIOpenDriver", word, "a value after it")
        if short in _OPTIONS:
            yield short, value


def _made(values: dict[str, Any]) -> Problem:
    problem = {"operation": values.pop("operation"), **values}
    if problem["operation"] == Operation.FORWARD_TRAINING:
        m = _arguments.reduced_count(problem["dims"], problem["mode"])
        problem["running"] = bool(problem.get("running", True)) and m > 1
    return Problem(**problem)


TOOLS: dict[str, Callable[[str], Read]] = {"benchdnn": read_benchdnn, "miopendriver": read_miopen_driver}
"""Readers by the name of the tool, in lower case."""


def read(tool: str, line: str) -> Read:
    """The case of a line of one of `TOOLS`.

    Raises
    ------
    ArgumentError
        Another tool, or as for its reader.
    """
    tool = _arguments.text(tool, "tool").lower()
    if tool not in TOOLS:
        raise ArgumentError("--from", tool, " | ".join(TOOLS))
    return TOOLS[tool](line)
