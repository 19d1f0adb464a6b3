"""y written over x, and dx over dy: right where `Capability.IN_PLACE` is set, else refused before a call is made."""

import numpy as np
import pytest
from place import device_of

import pybnorm
from pybnorm import Capability, DataType, Layout, Mode, Operation, _arguments

OPERATIONS = [Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD]
NUMPY = {DataType.FLOAT32: np.float32, DataType.FLOAT16: np.float16}


class Case:
    """Arrays of a call of `Handle`, made anew each time."""

    def __init__(self, handle, operation, mode=Mode.SPATIAL, dtype=DataType.FLOAT32, dims=(4, 3, 5, 6), last=False):
        self.handle, self.operation, self.mode, self.dtype, self.dims = handle, operation, mode, dtype, dims
        self.device = device_of(handle)
        self.last = last
        backward = operation == Operation.BACKWARD
        self.source, self.target = ("dy", "dx") if backward else ("x", "y")
        self.vectors = {
            Operation.FORWARD_TRAINING: "scale bias running_mean running_variance saved_mean saved_inv_variance",
            Operation.FORWARD_INFERENCE: "scale bias running_mean running_variance",
            Operation.BACKWARD: "scale dscale dbias saved_mean saved_inv_variance",
        }[operation].split()

    @property
    def layout(self):
        return Layout.CHANNELS_LAST if self.last else Layout.CHANNELS_FIRST

    @property
    def bits(self):
        rank = len(self.dims)
        return pybnorm.capability(self.handle.backend, self.operation, self.mode, self.dtype, self.layout, rank)[0]

    def arrays(self):
        rng = np.random.default_rng(5)
        made = {}
        for name in ("x", "dy") if self.operation == Operation.BACKWARD else ("x",):
            values = rng.standard_normal(self.dims).astype(NUMPY[self.dtype])
            if self.last:
                values = np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)
            made[name] = self.device.from_numpy(values)
        derived = _arguments.derived_dims(self.dims, self.mode)
        for name in self.vectors:
            made[name] = self.device.from_numpy(rng.uniform(0.5, 2, derived).astype(np.float32))
        return made

    def run(self, over, algorithm=None, arrays=None, **options):
        """All that the call has written, by name; `over`: in place."""
        arrays = arrays or self.arrays()
        given = arrays[self.source]
        arrays[self.target] = given if over else given._replace(**self.empty(given))
        like = {name: arrays[name] for name in ("x", "dy", "dx", "y") if name in arrays}
        flags = {} if self.operation == Operation.FORWARD_INFERENCE else {"saved": True}
        plan = getattr(self.handle, f"plan_{self.operation.name.lower()}")(
            **like, **flags, mode=self.mode, algorithm=algorithm, **options
        )
        memory = self.device.empty_bytes(plan.workspace_size) if plan.workspace_size else None
        plan(**arrays, workspace=memory)
        self.device.synchronize()
        return {name: self.device.to_numpy(array) for name, array in arrays.items() if name not in ("x", self.source)}

    def empty(self, like):
        self.other = self.device.from_numpy(self.device.to_numpy(like) * 0 + 7)  # lives as long as this
        return {"pointer": self.other.pointer, "owner": self.other.owner}


def same(case, **options):
    apart = case.run(False, **options)
    for _ in range(2):  # the second call knows from the first that it may
        over = case.run(True, **options)
        for name, value in apart.items():
            tolerance = 1e-5 if value.dtype == np.float32 else 2e-3
            np.testing.assert_allclose(over[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", list(NUMPY), ids=lambda d: d.short)
@pytest.mark.parametrize("mode", [Mode.SPATIAL, Mode.PER_ACTIVATION], ids=lambda m: m.name.lower())
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name.lower())
def test_what_is_written_over_its_input_is_as_apart_or_refused(handle, operation, mode, dtype, last):
    case = Case(handle, operation, mode, dtype, last=last)
    if not case.bits:
        pytest.skip(f"{handle.backend} has no such call")
    call = pybnorm.defects.Call(operation, mode, dtype, case.dims, case.layout, inplace=True)
    refused = [d.id for d in pybnorm.known_defects(handle.backend, call, handle.library.version) if d.refused]
    if refused:
        with pytest.raises(
            pybnorm.UnsupportedError, match=f"{case.target} may not be {case.source} here: .*{refused[0]}"
        ):
            case.run(True)
        return
    if Capability.IN_PLACE in case.bits:
        same(case)
        return
    arrays = case.arrays()
    before = case.device.to_numpy(arrays[case.source]).copy()
    with pytest.raises(pybnorm.ArgumentError, match=f"memory that overlaps {case.source}"):
        case.run(True, arrays=arrays)
    assert case.device.to_numpy(arrays[case.source]).tobytes() == before.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name.lower())
def test_only_the_whole_input_and_without_a_prior(handle, operation):
    case = Case(handle, operation)
    with pytest.raises(pybnorm.ArgumentError, match=f"memory that overlaps {case.source}"):
        case.run(True, beta=0.5)
    arrays = case.arrays()
    given = arrays[case.source]
    arrays[case.target] = given._replace(pointer=given.pointer + 4)
    with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
        getattr(handle, operation.name.lower())(**arrays)
    if operation == Operation.BACKWARD:
        with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
            handle.backward(**arrays | {"dx": arrays["x"]})


# ---------------------------------------------------------------- MIOpen


@pytest.fixture
def miopen(need_device):
    need_device("miopen")
    with pybnorm.Handle("miopen", known_defects="ignore") as handle:
        yield handle


def test_a_kernel_that_keeps_sums_in_its_output_is_refused_by_name(miopen):
    case = Case(miopen, Operation.FORWARD_TRAINING, dims=(769, 2, 1, 160))
    arrays = case.arrays()
    before = {name: case.device.to_numpy(array).tobytes() for name, array in arrays.items()}
    for _ in range(2):
        with pytest.raises(pybnorm.UnsupportedError, match="y may not be x here: known defect miopen-in-place"):
            case.run(True, arrays=arrays)
    arrays.pop("y")
    assert {name: case.device.to_numpy(array).tobytes() for name, array in arrays.items()} == before
    case.run(False)
    same(Case(miopen, Operation.FORWARD_INFERENCE, dims=(769, 2, 1, 160)))
