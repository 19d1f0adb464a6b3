"""Cases from a command of the vendors' own tools: the way back from `pybnorm.check.language.vendor_lines`.

A line names the call, the shapes and the layout; the data are this package's, by default of the fill exact. Defaults
are the tool's own. What a tool would do otherwise is said in notes. A word that is not understood is an error that
names it and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pybnorm import _arguments
from pybnorm.check.language.benchdnn_lines import read_benchdnn_lines
from pybnorm.check.language.foreign_lines import Read, Several, is_program, made, whole, words
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

_NAMES = {
    **{"bnorm": DataType.FLOAT32, "bnormfp16": DataType.FLOAT16, "bnormbfp16": DataType.BFLOAT16},
    **{"bnormfp16fp32": DataType.FLOAT16, "bnormbfp16fp32": DataType.BFLOAT16},
}
_OPTIONS = {
    **{"n": ("batchsize", "32"), "c": ("in_channels", "3"), "D": ("in_d", "0"), "H": ("in_h", "32")},
    **{"W": ("in_w", "32"), "L": ("layout", ""), "m": ("mode", "0"), "F": ("forw", "0"), "b": ("back", "0")},
    **{"r": ("run", "0"), "s": ("save", "0"), "I": ("inverse_variance", "0"), "f": ("activ_mode", "0")},
    **{"x": ("activ_alpha", "1.0"), "y": ("activ_beta", "1.0"), "Q": ("ping_pong_buffers", "0")},
}
"""Long names and defaults, as AddCmdLineArgs in projects/miopen/driver/bn_driver.hpp of ROCm/rocm-libraries has them;
SetBNParametersFromCmdLineArgs there reads them, EPSILON is there too."""
_IGNORED = {
    **{"i": "iter", "V": "verify", "t": "time", "w": "wall", "P": "printconv", "A": "alpha", "B": "beta"},
    **{"~": "gpubuffer_check", "&": "tuning_policy", "J": "use_hip_graph"},
}
"""How the driver measures, tunes and checks; and two factors that it does not use."""
_EPSILON = 1e-3
_ACTIVATIONS: dict[str, tuple[Activation, dict[str, str]]] = {
    **{"0": (Activation.NONE, {}), "3": (Activation.RELU, {}), "7": (Activation.CLIPPED_RELU, {"high": "x"})},
    "10": (Activation.CLAMP, {"low": "x", "high": "y"}),
}
"""By the number that miopenActivationMode_t has, with the options that are its limits."""
_LAYOUTS = {
    4: {"NCHW": Layout.CHANNELS_FIRST, "NHWC": Layout.CHANNELS_LAST},
    5: {"NCDHW": Layout.CHANNELS_FIRST, "NDHWC": Layout.CHANNELS_LAST},
}
_TOOL = "MIOpenDriver"


def read_miopen_driver(line: str) -> Read:
    """The case of a ``MIOpenDriver bnorm...`` line, with or without the program's name."""
    name, *options = words(line, _TOOL, lambda word: is_program(word, _TOOL)) or [""]
    if name not in _NAMES:
        raise ArgumentError(_TOOL, name or line, " | ".join(_NAMES))
    given = {option: default for option, (_, default) in _OPTIONS.items()} | dict(_pairs(options))
    for option in "mFbrsIQ":
        allowed = {"F": ("0", "1", "2")}.get(option, ("0", "1"))
        if given[option] not in allowed:
            raise ArgumentError(_TOOL, f"-{option} {given[option]}", " | ".join(allowed))
    sizes = {option: whole(given[option], _TOOL, f"-{option} {given[option]}") for option in "ncDHW"}
    dims = _arguments.dims(tuple(size for option, size in sizes.items() if size or option != "D"))
    layouts = _LAYOUTS[len(dims)]
    if (layout := given["L"] or next(iter(layouts))) not in layouts:
        raise ArgumentError(_TOOL, f"-L {layout}", " | ".join(layouts))
    values, notes = _driver_call(given)
    values |= _driver_activation(given)
    values |= {"mode": Mode.SPATIAL if given["m"] == "1" else Mode.PER_ACTIVATION, "dtype": _NAMES[name]}
    values |= {"dims": dims, "strides": _arguments.packed_strides(dims, layouts[layout])}
    if not values.get("inverse"):
        values["eps"] = _EPSILON
    return Read(made(values), tuple(notes))


def _driver_call(given: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The operation and its options, as the driver chooses them."""
    notes: list[str] = []
    backward = given["b"] == "1" and given["F"] == "0"
    inference = given["F"] == "2"
    run, saved = given["r"] == "1", given["s"] == "1"
    if given["b"] == "1" and not backward:
        notes.append("-b 1 beside -F: the driver runs forward only")
    if given["I"] == "1" and not (inference and run):
        raise ArgumentError(_TOOL, "-I 1", "with -F 2 -r 1, inference by given statistics")
    if given["Q"] == "1":
        if not run or inference or backward:
            raise ArgumentError(_TOOL, "-Q 1", "with -F 1 -r 1, training that keeps running statistics")
        notes.append("the running statistics are updated in place: no case has buffers of before and after")
    if backward:
        return {"operation": Operation.BACKWARD, "saved": saved}, notes
    if inference and run:
        return {"operation": Operation.FORWARD_INFERENCE} | ({"inverse": True} if given["I"] == "1" else {}), notes
    if inference:
        notes.append("inference with the statistics of the batch is training that keeps none")
    values = {"operation": Operation.FORWARD_TRAINING, "running": run and not inference}
    return values | {"saved": saved and not inference}, notes


def _driver_activation(given: dict[str, str]) -> dict[str, Any]:
    if given["f"] not in _ACTIVATIONS:
        allowed = " | ".join(f"{number} {kind.name.lower()}" for number, (kind, _) in _ACTIVATIONS.items())
        raise ArgumentError(_TOOL, f"-f {given['f']}", allowed)
    activation, limits = _ACTIVATIONS[given["f"]]
    values: dict[str, Any] = {"activation": activation} if activation else {}
    for limit, name in limits.items():
        try:
            values[limit] = float(given[name])
        except ValueError:
            raise ArgumentError(_TOOL, f"-{name} {given[name]}", "a number there") from None
    return values


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Options by their short names, and their values: ``-n 8``, ``-n8``, ``--batchsize 8`` or ``--batchsize=8``."""
    long = {name: short for short, (name, _) in _OPTIONS.items()} | {name: short for short, name in _IGNORED.items()}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:] in long:
            short = long[name[2:]]
        elif word.startswith("-") and word[1:2] in long.values():
            short, equals, value = word[1], word[2:], word[2:]
        else:
            allowed = " ".join(f"-{short}" for short in _OPTIONS)
            raise ArgumentError(_TOOL, word, f"{allowed}, each with a value")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ArgumentError(_TOOL, word, "a value after it")
        if short in _OPTIONS:
            yield short, value


TOOLS: dict[str, Callable[[str], Several]] = {
    "benchdnn": read_benchdnn_lines,
    "miopendriver": lambda line: Several((read_miopen_driver(line),), {}),
}
"""Readers by the name of the tool, in lower case."""


def read_all(tool: str, line: str) -> Several:
    """Every case of a line of one of `TOOLS`."""
    tool = _arguments.text(tool, "tool").lower()
    if tool not in TOOLS:
        raise ArgumentError("--from", tool, " | ".join(TOOLS))
    return TOOLS[tool](line)
