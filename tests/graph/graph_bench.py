"""Running graphs on a backend's device: outputs start as NaN, the workspace has exactly the size that was asked for."""

import functools

import ml_dtypes
import numpy as np

from pybnorm import DataType, Layout, UnsupportedError, _arguments, devices
from pybnorm.check.judging import bounds
from pybnorm.graph import Graph

NUMPY = {DataType.FLOAT32: np.float32, DataType.FLOAT16: np.float16, DataType.BFLOAT16: ml_dtypes.bfloat16}
GUARD = 256
PATTERN = 0xA7


@functools.cache
def _device(device_type, ordinal):
    return devices.device_for(device_type, ordinal)  # kept: its stream must outlive every handle


def expected_support(backend, dtype, layout):
    """Whether a backend must execute batch norm graphs; None where it depends on the machine or the graph."""
    if backend in ("cudnn", "native"):
        return True
    if backend == "onednn":
        return dtype != DataType.FLOAT64
    return True if dtype == DataType.FLOAT32 and layout == Layout.CHANNELS_FIRST else None


class Bench:
    """A backend's handle with its device."""

    def __init__(self, handle):
        self.handle = handle
        self.device = _device(handle.library.device_type, handle.device or 0)
        if self.device.stream:
            handle.set_stream(self.device.stream)

    def place(self, array, strides):
        """A copy on the device with these strides in elements."""
        memory = np.zeros(_arguments.span(array.shape, strides), array.dtype)
        view = np.lib.stride_tricks.as_strided(memory, array.shape, [s * array.itemsize for s in strides])
        view[...] = array
        return self.device.from_numpy(view)

    def run(self, graph, given, wanted, *, by="uid"):
        """Execute a built graph.

        `given` maps tensors to NumPy arrays, `wanted` lists tensors whose results are returned, as arrays.
        """
        memory = {t: self.place(a, t.get_stride()) for t, a in given.items()}
        before = {t: self.device.to_numpy(b) for t, b in memory.items()}
        for tensor in wanted:
            blank = np.full(tensor.get_dim(), np.nan, NUMPY[tensor.get_data_type()])
            memory[tensor] = self.place(blank, tensor.get_stride())
        size = graph.get_workspace_size()
        # The address is odd, in units of 64: a graph's workspace may start anywhere.
        total = -(-(size + 2 * GUARD + 4) // 4) * 4
        guarded = self.device.from_numpy(np.full(total, PATTERN, np.uint8).view(np.float32))
        workspace = (guarded.pointer + GUARD + 4, size) if size else None
        pack = {t.get_uid() if by == "uid" else t: b for t, b in memory.items()}
        graph.execute(self.handle, pack, workspace)
        self.device.synchronize()
        after = self.device.to_numpy(guarded).view(np.uint8)
        assert (after[: GUARD + 4] == PATTERN).all(), "wrote before the workspace"
        assert (after[GUARD + 4 + size :] == PATTERN).all(), "wrote behind the workspace"
        for tensor, array in before.items():
            assert self.device.to_numpy(memory[tensor]).tobytes() == array.tobytes(), f"changed {tensor}"
        return [self.device.to_numpy(memory[t]) for t in wanted]


def build(bench, graph, dtype, layout):
    """Build, or see a refusal that the backend is allowed; whether it was built."""
    try:
        graph.build(bench.handle)
    except UnsupportedError as error:
        assert expected_support(bench.handle.backend, dtype, layout) is not True, error
        assert error.text
        return False
    return True


def new_graph(dtype):
    """A graph with hipDNN's three data types."""
    graph = Graph().set_io_data_type(dtype).set_intermediate_data_type("float").set_compute_data_type("float")
    return graph.set_name("test")


def truncates(bench, got):
    """Whether a result was stored by cutting bits off; float16 is rounded."""
    return bench.handle.backend == "miopen" and got.dtype == NUMPY[DataType.BFLOAT16]


def judge(expected, output, got, bench=None):
    """Within the stable bound; MIOpen 3.4 truncates bfloat16 results, which is off by u more than rounding."""
    if output in ("y", "dx") and bench is not None and truncates(bench, got):
        for index, right, bound in parts(expected, output):
            slack = bounds.precision(expected.problem.dtype).u_out * (np.abs(right) + bound)
            assert (np.abs(got[index].astype(np.float64) - right) <= bound + slack).all(), expected.problem
        return
    verdict = bounds.judge(expected, output, got.reshape(expected.outputs[output].shape))
    assert verdict.status == bounds.Status.PASS, f"{expected.problem}: {output}: {verdict}"
    assert verdict.elements == got.size


def parts(expected, output="y"):
    """(index, reference, stable bound) of an output, in blocks."""
    tier = next(t for t in bounds.tiers(expected.problem, output) if not t.one_pass)
    for part in expected.parts(output, None, (tier,)):
        yield part.index, part.reference, part.classes[0][0]


def judge_relu(expected, got, bench, prior):
    """Relu brings no two numbers further apart: y's bound is its bound."""
    u = bounds.precision(expected.problem.dtype).u_out
    for index, right, bound in parts(expected):
        if truncates(bench, got):
            bound = bound + u * (np.abs(right) + bound)
        elif bench.handle.backend == "miopen" and got.dtype == np.float16:
            # MIOpen adds in the data's own type: what it adds to the prior has been rounded, too.
            bound = bound + u * (1 + u) * (np.abs(right - prior[index].astype(np.float64)) + bound)
        error = np.abs(got[index].astype(np.float64) - np.maximum(right, 0))
        assert (error <= bound).all(), (expected.problem, float((error / bound).max()))
