"""Calls with addresses of little alignment, in a process that may lose its CUDA context.

    python3 alignment_worker.py BACKEND OPERATION ALGORITHM

One line for each layout, dtype and offset: what is tried, then ``refused`` or ``right``. Ends with 1 at the
first wrong result.
"""

import sys

import numpy as np

import pybnorm
from pybnorm import devices

DIMS, SHAPE = (4, 64, 6, 5), (1, 64, 1, 1)
STRIDES = {"nchw": (1920, 30, 5, 1), "nhwc": (1920, 1, 320, 64)}
DTYPES = {"f32": np.float32, "f16": np.float16}
OFFSETS = ((0, 0), (0, 4), (0, 8), (8, 0), (4, 0), (2, 0))  # bytes of the data and of the parameters


class Memory:
    """Arrays on the device, each at an offset from an aligned block."""

    def __init__(self, device, dtype, layout, data_offset, param_offset):
        self.device, self.dtype, self.strides = device, np.dtype(DTYPES[dtype]), STRIDES[layout]
        self.offsets, self.kept = (data_offset, param_offset), []

    def place(self, values, dtype, strides, offset):
        block = np.zeros(values.size + 64 // dtype.itemsize, dtype)
        self.view(block, values.shape, strides, offset)[...] = values
        buffer = self.device.from_numpy(block)
        assert buffer.pointer % 64 == 0
        self.kept.append(buffer)
        return buffer._replace(pointer=buffer.pointer + offset, dims=values.shape, strides=strides)

    @staticmethod
    def view(block, dims, strides, offset):
        item = block.itemsize
        return np.lib.stride_tricks.as_strided(block[offset // item :], dims, [s * item for s in strides])

    def data(self, values):
        return self.place(values, self.dtype, self.strides, self.offsets[0])

    def vector(self, values):
        return self.place(np.asarray(values, np.float32), np.dtype(np.float32), (1,), self.offsets[1])

    def read(self, buffer):
        (block,) = [k for k in self.kept if k.pointer + self.offsets[0] == buffer.pointer]
        return self.view(self.device.to_numpy(block), DIMS, self.strides, self.offsets[0]).astype(float)


def attempt(handle, device, operation, algorithm, dtype, layout, offsets):
    memory = Memory(device, dtype, layout, *offsets)
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(DIMS).astype(memory.dtype) for _ in range(2))
    wide, gradient = x.astype(float), dy.astype(float)
    mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    inverse = 1 / np.sqrt(variance + 1e-5)
    right = hat = (wide - mean.reshape(SHAPE)) * inverse.reshape(SHAPE)
    ones, zeros, nothing = np.ones(64), np.zeros(64), np.full(DIMS, np.nan)
    given = {"x": memory.data(x), "scale": memory.vector(ones)}
    if operation == "backward":
        given |= {"dy": memory.data(dy), "dx": memory.data(nothing)}
        vectors = {"dscale": zeros, "dbias": zeros, "saved_mean": mean, "saved_inv_variance": inverse}
        sums = [v.mean((0, 2, 3), keepdims=True) for v in (gradient, gradient * hat)]
        right = inverse.reshape(SHAPE) * (gradient - sums[0] - hat * sums[1])
        make, tensors, out = handle.plan_backward, ("x", "dy", "dx"), "dx"
    else:
        given["y"] = memory.data(nothing)
        vectors = {"bias": zeros, "running_mean": mean, "running_variance": variance}
        make, tensors, out = handle.plan_forward_inference, ("x", "y"), "y"
        if operation == "train":
            vectors |= {"saved_mean": ones, "saved_inv_variance": ones}
            make = handle.plan_forward_training
    given |= {name: memory.vector(values) for name, values in vectors.items()}
    try:
        plan = make(*(given[name] for name in tensors), algorithm=algorithm)
        space = device.empty_bytes(plan.workspace_size) if plan.workspace_size else None
        plan(**given, workspace=(space.pointer, space.nbytes) if space else None)
    except pybnorm.ContextLostError:
        raise
    except pybnorm.PybnormError as error:
        device.synchronize()
        return f"refused: {getattr(error, 'text', error)}"
    device.synchronize()
    worst = float(np.abs(memory.read(given[out]) - right).max())
    return f"{'right' if worst < (1e-4 if dtype == 'f32' else 1e-2) else 'WRONG'}: {plan.algorithm}, error {worst:.1e}"


CASES = [
    (layout, dtype, offsets)
    for layout in STRIDES
    for dtype, kind in DTYPES.items()
    for offsets in OFFSETS
    if offsets[0] % np.dtype(kind).itemsize == 0
]


def main(backend, operation, algorithm):
    device = devices.device_for(pybnorm.load(backend).device_type, 0)
    with pybnorm.Handle(backend, stream=device.stream or None) as handle:
        for layout, dtype, offsets in CASES:
            print(f"{layout}, {dtype}, data +{offsets[0]}, parameters +{offsets[1]}:", end=" ", flush=True)
            found = attempt(handle, device, operation, algorithm, dtype, layout, offsets)
            print(found.partition("\n")[0], flush=True)
            if found.startswith("WRONG"):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
