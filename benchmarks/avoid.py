"""What avoiding known defects costs: a plan that avoids one against the vendor's own call, defect by defect.

``python -m benchmarks.avoid BACKEND [--rounds N]``, in the folder of the source tree. Each row is a problem that meets
the defect, in a size that layers have. Both plans are called in turns on the same arrays; the ratio is that of the
fastest of all rounds, and beside it the median of the rounds' own ratios, which says how far to trust it.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import pybnorm
from pybnorm import defects, devices
from pybnorm.check.calls import METHODS, TENSORS
from pybnorm.check.data import numpy_dtype
from pybnorm.check.problem import Problem
from pybnorm.enums import Operation
from pybnorm.errors import PybnormError

__all__ = ["PROBLEMS", "Cost", "main", "measure", "render"]

PROBLEMS = {
    "miopen-backward-vector-tail": ("backward,spatial,f32,nchw,8x32x35x35", "backward,spatial,f16,nchw,8x32x35x35"),
    "miopen-backward-statistics-tail": ("backward,spatial,f32,nchw,4x16x72x72,saved=0",),
    "miopen-training-vector-tail": ("train,spatial,f32,nchw,4x16x73x73",),
    "miopen-training-stash": ("train,spatial,f32,nchw,769x2x1x1025",),
    "miopen-nhwc-training-kernel": ("train,spatial,f32,nhwc,16x32x1x513",),
    "miopen-nhwc-stash": ("train,spatial,f16,nhwc,8x36x48x24", "backward,spatial,f16,nhwc,8x36x48x24"),
    "miopen-bf16-truncation": tuple(f"{call},spatial,bf16,nchw,8x32x32x32" for call in ("infer", "train", "backward")),
    "miopen-f16-blend": ("train,spatial,f16,nchw,8x32x32x32,beta=0.5",),
    "onednn-long-sums": ("train,spatial,f32,nchw,1x4x1000x1000", "backward,spatial,f32,nchw,1x4x1000x1000,saved=0"),
    "onednn-chained-sums": (
        "train,spatial,f32,nchw,32x16x56x56",
        "backward,spatial,f32,nchw,32x16x56x56,saved=0",
        "train,spatial,f32,nhwc,32x64x28x28",
        "train,spatial,bf16,nhwc,32x64x28x28",
        "train,peract,f32,nchw,512x16x8x8",
    ),
    "miopen-chained-sums": ("train,peract,f32,nchw,512x16x8x8", "backward,peract,f32,nchw,512x16x8x8,saved=0"),
}
"""Of defects that plans avoid; a row is left out where the library or its version has no such defect."""
BATCH_SECONDS = 2e-3
"""The least time of a measurement, of several calls where one takes less."""


class Cost(NamedTuple):
    """One row."""

    defect: str
    problem: str
    plain: float
    """Seconds of the vendor's own call; not a number where it fails."""
    avoiding: float
    median: float
    """Of the ratios of the rounds."""
    way: str
    """The algorithm that avoids it."""
    workspace: int
    data: int
    """Bytes of x."""


def measure(backend: str, rounds: int, problems: Sequence[tuple[str, str]]) -> Iterator[Cost]:
    """Measure rows of `PROBLEMS`.

    Parameters
    ----------
    backend : str
    rounds : int
    problems : sequence of (str, str)
        Defects and problems.

    Yields
    ------
    Cost
    """
    with pybnorm.Handle(backend, known_defects="ignore") as handle:
        device = devices.device_for(handle.library.device_type, handle.device or 0)
        handle.set_stream(device.stream)
        for defect, line in problems:
            problem = Problem.parse(line)
            if defect not in {d.id for d in pybnorm.known_defects(backend, problem, version=handle.library.version)}:
                continue
            avoiding = _Side(handle, device, problem, "auto")
            try:
                plain: _Side | None = _Side(handle, device, problem, "plain")
            except PybnormError:  # the defect is that the call fails
                plain = None
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                times.append((plain.seconds() if plain else math.nan, avoiding.seconds()))
            firsts, seconds = zip(*times, strict=True)
            yield Cost(
                defect,
                line,
                min(firsts),
                min(seconds),
                statistics.median(b / a for a, b in times),
                avoiding.plan.algorithm,
                avoiding.plan.workspace_size,
                problem.dtype.itemsize * math.prod(problem.dims),
            )


