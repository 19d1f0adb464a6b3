"""Random problems, and their calls in three ways: by entry points, by plans and by `pybnorm.operations`."""

import dataclasses
import random

import numpy as np

import pybnorm
from pybnorm import devices, operations
from pybnorm._arrays import CPU
from pybnorm.check.language.calls import METHODS
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import run_case
from pybnorm.check.run.session import Session
from pybnorm.enums import Capability
from pybnorm.errors import ArgumentError

DTYPES = ["f32", "f32", "f16", "bf16"]
WAYS = ("entry", "plan", "operations")


def plane(pick, rank):
    """Spatial sizes: small, or near an edge of some kernel's variants, primes among them."""
    square = pick.choice([7, 11, 13, 14, 17, 33, 35, 64, 72, 73])
    long = pick.choice([61, 67, 127, 513, 1024, 1025, 1026, 1031, 4097, 4099, 4100, 5000])
    small = int(2 ** pick.uniform(0, 6)), int(2 ** pick.uniform(0, 6))
    h, w = pick.choice([small, (1, 1), (1, int(2 ** pick.uniform(0, 11))), (square, square), (1, long)])
    if rank == 3:
        return (h * w,)
    if rank == 5:
        d = next((d for d in pick.sample([2, 3, 5, 7], 4) if h % d == 0), 1)
        return d, h // d, w
    return h, w


def dims_of(pick, most):
    while True:
        rank, c = pick.choice([2, 3, 4, 4, 4, 4, 5]), pick.choice([1, 2, 3, 5, 8, 16, 33])
        if rank == 2:
            found = pick.choice([2, 5, 48, 257, 513, 769, 1024, 1025, 4097]), c
        else:
            found = pick.choice([1, 1, 2, 3, 4, 8, 32, 33, 64, 256, 769]), c, *plane(pick, rank)
        if np.prod(found) <= most:
            return found


def line_of(pick, most):
    operation = pick.choice(["train", "train", "infer", "backward", "backward"])
    kind = [pick.choice(["spatial", "spatial", "spatial", "peract"]), pick.choice(DTYPES)]
    parts = [operation, *kind, pick.choice(["nchw", "nchw", "nhwc"]), "x".join(map(str, dims_of(pick, most)))]
    fill = pick.choice(["randn"] * 6 + ["exact", "ramp", "relu", "image", "sparse", "sqrteps", "constant", "level"])
    parts += [f"fill={fill}"] + [f"kappa={pick.choice([1, 30, 1000])}"] * (fill == "randn" and pick.random() < 0.3)
    if operation == "train":
        parts += [f"factor={pick.choice([0, 0.1, 1])}"] + ["running=0"] * (pick.random() < 0.2)
    if operation == "backward":
        parts += [f"alpha_param={pick.choice([-1, 0.5])}", "beta_param=2"] * (pick.random() < 0.2)
    parts += ["saved=0"] * (operation != "infer" and pick.random() < 0.4)
    parts += [f"beta={pick.choice([0.5, -1])}"] * (pick.random() < 0.2) + ["alpha=0.75"] * (pick.random() < 0.2)
    parts += [f"misalign={pick.choice([1, 3])}"] * (pick.random() < 0.05)
    return ",".join([*parts, f"repeats=1,seed={pick.randrange(1000)}"])


def problems(count, seed, most):
    """So many problems of no more than `most` elements, the same for a seed everywhere."""
    pick, found = random.Random(seed), []
    while len(found) < count:
        try:
            found.append(Problem.parse(line_of(pick, most)))
        except ArgumentError:  # options that exclude one another, or a single element for each statistic
            continue
    return found


class Avoiding(Session):
    """What the library has not is called all the same: the handle may have native compute it."""

    def capability(self, problem):
        return Capability(0)


class Operations(Avoiding):
    """`pybnorm.operations` in the place of a handle's calls."""

    def workspace_size(self, problem):
        return 0

    def __init__(self, backend, handle, device):
        super().__init__(backend, self, device)
        self.vendor = handle

    def __getattr__(self, name):
        if name not in METHODS.values():
            raise AttributeError(name)

        def call(mode, workspace, **arguments):
            rank = len(arguments["x"].dims)
            arguments["axis"] = tuple(range(1, rank)) if mode == pybnorm.Mode.PER_ACTIVATION else 1
            nbytes = operations.workspace_size(self.vendor, name, **arguments)
            memory = self.device.empty_bytes(nbytes) if nbytes and self.device.device_type != CPU else None
            getattr(operations, name)(self.vendor, **arguments, workspace=memory)

        return call


def judged(problems, way, backend, policy="avoid"):
    """The result of each problem, by a handle of this policy."""
    device = devices.device_for(pybnorm.load(backend).device_type)
    with pybnorm.Handle(backend, stream=device.stream or None, known_defects=policy) as handle:
        session = (Operations if way == "operations" else Avoiding)(backend, handle, device)
        for problem in problems:
            yield run_case(dataclasses.replace(problem, algorithm="auto" if way == "plan" else ""), session)
