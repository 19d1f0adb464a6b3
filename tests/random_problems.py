"""Random problems, and the ways to make their calls: entry points, plans, operations, each judged by the bound."""

from __future__ import annotations

import random

import numpy as np

import pybnorm
from pybnorm import devices, operations
from pybnorm._arrays import CPU, Buffer
from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.known_defects import explain
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.judging.standalone import settle
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.guarded import execute
from pybnorm.check.run.runner import classify
from pybnorm.check.run.session import Session
from pybnorm.enums import Capability, Mode, Operation
from pybnorm.errors import ArgumentError

DTYPES = ["f32", "f32", "f16", "bf16"]
TRAINING, INFERENCE, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD


# ---------------------------------------------------------------- problems


def _plane(pick: random.Random, rank: int) -> tuple[int, ...]:
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


def _dims(pick: random.Random, most: int) -> tuple[int, ...]:
    while True:
        rank, c = pick.choice([2, 3, 4, 4, 4, 4, 5]), pick.choice([1, 2, 3, 5, 8, 16, 33])
        if rank == 2:
            found = pick.choice([2, 5, 48, 257, 513, 769, 1024, 1025, 4097]), c
        else:
            found = pick.choice([1, 1, 2, 3, 4, 8, 32, 33, 64, 256, 769]), c, *_plane(pick, rank)
        if np.prod(found) <= most:
            return found


def _line(pick: random.Random, most: int) -> str:
    operation = pick.choice(["train", "train", "infer", "backward", "backward"])
    kind = [pick.choice(["spatial", "spatial", "spatial", "peract"]), pick.choice(DTYPES)]
    parts = [operation, *kind, pick.choice(["nchw", "nchw", "nhwc"]), "x".join(map(str, _dims(pick, most)))]
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


def problems(count: int, seed: int, most: int = 400_000) -> list[Problem]:
    """So many problems of no more than `most` elements, the same for a seed everywhere."""
    pick, found = random.Random(seed), []
    while len(found) < count:
        try:
            found.append(Problem.parse(_line(pick, most)))
        except ArgumentError:  # options that exclude one another, or a single element for each statistic
            continue
    return found


# ---------------------------------------------------------------- ways


class Way:
    """The three calls as a `pybnorm.check` session makes them, by a vendor's handle that avoids known defects."""

    def __init__(self, backend: str, policy: str = "avoid") -> None:
        self.device = devices.device_for(pybnorm.load(backend).device_type)
        self.handle = pybnorm.Handle(backend, stream=self.device.stream or None, known_defects=policy)

    def memory(self, nbytes: int):
        """A workspace: None on a CPU, where the handle lends its own."""
        return self.device.empty_bytes(nbytes) if nbytes and self.device.device_type != CPU else None

    def _made(self, operation, arguments):
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Buffer)}
        self._call(operation, {n: v for n, v in arguments.items() if n not in tensors} | {"workspace": None}, tensors)

    def forward_training(self, **arguments):
        """As `Handle.forward_training`."""
        self._made(TRAINING, arguments)

    def forward_inference(self, **arguments):
        """As `Handle.forward_inference`."""
        self._made(INFERENCE, arguments)

    def backward(self, **arguments):
        """As `Handle.backward`."""
        self._made(BACKWARD, arguments)


class Entry(Way):
    """The entry points."""

    def _call(self, operation, options, tensors):
        numbers = {n: v for n, v in options.items() if n not in ("exponential_average_factor", "workspace")}
        like = {f"{n}_desc": self.handle.descriptor(b) for n, b in tensors.items() if n in ("y", "dy", "dx")}
        stated = {n: f"{n}_mean" in tensors for n in ("running", "saved")}
        nbytes = self.handle.workspace_size(
            operation, self.handle.descriptor(tensors["x"]), **like, **numbers, **stated
        )
        call = getattr(self.handle, operation.name.lower())
        call(**tensors, **(options | {"workspace": self.memory(nbytes)}))


class Plan(Way):
    """Plans with algorithm "auto"."""

    def _call(self, operation, options, tensors):
        del options["workspace"]
        like = {n: tensors[n] for n in ("x", "y", "dy", "dx") if n in tensors}
        named = {TRAINING: ("running", "saved"), INFERENCE: (), BACKWARD: ("saved",)}[operation]
        stated = {n: f"{n}_mean" in tensors for n in named}
        make = getattr(self.handle, f"plan_{operation.name.lower()}")
        plan = make(**like, **options, **stated, algorithm="auto")
        self.algorithm = plan.algorithm
        plan(**tensors, workspace=self.memory(plan.workspace_size))


class Operations(Way):
    """`pybnorm.operations`."""

    def _call(self, operation, options, tensors):
        name, rank, mode = operation.name.lower(), len(tensors["x"].dims), options.pop("mode")
        options["axis"] = tuple(range(1, rank)) if mode == Mode.PER_ACTIVATION else 1
        del options["workspace"]
        nbytes = operations.workspace_size(self.handle, name, **tensors, **options)
        getattr(operations, name)(self.handle, **tensors, **options, workspace=self.memory(nbytes))


WAYS = {"entry": Entry, "plan": Plan, "operations": Operations}


# ---------------------------------------------------------------- running them


class _Session(Session):
    """A way in the place of a handle, which brings its own workspace."""

    def capability(self, problem: Problem) -> Capability:
        return Capability(0)

    def workspace_size(self, problem: Problem) -> int:
        return 0


def run(problem: Problem, way: Way) -> CaseResult:
    """The verdict on a problem; `known` names what explains it."""
    backend = way.handle.backend
    result = CaseResult(backend, str(problem), Status.PASS)
    try:
        inputs = generate(problem)
        observed = execute(problem, inputs, _Session(backend, way, way.device))
        settle(result, problem, inputs, judge_call(expect(problem, inputs), observed.outputs))
        if observed.damage:
            result.status, result.message = Status.FAIL, "; ".join(observed.damage)
    except Exception as error:
        result.status, result.message = classify(error), f"{type(error).__name__}: {error}"
    version = way.handle.library.version
    known = explain(backend, version, problem, result.verdicts, result.status, result.message)
    result.known = ", ".join(d.id for d in known)
    return result
