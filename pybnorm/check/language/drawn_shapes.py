"""Cases whose shapes are drawn: ``--shapes random:COUNT:SEED``."""

from __future__ import annotations

import math
import secrets

import numpy as np

from pybnorm.check.language.problem import Problem
from pybnorm.errors import ArgumentError

MOST = 10_000
"""Cases of one word."""
_LARGEST = 1 << 17
"""Elements of a case."""
_OPERATIONS = ("train", "infer", "backward")
_DTYPES = ("f32", "f32", "bf16", "f16", "f64")
_FILLS = ("exact", "randn", "randn", "paired", "sqrteps", "ramp", "relu")


def read_shapes(word: str) -> tuple[int, int]:
    """COUNT and SEED of ``random:COUNT`` or ``random:COUNT:SEED``; a seed that is not there is drawn."""
    kind, _, rest = word.partition(":")
    count, _, seed = rest.partition(":")
    if kind != "random" or not (count.isdecimal() and 0 < int(count) <= MOST) or not (not seed or seed.isdecimal()):
        raise ArgumentError("--shapes", word, f"random:COUNT or random:COUNT:SEED, a count of 1 to {MOST}")
    return int(count), int(seed) if seed else secrets.randbelow(1 << 32)


def drawn_cases(count: int, seed: int) -> list[Problem]:
    """Cases with shapes, layouts, dtypes and operations that a seed draws.

    Batch sizes, channels and planes are uniform in their logarithm, so that each size is beside a power of two as often
    as far from one.
    """
    rng = np.random.default_rng(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = Problem.parse(_line(rng))
        if problem not in found:
            found.append(problem)
    return found


def _line(rng: np.random.Generator) -> str:
    def size(most: int) -> int:
        return int(np.exp(rng.uniform(0, math.log(most + 1))))

    rank = int(rng.choice((2, 3, 4, 4, 4, 5)))
    while True:
        dims = [size(300), size(300), *(size((64, 4096, 128, 32)[rank - 2]) for _ in range(rank - 2))]
        if math.prod(dims) <= _LARGEST and math.prod(dims) // dims[1] > 1 and dims[0] > 1:
            break
    operation, mode = str(rng.choice(_OPERATIONS)), "peract" if rng.random() < 0.15 else "spatial"
    words = [operation, mode, str(rng.choice(_DTYPES)), str(rng.choice(("nchw", "nhwc")))]
    words += ["x".join(map(str, dims)), f"fill={rng.choice(_FILLS)}", f"seed={rng.integers(1 << 32)}"]
    if operation == "backward" and rng.random() < 0.3:
        words.append("saved=0")
    return ",".join(words)
