"""Calls with addresses of little alignment, in a process that may lose its CUDA context.

    python3 alignment_worker.py BACKEND

One line for each algorithm, operation, layout, dtype and offset: what is tried, then ``refused`` or ``right``. Ends
with 1 at the first wrong result.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_calls import Case

import pybnorm
from pybnorm import _arguments
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.problem import Problem

OFFSETS = ((0, 0), (0, 4), (0, 8), (8, 0), (4, 0), (2, 0))  # bytes of the data and of the parameters
OPERATIONS = ("train", "infer", "backward")
KINDS = list(itertools.product(("nchw", "nhwc"), ("f32", "f16"), OFFSETS))
CASES = [(layout, dtype, offsets) for layout, dtype, offsets in KINDS if dtype == "f16" or offsets[0] != 2]


class Shifted(Case):
    """A case whose arrays are each at an offset from an aligned block."""

    def __init__(self, handle, problem, offsets):
        self.offsets = offsets
        super().__init__(handle, problem)

    def place(self, array, strides=None):
        data = array.shape == self.problem.dims
        strides = self.problem.strides if data else _arguments.packed_strides(array.shape)
        place = self.offsets[not data] // array.itemsize
        block = np.zeros(array.size + 64, array.dtype)
        steps = [s * array.itemsize for s in strides]
        np.lib.stride_tricks.as_strided(block[place:], array.shape, steps)[...] = array
        buffer = self.device.from_numpy(block)
        assert buffer.pointer % 64 == 0
        at = buffer.pointer + place * array.itemsize
        return buffer._replace(pointer=at, dims=array.shape, strides=strides)


def algorithms(backend):
    """Other backends have one way for every call."""
    tried = ("auto", "fast", "plain", "ex", "graph", "pointwise")
    return [a for a in tried if a in pybnorm.algorithms(backend)] if backend == "cudnn" else ["auto"]


def attempt(case, algorithm):
    try:
        plan = case.run_plan(algorithm)
    except pybnorm.ContextLostError:
        raise
    except pybnorm.PybnormError as error:
        case.device.synchronize()
        return f"refused: {getattr(error, 'text', error)}"
    wrong = [str(verdict) for verdict in case.verdicts() if verdict.status != Status.PASS]
    return f"{'WRONG' if wrong else 'right'}: {plan.algorithm} {wrong}"


def main(backend):
    with pybnorm.Handle(backend) as handle:
        product = itertools.product(algorithms(backend), OPERATIONS, CASES)
        for algorithm, operation, (layout, dtype, offsets) in product:
            print(
                f"{algorithm}, {operation}, {layout}, {dtype}, data +{offsets[0]}, parameters +{offsets[1]}:", end=" "
            )
            sys.stdout.flush()
            problem = Problem.parse(f"{operation},spatial,{dtype},{layout},4x64x6x5,fill=randn")
            found = attempt(Shifted(handle, problem, offsets), algorithm)
            print(found.partition("\n")[0], flush=True)
            if found.startswith("WRONG"):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
