"""Cases from a command of benchdnn, oneDNN's tester: its knobs, descriptors, lists and files of them.

A command sets knobs, each to a list, and every problem that follows is run with all their combinations, as
``tests/benchdnn/bnorm`` of uxlfoundation/oneDNN does it (``bench_bnorm.cpp``; ``bnorm_aux.cpp`` has the descriptors,
``settings_t`` in ``bnorm.hpp`` the defaults, ``batch`` in ``common.cpp`` the files).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pybnorm import _arguments, _files
from pybnorm._text import reason
from pybnorm.check.language.foreign_lines import Read, Several, is_program, made, whole, words
from pybnorm.check.language.lines import CASES_MAX
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

TOOL = "benchdnn"
_TAGS = {
    **dict.fromkeys(("abx", "ab", "abc", "abcd", "abcde", "nc", "ncw", "nchw", "ncdhw"), Layout.CHANNELS_FIRST),
    **dict.fromkeys(("axb", "acb", "acdb", "acdeb", "nwc", "nhwc", "ndhwc"), Layout.CHANNELS_LAST),
}
_DTYPES = {dtype.short: dtype for dtype in DataType if dtype != DataType.FLOAT64}
_KNOBS = {
    **{"dir": "FWD_D", "dt": "f32", "tag": "abx", "strides": "", "flags": ""},
    **{"mb": "0", "attr-post-ops": "", "inplace": "false"},
}
"""Knobs that are lists, with their defaults, in the order in which benchdnn goes through them."""
_IGNORED = {
    *("skip-impl", "impl", "global-impl", "global-skip-impl", "engine", "mode", "mode-modifier", "perf-template"),
    *("allow-enum-tags-only", "canonical", "check-alg", "debug-check-ws", "mem-check", "fast-ref", "check-ref-impl"),
    *("cold-cache", "cpu-isa-hints", "fix-times-per-prb", "max-ms-per-prb", "repeats-per-prb", "num-streams"),
    *("memory-kind", "start", "buffer-prefix", "stream-kind", "summary", "verbose", "execution-mode", "ctx-init"),
    *("ctx-exe", "attr-same-pd-check", "attr-scratchpad", "attr-deterministic"),
}
"""Knobs that choose or time an implementation, and change no problem."""
_MB, _EPSILON = 2, 0.0625
_SIZE = re.compile(r"(mb|ic|id|ih|iw|eps)([0-9][0-9.]*(?:e[-+]?[0-9]+)?)|_")
_LARGEST, _NESTED = 1 << 22, 8
"""Bytes of a file of lines, and files that include one another in a row."""


def read_benchdnn_lines(line: str) -> Several:
    """Every case of a ``benchdnn --bnorm`` line."""
    commands = _Commands()
    given = words(line, TOOL, lambda word: word == "--bnorm" or is_program(word, TOOL))
    commands.take([word for word in given if word != "--bnorm"], None, 0)
    if commands.seen and commands.unused:
        raise ArgumentError(TOOL, commands.unused, "before the problem: benchdnn takes knobs for those that follow")
    if not commands.seen:
        raise ArgumentError(TOOL, line, "a problem such as mb8ic64ih32iw16, or --batch=FILE")
    if not commands.found:
        assert commands.first is not None
        raise commands.first
    note = f"not looked at, as no problem depends on it: --{', --'.join(sorted(commands.ignored))}"
    return Several(tuple(commands.found), dict(commands.refused.most_common()), (note,) * bool(commands.ignored))


class _Commands:
    """The state that words change, and the cases of the problems so far."""

    def __init__(self) -> None:
        self._knobs = dict(_KNOBS)
        self._match: list[str] = []
        self.found: list[Read] = []
        self.refused: Counter[str] = Counter()
        self.first: ArgumentError | None = None
        """Why the first problem that is not read was refused."""
        self.ignored: set[str] = set()
        self._file_name = ""
        self.seen = 0
        self.unused = ""
        """The last knob that no problem has followed."""

    def take(self, given: Sequence[str], folder: Path | None, depth: int) -> None:
        """Go through words of a command, or of a file in `folder`."""
        rest = iter(given)
        for word in rest:
            name, equals, value = word.partition("=")
            name = name.removeprefix("--")
            if not word.startswith("-"):
                self._problems(word)
            elif name == "batch":
                self._file(value if equals else next(rest, ""), folder, depth)
                self.unused = ""
            elif name == "reset" and not equals:
                self._knobs, self._match = dict(_KNOBS), []
            elif name == "match" and equals:
                self._match = _literals(value)
            elif name in _KNOBS and equals:
                self._knobs[name], self.unused = value, word
            elif name in _IGNORED or re.fullmatch(r"-v[0-9]*", word):
                self.ignored.add("verbose" if word.startswith("-v") else name)
            else:
                allowed = " ".join(f"--{known}=" for known in (*_KNOBS, "batch", "match"))
                raise ArgumentError(TOOL, word, f"--bnorm --reset {allowed} and problems such as mb8ic64ih32iw16")

    def _file(self, name: str, folder: Path | None, depth: int) -> None:
        places = [Path(name), *([folder / name] if folder is not None and name else [])]
        place = next((p for p in places if p.is_file()), places[-1])
        if depth == _NESTED:
            raise ArgumentError(TOOL, f"--batch={name}", f"at most {_NESTED} files that include one another")
        try:
            text = _files.read(place, _LARGEST).decode()
        except (OSError, ValueError) as error:
            raise ArgumentError(TOOL, f"--batch={name}", f"a file of benchdnn's words ({reason(error)})") from None
        text = re.sub(r"\\\s+", "", text)  # a word goes on after the end of its line
        lines = (re.sub(r"(?:^|(?<=\s))#.*", "", line) for line in text.splitlines())
        before, self._file_name = self._file_name, name
        try:
            self.take([word.replace('"', "") for line in lines for word in line.split()], place.parent, depth + 1)
        except ArgumentError as error:
            raise self._in_file(error) from None
        finally:
            self._file_name = before

    def _in_file(self, error: ArgumentError) -> ArgumentError:
        """The error, with the name of the file that it is in."""
        if not self._file_name or error.argument.startswith("--batch="):
            return error
        return ArgumentError(f"--batch={self._file_name}: {error.argument}", error.value, error.allowed)

    def _problems(self, descriptor: str) -> None:
        """Every combination of the knobs, for one descriptor."""
        dims, epsilon = _descriptor(descriptor)
        if not _holds(descriptor, self._match):
            return
        self.unused = ""
        choices = [value.split(",") for value in self._knobs.values()]
        for chosen in itertools.product(*choices):
            self.seen += 1
            if self.seen > CASES_MAX:
                raise ArgumentError(TOOL, descriptor, f"at most {CASES_MAX} problems")
            try:
                self.found.append(_case(dict(zip(self._knobs, chosen, strict=True)), dims, epsilon))
            except ArgumentError as error:
                self.first = self.first or self._in_file(error)
                self.refused[f"{error.argument if error.argument != TOOL else error.value}: {error.allowed}"] += 1


def _literals(pattern: str) -> list[str]:
    """The texts of a pattern of texts and ``.*``, which benchdnn's files have."""
    parts = pattern.split(".*")
    if not all(re.fullmatch(r"[\w:.]*", part) for part in parts):
        raise ArgumentError(TOOL, f"--match={pattern}", "texts with .* between them")
    return [part for part in parts if part]


