"""What the tests of CANN's and DirectML's calls share. Bounds are held by the tests of the operations that compute."""

import ml_dtypes
import numpy as np
import pytest
from operation_bench import NUMPY

from pybnorm.errors import ArgumentError, UnsupportedError

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCES = {np.dtype(DTYPES[name]): t for name, t in (("f32", 2e-5), ("f16", 4e-3), ("bf16", 3e-2))}


def wide(array):
    return np.asarray(array, np.float64)


def near(got, want, name=""):
    """Equal but for roundings of the dtype of `got`; wrong arguments are off by more."""
    want, tolerance = np.broadcast_to(wide(want), got.shape), TOLERANCES[got.dtype]
    largest = max(1.0, np.abs(want).max(initial=0.0))
    np.testing.assert_allclose(wide(got), want, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def perform(bench, functions, arguments, written):
    """Results by name of a call, its query's workspace in use; a dtype that the backend has not is refused by both."""
    arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray)}
    options = {n: a for n, a in arguments.items() if n not in arrays}
    try:
        return bench.run(functions, arrays, written, options)
    except UnsupportedError as error:
        if all(a.dtype == np.float32 for a in arrays.values()):
            raise
        bench.refuses(functions, arrays, written, options)
        pytest.skip(f"{bench.handle.backend}: {error.text}")


def refuse(bench, functions, arguments, argument, text, kind=ArgumentError):
    """Refused by both functions, with the argument's name and the text; nothing is written."""
    arrays = {n: a for n, a in arguments.items() if isinstance(a, np.ndarray) and a.dtype in NUMPY.values()}
    placed = arguments | bench.put(arrays)
    for function in functions:
        with pytest.raises(kind) as caught:
            function(bench.handle, **placed)
        assert caught.value.argument in argument.split("|"), caught.value
        assert text in str(caught.value), caught.value
    for name, array in arrays.items():
        assert bench.device.to_numpy(placed[name]).tobytes() == array.tobytes(), name
