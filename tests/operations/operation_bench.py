"""Running the neutral operations on a backend's device, and judging what they wrote.

Every run passes a workspace of exactly the queried size with guard bytes behind it, and checks that these, the inputs
and the gaps between strided outputs are as they were.
"""

import functools

import ml_dtypes
import numpy as np
import pytest

from pybnorm import DataType, UnsupportedError, devices, operations
from pybnorm.check.judging.bounds import precision
from pybnorm.reference import round_to

NUMPY = {
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
DTYPES = list(NUMPY)
LAYOUTS = ["packed", "reversed", "gaps", "mixed"]
DATA = {"x", "y", "dy", "dx"}
GUARD = 1024
PATTERN = np.frombuffer(b"\xa5" * 8, np.float32)[0]  # finite in every dtype


def expected_support(backend, dtype):
    """Whether a backend must execute: oneDNN has no float64, and for MIOpen native has that of batch norms alone."""
    if backend == "miopen" and dtype == DataType.FLOAT64:
        return None
    return backend in ("cudnn", "native", "native_cuda") or dtype != DataType.FLOAT64


def strided(array, layout, number=0):
    """A copy that lies in memory as `layout` says; `number` tells the arrays of one call apart."""
    if layout == "mixed":
        layout = ("packed", "reversed", "gaps")[number % 3]
    if layout == "gaps":
        memory = np.full([d + 1 + number % 2 for d in array.shape], PATTERN).astype(array.dtype)
        view = memory[tuple(slice(0, d) for d in array.shape)]
        view[...] = array
        return view
    return np.array(array, order="F" if layout == "reversed" else "C")


@functools.cache
def _device(device_type, ordinal):
    """One for the whole run: its stream outlives every handle."""
    return devices.device_for(device_type, ordinal)


def functions(operation):
    """The functions that call an operation and that query its workspace."""
    if not isinstance(operation, str):
        return operation
    return getattr(operations, operation), lambda handle, **named: operations.workspace_size(handle, operation, **named)


class Bench:
    """A backend's handle with its device."""

    def __init__(self, handle):
        self.handle = handle
        self.device = _device(handle.library.device_type, handle.device or 0)
        if self.device.stream:
            handle.set_stream(self.device.stream)

    def memory(self, nbytes):
        """(buffer, address): memory with an address that is a multiple of 64 and guard bytes on either side."""
        buffer = self.device.from_numpy(np.full((nbytes + 2 * GUARD + 64) // 4, PATTERN, np.float32))
        return buffer, -(-(buffer.pointer + GUARD) // 64) * 64

    def intact(self, buffer, address, nbytes):
        """Whether the guard bytes of `memory` are as they were."""
        everything = self.device.to_numpy(buffer).tobytes()
        start = address - buffer.pointer
        guards = everything[:start] + everything[start + nbytes :]
        return len(guards) > 2 * GUARD and guards.count(0xA5) == len(guards)

    def put(self, arrays):
        return {name: self.device.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}

    def run(self, operation, arrays, outputs, options):
        """Results by name; `arrays` are NumPy arrays by the operation's argument names.

        `operation` is the name of a neutral operation, or functions that call and that query.
        """
        call, query = functions(operation)
        placed = self.put(arrays)
        size = query(self.handle, **placed, **options)
        buffer, address = self.memory(size)
        call(self.handle, **placed, **options, workspace=(address, size))
        results = {}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                continue
            after = self.device.to_numpy(placed[name])
            if name in outputs:
                results[name] = after
                if array.base is not None and array.size:
                    assert gaps(after) == gaps(array), f"{operation} wrote between the elements of {name}"
            else:
                assert after.tobytes() == array.tobytes(), f"{operation} changed {name}"
        assert self.intact(buffer, address, size), f"{operation} wrote outside its workspace"
        return results

    def refuses(self, operation, arrays, outputs, options):
        """That UnsupportedError comes with a reason, from query and call, before anything is written."""
        call, query = functions(operation)
        placed = self.put(arrays)
        with pytest.raises(UnsupportedError) as caught:
            query(self.handle, **placed, **options)
        assert caught.value.text
        buffer, address = self.memory(1 << 20)
        with pytest.raises(UnsupportedError):
            call(self.handle, **placed, **options, workspace=(address, 1 << 20))
        for name in outputs:
            assert self.device.to_numpy(placed[name]).tobytes() == arrays[name].tobytes()
        assert self.intact(buffer, address, 0)

    def check(self, operation, arrays, expected, options, *, support=True, blended_once=True):
        """Run and judge: `expected` has (right, bound) for each output, with `coarse` or, blended once, without."""
        given = {n: a for n, a in arrays.items() if isinstance(a, np.ndarray)}
        first = next((a for n, a in given.items() if n in DATA), next(iter(given.values())))
        dtype = next(d for d, n in NUMPY.items() if n == first.dtype)
        if support is None:
            try:
                operations.workspace_size(self.handle, operation, **self.put(arrays), **options)
                support = True
            except UnsupportedError:
                support = False
        if not support:
            self.refuses(operation, arrays, expected, options)
            return
        for name, values in self.run(operation, arrays, expected, options).items():
            right, bound = expected[name]
            if blended_once and name in DATA:
                bound = bound + self.coarse(dtype, right, bound, arrays[name], options)
            ratio = judged(values, right, bound, precision(dtype).max_out if name in DATA else np.inf)
            assert ratio <= 1, f"{name}: error / bound = {ratio:.3g}"

    def coarse(self, *arguments):
        """`coarse`, which is of MIOpen alone."""
        return coarse(*arguments) if self.handle.backend == "miopen" else 0.0


def coarse(dtype, right, bound, prior, options):
    """What MIOpen's 16-bit stores lose beyond the bound, which is otherwise the same for every vendor.

    MIOpen 3.4 truncates results to bfloat16, which is off by u more than rounding, and blends float16 data that have
    been rounded before: u of either term.
    """
    beta = options.get("b", options.get("beta", options.get("beta", 0.0)))
    u = precision(dtype).u_out
    if dtype == DataType.BFLOAT16:
        return u * (np.abs(right) + bound)
    if dtype != DataType.FLOAT16 or beta == 0:
        return 0.0
    other = beta * prior.astype(np.float64)
    return u * (1 + u) * (np.abs(right - other) + np.abs(other) + bound)


def gaps(view):
    """The bytes of a strided array's memory, between its first and last element, that are not its own."""
    span = 1 + sum((d - 1) * s // view.itemsize for d, s in zip(view.shape, view.strides, strict=True))
    memory = np.lib.stride_tricks.as_strided(view, (span,), (view.itemsize,))
    mine = np.zeros(span, bool)
    np.lib.stride_tricks.as_strided(mine, view.shape, [s // view.itemsize for s in view.strides])[...] = True
    return memory[~mine].tobytes()


def judged(got, right, bound, largest=np.inf):
    """Worst error / bound; infinite for a NaN. As in `pybnorm.check`, what is out of range is not judged."""
    got, right, bound = np.broadcast_arrays(got.astype(np.float64).reshape(right.shape), right, bound)
    error = np.abs(got - right)
    assert np.isfinite(right).all()
    assert np.isfinite(bound).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / bound)
    judgeable = np.abs(right) + bound <= largest
    assert judgeable.any()
    return float(np.where(np.isfinite(ratio), ratio, np.inf)[judgeable].max())


def rounded(right, bound, dtype):
    """(right, bound) after one more rounding, of a result that is stored in `dtype`: (1 + u) of value and error."""
    p = precision(dtype)
    return right, bound + p.u_out * (np.abs(right) + bound) + p.tiny_out


def arrays_of(rng, dims, dtype, layout, mean=0.5, names=("x", "dy")):
    """Data arrays with statistics away from zero."""
    made = {}
    for number, name in enumerate(names):
        values = rng.normal(mean if name == "x" else 0.1, 1.0, dims)
        made[name] = strided(round_to(values, NUMPY[dtype]), layout, number)
    return made