def _holds(text: str, literals: Sequence[str]) -> bool:
    for literal in literals:
        _, found, text = text.partition(literal)
        if not found:
            return False
    return True


def _descriptor(text: str) -> tuple[tuple[int, ...], float]:
    """Dims and epsilon, such as of ``mb50_ic256_ih56iw56_n"resnet_50:bn2a"``."""
    head = text.partition("n")[0]
    found = {name: size for name, size in _SIZE.findall(head) if name}
    if "ic" not in found or _SIZE.sub("", head):
        raise ArgumentError(TOOL, text, "mb, ic, id, ih, iw and eps with numbers, ic at least: mb8ic64ih32iw16")
    try:
        epsilon = float(found.pop("eps", _EPSILON))
    except ValueError:
        raise ArgumentError(TOOL, text, "a number after eps") from None
    sizes = {name: whole(size, TOOL, text) for name, size in found.items()}
    inner: list[int] = []
    for name in ("id", "ih", "iw"):
        if inner or name in sizes:
            inner.append(sizes[name] if name in sizes else inner[-1])  # a size that is left out is that before it
    return (sizes.get("mb", _MB), sizes["ic"], *inner), epsilon


def _case(chosen: dict[str, str], dims: tuple[int, ...], epsilon: float) -> Read:
    """The case of one value of each knob."""
    batch = whole(chosen["mb"], TOOL, f"--mb={chosen['mb']}")
    dims = (batch or dims[0], *dims[1:])
    values, notes = _call(chosen)
    values |= {"mode": Mode.SPATIAL, "dtype": _one_of(chosen, "dt", _DTYPES), "dims": dims, "eps": epsilon}
    values["strides"] = _arguments.packed_strides(_arguments.dims(dims), _one_of(chosen, "tag", _TAGS))
    if chosen["strides"]:
        values["strides"] = _strides(chosen["strides"])
    values["inplace"] = _one_of(chosen, "inplace", {"false": False, "true": True})
    if values["inplace"] and "composed" in values:
        raise ArgumentError(TOOL, "--inplace=true", "false in backward with G, which is composed")
    return Read(made(values), tuple(notes))


