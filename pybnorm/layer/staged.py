"""The life of a layer: its statistics in the memory of a device, from `stage` to `close`."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, defects, devices
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import Handle, TensorDescriptor, derive_bn_tensor_descriptor
from pybnorm._words import OperationWord
from pybnorm.devices import Device
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError
from pybnorm.layer.info import PROPAGATE_NAN, STATISTICS, BiasScaleProperties, Info

_Self = TypeVar("_Self", bound="StagedLayer")


class StagedLayer:
    """A layer without its calls: its statistics and their properties."""

    def __init__(
        self,
        handle: Handle,
        mode: object,
        *,
        epsilon: float = 1e-5,
        exponential_average_factor: float = 0.1,
        initial_running_variance: float = 1.0,
        device: Device | None = None,
    ) -> None:
        _arguments.instance(handle, Handle, "handle", "a Handle")
        if handle.closed:
            raise ClosedError("handle")
        self._handle = handle
        self._mode = _arguments.mode(mode)
        self._epsilon = _arguments.epsilon(epsilon)
        self._factor = _arguments.factor(exponential_average_factor)
        self._initial_running_variance = _not_negative(initial_running_variance, "initial_running_variance")
        if device is not None and not all(hasattr(type(device), n) for n in ("device_type", "from_numpy", "stream")):
            raise ArgumentTypeError("device", device, "a device of pybnorm.devices")
        self._device = device
        library = handle.library
        # The vendor's entry point, unless that has defects: another algorithm may have none.
        self._algorithm = "auto" if defects._of_library(library) else None
        self._derived: TensorDescriptor | None = None
        self._state: dict[str, Any] = {}  # Buffer by name
        self._has_saved = False
        self._closed = False

    def stage(self, x: Any) -> None:
        """Derive the shape of the statistics from x, allocate them, and write their initial values.

        Parameters
        ----------
        x : array or TensorDescriptor
            Later calls may differ from it in N. The array's memory is not read.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A bad x, or the layer is staged already.
        UnsupportedError
            The backend has no such mode or dtype.

        Notes
        -----
        Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`. Statistics start at 0, the running variance at
        `initial_running_variance`. Waits until they are copied.
        """
        if self._closed:
            raise ClosedError("layer")
        if self._derived is not None:
            raise ArgumentError("layer", "a layer that is staged already", "stage once; close it and make another one")
        if issubclass(type(x), TensorDescriptor):
            if x.backend != self._handle.backend:
                raise ArgumentError("x", f"a descriptor of backend {x.backend}", f"one of {self._handle.backend}")
            x_desc = x
        else:
            x_desc = self._handle.descriptor(x, "x")
        derived = derive_bn_tensor_descriptor(x_desc, self._mode)
        zeros = np.zeros(derived.dims, np.dtype(derived.dtype.name.lower()))
        variance = np.full_like(zeros, self._initial_running_variance)
        self._allocate(derived, dict.fromkeys(STATISTICS, zeros) | {"running_variance": variance})

    def _allocate(self, derived: TensorDescriptor, values: dict[str, npt.NDArray[Any]]) -> None:
        device = self._device
        library = self._handle.library
        if device is None:
            if library.device_type != CPU:
                raise ArgumentError(
                    "device",
                    None,
                    f"a device of pybnorm.devices for backend {self._handle.backend}, on whose stream the handle works",
                )
            device = devices.device_for(library.device_type)
        if device.device_type != library.device_type:
            raise ArgumentError(
                "device",
                f"a device of type {device.device_type} ({device.name})",
                f"type {library.device_type}, where backend {self._handle.backend} computes",
            )
        self._ordered(device)
        self._state = {name: device.from_numpy(values[name]) for name in STATISTICS}
        self._device, self._derived = device, derived

    def _ordered(self, device: Device) -> None:
        """Check that the device and the handle use one stream, which orders copies and calls."""
        if device.stream and device.stream != self._handle.stream:
            raise ArgumentError(
                "device",
                f"a device whose stream is {device.stream:#x}",
                f"the handle's stream, {self._handle.stream:#x}: use handle.set_stream(device.stream)",
            )

    # ------------------------------------------------------------ properties

    @property
    def handle(self) -> Handle:
        """The handle, borrowed."""
        return self._handle

    @property
    def mode(self) -> Mode:
        """The mode the layer was made with."""
        return self._mode

    @property
    def staged(self) -> bool:
        """True once the layer has statistics, from `stage` or `restore`."""
        return self._derived is not None

    @property
    def closed(self) -> bool:
        """True where `close` has been called."""
        return self._closed

    @property
    def running_mean(self) -> Buffer:
        """The running mean in the device's memory, owned by the layer; shape and dtype of `bias_scale_properties`."""
        return self._statistic("running_mean")

    @property
    def running_variance(self) -> Buffer:
        """The running variance, like `running_mean`."""
        return self._statistic("running_variance")

    @property
    def saved_mean(self) -> Buffer:
        """The mean of the last forward training's batch, like `running_mean`."""
        return self._statistic("saved_mean")

    @property
    def saved_inv_variance(self) -> Buffer:
        """The inverse standard deviation of the last forward training's batch, like `running_mean`."""
        return self._statistic("saved_inv_variance")

    def _statistic(self, name: str) -> Buffer:
        self._need_staged()
        buffer: Buffer = self._state[name]
        return buffer

    def bias_scale_properties(self) -> BiasScaleProperties:
        """Layout, data type and shape of scale and bias (gocudnn's ``BiasScaleProperties``).

        Returns
        -------
        BiasScaleProperties
            format, data_type and dims of the derived descriptor.

        Raises
        ------
        ArgumentError
            Not staged.
        """
        derived = self._need_staged()
        return BiasScaleProperties(derived.layout, derived.dtype, derived.dims)

    def workspace_size(
        self, operation: Operation | int | OperationWord, x_desc: TensorDescriptor, **options: Any
    ) -> int:
        """Bytes of workspace that a call of the layer needs, also where native computes it.

        Parameters
        ----------
        operation : Operation
            One of the three batch-norm calls.
        x_desc : TensorDescriptor
        options
            As in `Handle.workspace_size`; mode, epsilon and algorithm are the layer's by default.

        Returns
        -------
        int
            0 where the call needs none. On the CPU the handle lends its own.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A bad argument, or not staged.
        UnsupportedError
            The backend has no right path for the call.

        Examples
        --------
        >>> x = np.ones((2, 3, 4, 5), np.float32)
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.spatial(handle) as layer:
        ...     layer.stage(x)
        ...     layer.workspace_size("backward", handle.descriptor(x))
        0
        """
        self._need_staged()
        own = {"mode": self._mode, "epsilon": self._epsilon, "algorithm": self._algorithm}
        return self._handle.workspace_size(operation, x_desc, **(own | options))

    def info(self) -> Info:
        """The whole state, copied to the host after all earlier calls have ended.

        Returns
        -------
        Info

        Raises
        ------
        ArgumentError
            Not staged; or the handle has been given another stream than the layer's device has.
        """
        derived = self._need_staged()
        device = self._device
        assert device is not None
        self._ordered(device)
        return Info(
            mode=self._mode,
            format=derived.layout,
            data_type=derived.dtype,
            nan_policy=PROPAGATE_NAN,
            dims=derived.dims,
            strides=derived.strides,
            epsilon=self._epsilon,
            exponential_average_factor=self._factor,
            **{name: device.to_numpy(self._state[name]) for name in STATISTICS},
        )

    def _need_staged(self) -> TensorDescriptor:
        if self._closed:
            raise ClosedError("layer")
        if self._derived is None:
            raise ArgumentError("layer", "a layer that is not staged", "stage(x) first")
        return self._derived

    def _data(self, x: Any) -> Buffer:
        """Check that x fits the layer's statistics; the handle's own error would name a statistic."""
        derived = self._need_staged()
        buffer = self._handle.buffer(x, "x")
        dims = _arguments.derived_dims(_arguments.dims(buffer.dims, "x"), self._mode)
        if dims != derived.dims:
            raise ArgumentError(
                "x", f"dims {buffer.dims}", f"dims of which {derived.dims} is derived, as staged in {self._mode.name}"
            )
        if _arguments.derived_data_type(buffer.dtype) != derived.dtype:
            raise ArgumentTypeError(
                "x", f"dtype {buffer.dtype.short}", f"one with {derived.dtype.short} statistics, as staged"
            )
        return buffer

    def close(self) -> None:
        """Release the statistics; closing twice does nothing. The handle stays open.

        Their memory is freed when no `Buffer` from the layer is left. On a GPU that happens in the order of the
        device's stream, after the calls that use the memory.
        """
        self._closed = True
        self._state = {}
        self._derived = None

    def __enter__(self: _Self) -> _Self:
        if self._closed:
            raise ClosedError("layer")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<BatchNorm closed>"
        where = "not staged" if self._derived is None else f"dims={self._derived.dims} {self._derived.dtype.short}"
        return f"<BatchNorm {self._mode.name} {self._handle.backend} {where}>"


def _not_negative(value: object, argument: str) -> float:
    number = _arguments.scalar(value, argument, DataType.FLOAT32)
    if number < 0:
        raise ArgumentError(argument, value, "a finite number >= 0 that float32 can hold")
    return number
