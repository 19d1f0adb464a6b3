"""Makes hostile calls in a process of its own; a crash or a hang leaves behind how far it came.

    python matrix_worker.py --seed 1 --first 0 --count 1000 --journal FILE --findings FILE
    python matrix_worker.py --seed 1 --only 417      makes one call and tells of it

The journal has a byte for each call, which says what became of it; a finding is a line of JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import mmap
import re
import resource
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import hostile_calls
import hostile_values
import numpy as np

from pybnorm.errors import PybnormError

NOT_MADE, ACCEPTED, REFUSED, UNNAMED, RAW, CRASHED, HUNG = range(7)
"""What became of a call. UNNAMED: refused, without the argument's name; RAW: an error that is not ours."""
WORDS = ("not made", "accepted", "refused", "refused without a name", "raw error", "crash", "hang")
MEMORY = 1 << 29
"""Bytes that the process may grow by: an endless iterable that is taken in ends in a MemoryError."""
SPENT = 75
"""Exit status after such a call: CPython does not give back all that it took, and oneDNN writes to the NULL of an
allocation that failed, which would be a crash of some later, innocent call."""


class Try(NamedTuple):
    """One hostile value for one argument of one callable."""

    target: hostile_calls.Target
    parameter: str
    value: hostile_values.Value | None
    """None: one of chance."""

    def __str__(self) -> str:
        if self.parameter == "self":
            return f"{self.target.name}(self=one whose __init__ did not run)"
        return f"{self.target.name}({self.parameter}={'by chance' if self.value is None else self.value.name})"

    def perform(self, world: hostile_calls.World, rng: np.random.Generator) -> tuple[int, str]:
        """Make the call; what became of it, and the error's text."""
        target, parameter, value = self
        arguments = target.good(world)
        good = arguments.get(parameter)
        if parameter == "self":
            arguments[parameter] = target.unmade(world)
        elif value is None:
            hostile = hostile_values.by_chance(rng, good, parameter in target.addresses)
            arguments[parameter] = target.replaced(parameter, good, hostile)
        else:
            arguments[parameter] = target.replaced(parameter, good, value.make(good))
        try:
            result = target.call(arguments)
            if isinstance(result, Iterator | types.GeneratorType):
                for _ in itertools.islice(result, 100):
                    pass
            return ACCEPTED, ""
        except Exception as error:
            if no_memory(error):
                lift_limit()
            if (target.name, parameter) in hostile_calls.CALLED_BACK and not isinstance(error, PybnormError):
                return ACCEPTED, "what is called back has its own errors"
            if (target.name, parameter) in hostile_calls.ALLOCATES and isinstance(error, MemoryError):
                return REFUSED, "MemoryError, as asked for"
            if isinstance(error, hostile_values.Own) and str(error) == "function":
                return ACCEPTED, "an array's class answers for NumPy's functions, such as empty_like"
            return judged(error, parameter, target)
        except BaseException as error:
            return RAW, described(error)


class Matrix:
    """All tries, in an order that the seed makes: first each value for each argument, then values of chance."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.pairs = [
            (target, parameter) for target in hostile_calls.TARGETS.values() for parameter in target.parameters
        ]
        values = hostile_values.VALUES
        made = np.ones((len(self.pairs), len(values)), bool)
        lone = np.array([value.address for value in values])
        for row, (target, parameter) in enumerate(self.pairs):
            if parameter in target.addresses:  # a wrong address is the caller's
                made[row] = ~lone
            if parameter == "self":
                made[row, 1:] = False
        self.order = np.random.default_rng(seed).permutation(np.flatnonzero(made))
        self.size = len(self.order)

    def __getitem__(self, index: int) -> Try:
        row, column = divmod(int(self.order[index % self.size]), len(hostile_values.VALUES))
        target, parameter = self.pairs[row]
        return Try(target, parameter, hostile_values.VALUES[column] if index < self.size else None)

    def perform(self, index: int, world: hostile_calls.World) -> tuple[int, str]:
        """Make a call; what became of it, and the error's text."""
        return self[index].perform(world, np.random.default_rng((self.seed, index)))


def judged(error: Exception, parameter: str, target: hostile_calls.Target) -> tuple[int, str]:
    """Whether an error is one to be raised."""
    if no_memory(error):  # also where it became an error of ours
        return RAW, f"MemoryError behind {described(error)}"
    try:
        text = str(error)
    except Exception:
        return RAW, f"{type(error).__name__} without a text"
    told = rf"(?<!\w){re.escape(parameter)}(?!\w)"
    if parameter == "self":
        return (REFUSED if isinstance(error, PybnormError) else RAW), described(error)
    if isinstance(error, PybnormError):
        return (REFUSED if re.search(told, text) else UNNAMED), described(error)
    # Of an error that Python, Cython or we raise: the argument in quotes or first.
    quoted = re.search(rf"['\"`]{re.escape(parameter)}['\"`]|^{re.escape(parameter)}:", text)
    if isinstance(error, TypeError | ValueError | OverflowError) and quoted:
        return REFUSED, described(error)
    return RAW, described(error)


def no_memory(error: BaseException | None) -> bool:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def described(error: BaseException) -> str:
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


def limit_memory() -> None:
    with open("/proc/self/maps") as maps:
        if "asan" in maps.read():  # its shadow is larger than any limit
            return
    with open("/proc/self/statm") as sizes:
        size = int(sizes.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))


def lift_limit() -> None:
    """What is told of a MemoryError needs memory; the process ends after it."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--findings", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    faulthandler.enable()
    matrix, world = Matrix(options.seed), hostile_calls.World()
    wrong = []
    for name, target in hostile_calls.TARGETS.items():
        try:
            target.call(target.good(world))
        except Exception as error:
            if name not in hostile_calls.REFUSED:
                wrong.append(f"the good call of {name} was refused: {described(error)}")
    if wrong:
        sys.exit("\n".join(wrong))
    limit_memory()
    if options.only is not None:
        print(matrix[options.only], flush=True)
        became, text = matrix.perform(options.only, world)
        print(WORDS[became], text)
        return
    with open(options.journal, "r+b") as file, open(options.findings, "a", encoding="utf-8") as findings:
        journal = mmap.mmap(file.fileno(), 0)
        for index in range(options.first, options.first + options.count):
            became, text = matrix.perform(index, world)
            journal[index] = became
            if became >= RAW:
                print(json.dumps([index, became, str(matrix[index]), text]), file=findings, flush=True)
            if text.startswith("MemoryError"):
                sys.exit(SPENT)


if __name__ == "__main__":
    main()