def _one_of(given: dict[str, str], name: str, allowed: dict[str, Any]) -> Any:
    if given[name] not in allowed:
        raise ArgumentError(TOOL, f"--{name}={given[name]}", " | ".join(allowed))
    return allowed[given[name]]


def _strides(text: str) -> tuple[int, ...]:
    parts = text.split(":")
    if len(parts) != 2 or parts[0] != parts[1]:
        raise ArgumentError(TOOL, f"--strides={text}", "the same strides for input and output, as in 8x2:8x2")
    return tuple(whole(part, TOOL, f"--strides={text}") for part in parts[0].split("x"))


_DIRECTIONS = {
    **dict.fromkeys(("FWD_D", "FWD_I"), Operation.FORWARD_TRAINING),
    **dict.fromkeys(("BWD_DW", "BWD_D"), Operation.BACKWARD),
}


def _call(chosen: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The operation and its options, by direction, flags and the ReLU that is applied to the result."""
    direction, flags, notes = chosen["dir"], chosen["flags"], []
    if strange := "".join(dict.fromkeys(c for c in flags if c not in "GCHSRA")):
        raise ArgumentError(TOOL, f"--flags={flags}", f"the letters G, C, H, S, R and A, and not {strange}")
    values = {"operation": _one_of(chosen, "dir", _DIRECTIONS)}
    if "S" not in flags and not {"C", "H"} <= set(flags):
        notes.append("scale and shift are given, which the line has not both")
    if direction.startswith("BWD"):
        if "G" in flags:
            values["composed"] = "frozen"
            if {"R", "A"} & set(flags):
                raise ArgumentError(TOOL, f"--flags={flags}", "backward with G without R and A: frozen has no mask")
        if direction == "BWD_D":
            notes.append("the gradients of scale and shift are computed, which the line does not ask for")
    elif "G" in flags:
        values["operation"] = Operation.FORWARD_INFERENCE
    elif direction == "FWD_I":
        values |= {"running": False, "saved": False}
        notes.append("inference with the statistics of the batch is training that keeps none")
    if (after := chosen["attr-post-ops"]) not in ("", "relu"):
        raise ArgumentError(TOOL, f"--attr-post-ops={after}", "none, or relu without a slope")
    if after and values["operation"] == Operation.BACKWARD:
        raise ArgumentError(TOOL, "--attr-post-ops=relu", "none in backward, whose mask is the flag R")
    if after or {"R", "A"} & set(flags):
        values |= {"activation": Activation.RELU, "residual": "A" in flags}
    return values, notes
