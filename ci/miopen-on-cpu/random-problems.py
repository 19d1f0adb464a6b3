"""Random problems on MIOpen, judged: the entry points' or, with a last argument "auto", what avoids their defects.

In the rig: python3 ci/miopen-on-cpu/random-problems.py COUNT SEED [auto]
"""

import collections
import random
import sys

from pybnorm.check.problem import Problem
from pybnorm.check.runner import run_case
from pybnorm.check.session import open_session
from pybnorm.errors import ArgumentError

count, seed, *algorithm = sys.argv[1:]
pick = random.Random(int(seed))


def shape() -> tuple[int, ...]:
    """N, C, H, W: small, or near an edge of a kernel's variants."""
    while True:
        n, c = pick.choice([1, 2, 3, 4, 8, 32, 33, 64, 256, 769]), pick.choice([1, 2, 3, 5, 8, 16])
        square = pick.choice([13, 14, 11, 35, 73, 72, 64, 33, 17, 7])
        long = pick.choice([513, 1024, 1025, 1026, 1031, 4097, 4100, 5000])
        small = int(2 ** pick.uniform(0, 6)), int(2 ** pick.uniform(0, 6))
        h, w = pick.choice([small, (1, int(2 ** pick.uniform(0, 11))), (square, square), (1, long)])
        if n * c * h * w <= 400_000:
            return n, c, h, w


def line(number: int) -> str:
    """A problem."""
    operation = pick.choice(["train", "infer", "backward", "backward"])
    kind = [pick.choice(["spatial", "spatial", "spatial", "peract"]), pick.choice(["f32", "f32", "f16", "bf16"])]
    parts = [operation, *kind, pick.choice(["nchw", "nchw", "nhwc"]), "x".join(map(str, shape())), "fill=randn"]
    parts += ["saved=0"] * (operation == "backward" and pick.random() < 0.4)
    parts += ["beta=0.5"] * (pick.random() < 0.2) + ["alpha=0.75"] * (pick.random() < 0.2)
    return ",".join([*parts, f"seed={number}", *(f"algorithm={name}" for name in algorithm)])


session = open_session("miopen")
tally: collections.Counter[str] = collections.Counter()
for text in [line(number) for number in range(int(count))]:
    try:
        problem = Problem.parse(text)
    except ArgumentError:  # a single element for each statistic
        continue
    status = run_case(problem, session).status.name
    tally[status] += 1
    if status in ("FAIL", "BUILD_FAILED", "ERROR", "CRASH"):
        print(status, text, flush=True)
print(dict(tally))
