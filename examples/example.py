"""What the examples share: the command line, memory on the backend's device, and the verdicts.

Results are judged by `pybnorm.check`: a float64 reference and an error bound for each element. Exit status: 0 within
the bound, 1 not, 2 no such library or device here, 3 the backend refuses the data type or layout, by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pybnorm
from pybnorm import DataType, Layout, devices
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import numpy_dtype

LAYOUTS = {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST}
DTYPES = {d.short: d for d in (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)}
MISMATCH, ABSENT, REFUSED = 1, 2, 3


class Example:
    """An open backend, and what has been checked on it so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dtype: DataType = DTYPES[options.dtype]
        self.layout: Layout = LAYOUTS[options.layout]
        self.seed: int = options.seed
        self.handle = pybnorm.Handle(options.backend)
        self.device = devices.device_for(self.handle.library.device_type, self.handle.device or 0)
        if self.device.stream:
            self.handle.set_stream(self.device.stream)
        self.good = True

    def strides(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Packed strides of the layout that was asked for."""
        return self._blank(dims, np.uint8).strides  # bytes are elements there

    def _blank(self, dims: Sequence[int], dtype: Any) -> Any:
        if self.layout == Layout.CHANNELS_FIRST:
            return np.empty(dims, dtype)
        n, c, *spatial = dims
        return np.moveaxis(np.empty((n, *spatial, c), dtype), -1, 1)

    def data(self, array: Any) -> Any:
        """A copy of x's kind on the device, in the layout that was asked for."""
        placed = self._blank(array.shape, array.dtype)
        placed[...] = array
        return self.device.from_numpy(placed)

    def empty(self, dims: Sequence[int]) -> Any:
        """Memory of x's kind on the device, full of NaN."""
        return self.data(np.full(dims, np.nan, numpy_dtype(self.dtype)))

    def parameter(self, array: Any) -> Any:
        """A copy of a parameter on the device."""
        return self.device.from_numpy(np.ascontiguousarray(array, np.float32))

    def channels(self, count: int) -> Any:
        """Memory of one float32 for each channel on the device, full of NaN."""
        return self.parameter(np.full(count, np.nan))

    def workspace(self, nbytes: int) -> Any:
        """Memory for a call or a graph, None where it needs none."""
        return self.device.empty_bytes(nbytes) if nbytes else None

    def check(self, expected: bounds.Expected, output: str, buffer: Any) -> None:
        """Judge one output."""
        got = self.read(buffer).reshape(expected.outputs[output].shape)
        verdict = bounds.judge(expected, output, got)
        self._report(output, verdict.ratio, verdict.elements, verdict.status == bounds.Status.PASS, verdict.note)

    def check_within(self, output: str, buffer: Any, right: Any, error: Any, relu: bool = False) -> None:
        """Judge against float64 values that a computation in float32 may miss by `error` before they are stored.

        With `relu` it is max(right, 0) that is wanted, within the bound of `right`.
        """
        got = self.read(buffer)
        p = bounds.precision(buffer.dtype)
        right, bound = bounds.stored(error, right, 1.0, 0.0, None, p.u, p.u_out, p.tiny_out)
        wanted = np.maximum(right, 0) if relu else right
        ratio = np.abs(got.astype(np.float64).reshape(wanted.shape) - wanted) / bound
        worst = float(np.nan_to_num(ratio, nan=np.inf).max())
        self._report(output, worst, got.size, worst <= 1, "")

    def check_relu(self, expected: bounds.Expected, buffer: Any) -> None:
        """Judge max(y, 0): ReLU brings no two numbers further apart, so y's bound is its bound."""
        got, worst = self.read(buffer), 0.0
        tier = next(t for t in bounds.tiers(expected.problem, "y") if not t.one_pass)
        for part in expected.parts("y", got, (tier,)):
            error = np.abs(part.got - np.maximum(part.reference, 0))
            worst = max(worst, float(np.nan_to_num(error / part.classes[0][0], nan=np.inf).max()))
        self._report("relu(y)", worst, got.size, worst <= 1, "")

    def read(self, buffer: Any) -> Any:
        """A buffer's values on the host, after the calls before."""
        self.device.synchronize()
        return self.device.to_numpy(buffer)

    def _report(self, output: str, ratio: float, elements: int, good: bool, note: str) -> None:
        self.good &= good
        word = "ok" if good else "WRONG"
        print(f"  {output:<22}{elements:>7} elements, worst error / bound {ratio:6.3f}  {word}  {note}".rstrip())


def run(
    text: str,
    body: Callable[[Example], None],
    argv: Sequence[str] | None = None,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    options_of: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Parse the command line, to which `options_of` may add, run the body, and return the exit status."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--backend", default="onednn", choices=pybnorm.backends())
    parser.add_argument("--dtype", default="f32", choices=dtypes)
    parser.add_argument("--layout", default="nchw", choices=LAYOUTS)
    parser.add_argument("--seed", type=int, default=0)
    if options_of is not None:
        options_of(parser)
    options = parser.parse_args(argv)
    try:
        example = Example(options)
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        print(error, file=sys.stderr)
        return ABSENT
    with example.handle:
        library = example.handle.library
        version = ".".join(map(str, library.version))
        print(f"{text.splitlines()[0]} {library.label} {version}, {options.dtype}, {options.layout}")
        try:
            body(example)
        except pybnorm.UnsupportedError as error:
            print(f"  refused: {error.text}")
            return REFUSED
        except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:  # of a second backend
            print(error, file=sys.stderr)
            return ABSENT
    return 0 if example.good else MISMATCH
