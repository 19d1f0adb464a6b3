"""Each hostile value for each argument of each public callable, in an order that a seed makes."""

from __future__ import annotations

import itertools
import mmap
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hostile_calls
import hostile_values
import numpy as np
from processes import ACCEPTED, RAW, REFUSED, UNNAMED

from pybnorm.errors import PybnormError

MEMORY = 1 << 29
"""Bytes that the process may grow by: an endless iterable that is taken in ends in a MemoryError."""


class Try(NamedTuple):
    """One hostile value for one argument of one callable."""

    target: hostile_calls.Target
    parameter: str
    value: hostile_values.Value | None
    """None: of `self`, an object whose constructor did not run."""

    def __str__(self):
        value = "one whose __init__ did not run" if self.value is None else self.value.name
        return f"{self.target.name}({self.parameter}={value})"

    def perform(self, world):
        """Make the call; what became of it, and the error's text."""
        target, parameter, value = self
        try:
            arguments = target.good(world)
            good = arguments.get(parameter)
            hostile = target.unmade() if value is None else value.make(good)
            result = target.call(arguments | {parameter: target.replaced(parameter, good, hostile)})
            if isinstance(result, Iterator):
                for _ in itertools.islice(result, 100):
                    pass
            return ACCEPTED, ""
        except Exception as error:
            if no_memory(error):  # what is told of it needs memory; the process ends after it
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if (target.name, parameter) in hostile_calls.CALLED_BACK and not isinstance(error, PybnormError):
                return ACCEPTED, "what is called back has its own errors"
            if (target.name, parameter) in hostile_calls.ALLOCATES and isinstance(error, MemoryError):
                return REFUSED, "MemoryError, as asked for"
            if isinstance(error, hostile_values.Own) and str(error) == "function":
                return ACCEPTED, "an array's class answers for NumPy's functions, such as empty_like"
            return judged(error, parameter)
        except BaseException as error:
            return RAW, described(error)


class Matrix:
    """All tries."""

    def __init__(self, seed, _=None):
        self.tally = {}
        self.pairs = [(t, parameter) for t in hostile_calls.TARGETS.values() for parameter in t.parameters]
        values = hostile_values.VALUES
        made = np.ones((len(self.pairs), len(values)), bool)
        lone = np.array([value.address for value in values])
        for row, (target, parameter) in enumerate(self.pairs):
            if parameter in target.addresses:  # a wrong address is the caller's
                made[row] = ~lone
            if parameter == "self":
                made[row, 1:] = False
        self.order = np.random.default_rng(seed).permutation(np.flatnonzero(made))

    def start(self):
        """Make each good call, and let the process grow no more than it may."""
        self.world = hostile_calls.World()
        wrong = []
        for name, target in hostile_calls.TARGETS.items():
            try:
                target.call(target.good(self.world))
            except Exception as error:
                if name not in hostile_calls.REFUSED:
                    wrong.append(f"the good call of {name} was refused: {described(error)}")
        if wrong:
            sys.exit("\n".join(wrong))
        if "asan" not in Path("/proc/self/maps").read_text():  # its shadow is larger than any limit
            size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))

    def __getitem__(self, index):
        row, column = divmod(int(self.order[index]), len(hostile_values.VALUES))
        target, parameter = self.pairs[row]
        return Try(target, parameter, None if parameter == "self" else hostile_values.VALUES[column])

    def perform(self, index):
        return self[index].perform(self.world)


def judged(error, parameter):
    """Whether an error is one to be raised."""
    if no_memory(error):  # also where it became an error of ours
        return RAW, f"MemoryError behind {described(error)}"
    try:
        text = str(error)
    except Exception:
        return RAW, f"{type(error).__name__} without a text"
    if parameter == "self":
        return (REFUSED if isinstance(error, PybnormError) else RAW), described(error)
    name = re.escape(parameter)
    if isinstance(error, PybnormError):
        return (REFUSED if re.search(rf"(?<!\w){name}(?!\w)", text) else UNNAMED), described(error)
    # Of an error that Python, Cython or we raise: the argument in quotes or first.
    quoted = re.search(rf"['\"`]{name}['\"`]|^{name}:", text)
    ours = isinstance(error, TypeError | ValueError | OverflowError) and quoted
    return (REFUSED if ours else RAW), described(error)


def no_memory(error):
    seen = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def described(error):
    trace, where = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    try:
        text = str(error)
    except Exception:
        text = "no text"
    return f"{type(error).__name__}: {text[:300]} (at {where})"
