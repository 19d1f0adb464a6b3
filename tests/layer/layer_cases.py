"""What the tests of this folder share: placing arrays on a handle's device, and the verdict on outputs."""

import numpy as np

from pybnorm import DataType, Layout, Mode, Operation, _arguments, capability, devices
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language import calls
from pybnorm.check.language.problem import Problem

SHAPE = (4, 3, 5, 6)
MODES = (Mode.SPATIAL, Mode.PER_ACTIVATION)
DTYPES = (DataType.FLOAT32, DataType.BFLOAT16, DataType.FLOAT64)
LAYOUTS = (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST)


def problem_of(operation, mode=Mode.SPATIAL, dtype=DataType.FLOAT32, layout=Layout.CHANNELS_FIRST, **options):
    """A problem of random data; not the exact fill, so that its seeds differ."""
    dims = options.pop("dims", SHAPE)
    strides = _arguments.packed_strides(dims, layout)
    return Problem(operation, mode, dtype, dims, strides, **{"fill": "randn", "kappa": 1.0, **options})


CALLS = (Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD)


def executes(handle, mode, dtype, layout, operations=CALLS):
    """Whether the handle's backend takes the combination in all of `operations`; what it must is held elsewhere."""
    rank = len(SHAPE)
    return all(capability(handle.backend, o, mode, dtype, layout, rank)[0] for o in operations)


def blends(handle, dtype):
    """Whether beta other than 0 is taken: not for bfloat16 by MIOpen, whose miopenOpTensor does not compile for it."""
    return not (handle.backend == "miopen" and dtype == DataType.BFLOAT16)


class Place:
    """The device of a handle, and arrays on it."""

    def __init__(self, handle):
        self.handle = handle
        self.device = devices.device_for(handle.library.device_type, handle.device or 0)
        if self.device.stream:
            handle.set_stream(self.device.stream)

    def put(self, array, strides=None):
        """A copy on the device; `strides` in elements."""
        source = np.ascontiguousarray(array)
        if strides is not None:
            memory = np.empty(_arguments.span(array.shape, strides), array.dtype)
            source = np.ndarray(array.shape, array.dtype, memory, strides=[s * array.itemsize for s in strides])
            source[...] = array
        return self.device.from_numpy(source)

    def get(self, buffer):
        return self.device.to_numpy(buffer)

    def workspace(self, problem, layer=None, **options):
        """(address, bytes) for a call on packed data, or None; of the layer's, where given; the owner is kept here."""
        described = self.put(np.empty(problem.dims, np.float32), problem.strides)._replace(dtype=problem.dtype)
        size = (layer or self.handle).workspace_size(
            problem.operation,
            self.handle.descriptor(described),
            **(calls.workspace_options(problem) | options),
        )
        if not size:
            return None
        self.kept = self.device.empty_bytes(size)
        return self.kept.pointer, self.kept.nbytes


def stored_roundoff(handle, dtype):
    """How far a value may move when it is stored: half a unit in the last place, but for MIOpen's bfloat16.

    MIOpen 3.4's kernels cut the lower bits off (seen of all of 360 values), which moves a value by up to a whole unit.
    """
    truncates = handle.backend == "miopen" and dtype == DataType.BFLOAT16
    return bounds.precision(dtype).u_out * (2 if truncates else 1)


def hold(handle, problem, inputs, outputs, parameter_dtypes=None):
    """Every output of the problem is within its stable bound; returns the worst error / bound.

    `parameter_dtypes` names the dtypes of parameter outputs that are not of the derived dtype.
    """
    assert not bounds.untrusted(problem, inputs)
    expected = bounds.expect(problem, inputs)
    assert set(outputs) == set(expected.outputs)
    own = expected.precision._replace(u_out=stored_roundoff(handle, problem.dtype))
    worst = 0.0
    for name, got in outputs.items():
        expected.precision = own
        if parameter_dtypes and name in parameter_dtypes:
            p = bounds.precision(parameter_dtypes[name])
            u = stored_roundoff(handle, parameter_dtypes[name])
            expected.precision = own._replace(u_param=u, tiny_param=p.tiny_out, max_param=p.max_out)
        verdict = bounds.judge(expected, name, got)
        assert verdict.status == Status.PASS, f"{problem} {name}: {verdict}"
        worst = max(worst, verdict.ratio)
    return worst