class _Side:
    """A plan with its arrays."""

    def __init__(self, handle: pybnorm.Handle, device: Any, problem: Problem, algorithm: str) -> None:
        self._device = device
        options: dict[str, Any] = {"algorithm": algorithm, "alpha": problem.alpha, "beta": problem.beta}
        if problem.operation != Operation.FORWARD_INFERENCE:
            options["saved"] = problem.saved
        rng = np.random.default_rng(0)
        arrays = {}
        for tensor in TENSORS[problem.operation]:
            if tensor.data:
                made = rng.standard_normal(problem.dims, np.float32)
                arrays[tensor.name] = _placed(device, problem, made)
            elif problem.saved or "saved" not in tensor.name:
                shape = pybnorm._arguments.derived_dims(problem.dims, problem.mode)
                arrays[tensor.name] = device.from_numpy(rng.uniform(0.5, 2, shape).astype(np.float32))
        data = [arrays[t.name] for t in TENSORS[problem.operation] if t.data]
        self.plan = getattr(handle, f"plan_{METHODS[problem.operation]}")(*data, mode=problem.mode, **options)
        size = self.plan.workspace_size
        workspace = device.empty_bytes(size) if size else None
        given = [arrays.get(t.name) for t in TENSORS[problem.operation]]
        self._call = functools.partial(self.plan, *given, (workspace.pointer, size) if workspace else None)
        self._held = workspace
        (once,) = device.time(self._call, warmup=2)
        self._calls = max(1, math.ceil(BATCH_SECONDS / max(once, 1e-9)))

    def seconds(self) -> float:
        """Of one call."""
        (each,) = self._device.time(self._call, calls=self._calls)
        return float(each)


def _placed(device: Any, problem: Problem, values: Any) -> Any:
    """On the device, with the problem's strides."""
    order = sorted(range(len(problem.dims)), key=lambda axis: -problem.strides[axis])
    laid = np.empty([problem.dims[axis] for axis in order], numpy_dtype(problem.dtype)).transpose(np.argsort(order))
    laid[...] = values
    return device.from_numpy(laid)


def render(costs: Sequence[Cost]) -> str:
    """A table."""
    head = ("defect", "problem", "plain ms", "avoiding", "more", "median", "by", "workspace, x (MiB)")
    rows = [head]
    for c in costs:
        more = ("fails", "-", "-") if math.isnan(c.plain) else (f"{1e3 * c.plain:.2f}", _more(c.avoiding / c.plain))
        rows.append(
            (
                c.defect.partition("-")[2],
                c.problem,
                more[0],
                f"{1e3 * c.avoiding:.2f}",
                more[1],
                "-" if math.isnan(c.plain) else _more(c.median),
                c.way,
                f"{c.workspace / 2**20:.2f}  {c.data / 2**20:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where nothing was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.avoid", description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=sorted({d.backend for d in defects.DEFECTS}))
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: 1 or more")
    problems = [(d, p) for d, of in PROBLEMS.items() if d.startswith(f"{options.backend}-") for p in of]
    library = pybnorm.load(options.backend)
    print(
        f"{library.label} {'.'.join(map(str, library.version))}, pybnorm {pybnorm.__version__}, {options.rounds} rounds"
    )
    costs = []
    for cost in measure(options.backend, options.rounds, problems):
        costs.append(cost)
        print(f"{cost.defect}  {cost.problem}", file=sys.stderr, flush=True)
    print(render(costs))
    return 0 if costs else 1


if __name__ == "__main__":
    sys.exit(main())
