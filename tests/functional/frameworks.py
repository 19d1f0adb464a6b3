"""How tests put NumPy's values into arrays of a framework, in their memory order, and back."""

import contextlib
import ctypes
import os

import ml_dtypes
import numpy as np
from c_table import STREAM, fill_view, managed_tensor, new_capsule, table_of

from pybnorm import devices, load
from pybnorm.enums import DataType

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where it is tested; on a GPU it would take most of the memory at once

NUMPY = {
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


class Framework:
    """NumPy; the others differ in what they override."""

    name = "numpy"
    mutable = True

    def __init__(self, package, backend):
        self.package, self.backend, self.gpu = package, backend, backend != "onednn"

    @staticmethod
    def absent(package, backend):
        """Why the framework is no use for the backend here, or an empty text."""
        return ""

    def put(self, array):
        return array.copy(order="K")

    def get(self, array):
        return array

    def strides(self, array):
        """In elements."""
        return tuple(s // array.itemsize for s in array.strides)

    def is_mine(self, array):
        return isinstance(array, np.ndarray)

    def synchronize(self):
        pass

    def stream(self):
        """A new stream and its address."""
        made = self.package.cuda.Stream()
        return made, made.ptr

    def on_stream(self, stream):
        """The stream as the framework's current one."""
        return stream


class Torch(Framework):
    name = "torch"

    @staticmethod
    def absent(package, backend):
        if backend == "onednn":
            return ""
        if not package.cuda.is_available():
            return "this PyTorch has no GPU"
        return "" if bool(getattr(package.version, "hip", None)) == (backend == "miopen") else "a PyTorch of the other"

    def put(self, array):
        torch = self.package
        wide = array.dtype == NUMPY[DataType.BFLOAT16]
        tensor = torch.from_dlpack(np.array(array.view(np.int16) if wide else array, order="K"))
        tensor = tensor.view(torch.bfloat16) if wide else tensor
        return tensor.to("cuda" if self.gpu else "cpu").clone()

    def get(self, array):
        torch = self.package
        tensor = array.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return np.from_dlpack(tensor.view(torch.int16)).view(NUMPY[DataType.BFLOAT16])
        return np.from_dlpack(tensor)

    def strides(self, array):
        return tuple(array.stride())

    def is_mine(self, array):
        return self.package.is_tensor(array)

    def synchronize(self):
        if self.gpu:
            self.package.cuda.synchronize()

    def stream(self):
        made = self.package.cuda.Stream()
        return made, made.cuda_stream

    def on_stream(self, stream):
        return self.package.cuda.stream(stream)


class Cupy(Framework):
    name = "cupy"

    @staticmethod
    def absent(package, backend):
        try:
            count = package.cuda.runtime.getDeviceCount()
        except Exception as error:
            return str(error)
        if not count:
            return "no GPU"
        return "" if bool(package.cuda.runtime.is_hip) == (backend == "miopen") else "a CuPy of the other"

    def put(self, array):
        flat = self.package.asarray(np.array(array, order="K").ravel(order="K").view(np.uint8))
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        dense = flat.view(array.dtype).reshape([array.shape[axis] for axis in order])
        return dense.transpose([order.index(axis) for axis in range(array.ndim)])

    def get(self, array):
        return self.package.asnumpy(array)

    def is_mine(self, array):
        return isinstance(array, self.package.ndarray)

    def synchronize(self):
        self.package.cuda.Device().synchronize()


class Jax(Framework):
    name = "jax"
    mutable = False

    def __init__(self, package, backend):
        super().__init__(package, backend)
        package.config.update("jax_enable_x64", True)  # or it makes float32 of float64

    def put(self, array):
        return self.package.numpy.asarray(np.ascontiguousarray(array))

    def get(self, array):
        return np.asarray(array)

    def strides(self, array):
        return tuple(s // array.dtype.itemsize for s in np.asarray(array).strides)

    def is_mine(self, array):
        return isinstance(array, self.package.Array)


class Exchange:
    """An array that speaks DLPack, its C table and the array API's namespace, as PyTorch's do, and is no framework's.

    For devices that the frameworks which can be had here do not see.
    """

    current = None
    """The device whose stream is the current one."""

    def __init__(self, maker, buffer):
        self.maker, self.buffer = maker, buffer
        code = 4 if buffer.dtype == DataType.BFLOAT16 else 2
        self.address, self.steps, self.dtype = buffer.pointer, buffer.strides, (code, 8 * buffer.dtype.itemsize, 1)
        self.shape, self.device = buffer.dims, (buffer.device_type, buffer.device_id)

    @STREAM
    def _stream(device_type, device_id, out):
        out[0] = Exchange.current.stream
        return 0

    table, __dlpack_c_exchange_api__ = table_of(fill_view, _stream)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **ignored):
        self.managed = managed_tensor(self)
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __array_namespace__(self, *, api_version=None):
        return Exchange

    @staticmethod
    def empty_like(array):
        """Of NaN."""
        return Exchange(array.maker, array.maker.from_numpy(np.full_like(array.maker.to_numpy(array.buffer), np.nan)))

    def __getitem__(self, part):
        start, stop, _ = part.indices(self.shape[0])
        pointer = self.address + start * self.buffer.dtype.itemsize
        return Exchange(self.maker, self.buffer._replace(pointer=pointer, dims=(stop - start,)))

    def reshape(self, *shape):
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return Exchange(self.maker, self.buffer._replace(dims=shape, strides=strides))


class Dlpack(Framework):
    name = "dlpack"

    def __init__(self, package, backend):
        super().__init__(package, backend)
        self.kind = load(backend).device_type
        self.devices = [devices.device_for(self.kind)]
        Exchange.current = self.devices[0]

    def put(self, array):
        return Exchange(self.devices[0], self.devices[0].from_numpy(array))

    def get(self, array):
        return array.maker.to_numpy(array.buffer)

    def strides(self, array):
        return array.steps

    def is_mine(self, array):
        return isinstance(array, Exchange)

    def synchronize(self):
        for device in self.devices:
            device.synchronize()

    def stream(self):
        self.devices.append(devices.device_for(self.kind))
        return self.devices[-1], self.devices[-1].stream

    @contextlib.contextmanager
    def on_stream(self, stream):
        Exchange.current = stream
        yield
        Exchange.current = self.devices[0]


FRAMEWORKS = {kind.name: kind for kind in (Framework, Torch, Cupy, Jax, Dlpack)}
