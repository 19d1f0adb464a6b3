"""A batch-norm layer that keeps its statistics, modelled on gocudnn's ``batchnorm`` package, for every backend.

Make a layer, stage it with the first x, then call forward training, inference and backward. `BatchNorm.info` returns
the whole state as plain data, which can be stored as JSON. `BatchNorm.restore` makes a layer from it, on any backend
and machine.

Differences from gocudnn:

* The running variance starts at 1, so that inference before training leaves x unchanged but for epsilon. gocudnn's
  buffers are zero-filled, which divides by sqrt(epsilon): ``initial_running_variance=0.0`` gives that. The running mean
  starts at 0 in both.
* A call before `stage` raises an error that says "not staged"; gocudnn dereferences nil. Backward needs a forward
  training first; gocudnn's zero-filled saved statistics give dx = 0. Staging twice is refused, because it would discard
  trained statistics.
* `Info` can be restored and has every field filled. gocudnn declares epsilon, factor and NaN policy and leaves them
  empty. The factor is a float; gocudnn's is an unsigned integer. `Info.from_gocudnn_json` and `Info.to_gocudnn_json`
  read and write gocudnn's own JSON.
* y = alpha * result + beta * y, as in the library; a comment in gocudnn swaps the two. Backward uses the statistics
  that the last forward training saved.
* All dtypes of the backend, bfloat16 too.
* A call that has a known defect is made of others that are correct: `BatchNorm.workspace_size` says what it then needs.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import __version__, _arguments, defects, devices
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import Handle, TensorDescriptor, derive_bn_tensor_descriptor
from pybnorm._words import OperationWord
from pybnorm.devices import Device
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError

__all__ = ["BatchNorm", "BiasScaleProperties", "Info"]

PROPAGATE_NAN = "propagate"
STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
_JSON_KIND = "pybnorm.layer.Info"
_JSON_VERSION = 2


class BiasScaleProperties(NamedTuple):
    """Layout, data type and shape that scale and bias must have."""

    format: Layout
    """Channels first, whatever the layout of x."""
    data_type: DataType
    """float64 for float64 x, else float32."""
    dims: tuple[int, ...]
    """The derived shape."""


@dataclasses.dataclass(frozen=True, eq=False)
class Info:
    """The whole state of a layer, in host memory.

    Two are equal if all fields are equal, statistics bit by bit. Values are checked on construction.

    Attributes
    ----------
    mode : Mode
    format : Layout
        Of the derived descriptor: `Layout.CHANNELS_FIRST`.
    data_type : DataType
        Of scale, bias and statistics: float32 or float64.
    nan_policy : str
        ``"propagate"``: a NaN in x makes the statistics and results of its channel NaN, and of no other. Batch norm
        of every backend does that; cuDNN's ``CUDNN_NOT_PROPAGATE_NAN`` has no effect on it.
    dims, strides : tuple of int
        Of the derived descriptor; strides in elements.
    epsilon : float
        That of the last forward training; before any, that of the layer.
    exponential_average_factor : float
        Likewise.
    running_mean, running_variance, saved_mean, saved_inv_variance : ndarray
        Of `dims` and `data_type`, read-only. `saved_inv_variance` is 1 / sqrt(biased variance + epsilon); the saved
        pair is all 0 before the first forward training.

    Examples
    --------
    >>> from pybnorm.layer import BatchNorm, Info
    >>> with pybnorm.Handle("native") as handle, BatchNorm.spatial(handle) as layer:
    ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
    ...     info = layer.info()
    >>> Info.from_json(info.to_json()) == info
    True
    >>> Info.from_gocudnn_json(info.to_gocudnn_json()).dims
    (1, 3, 1, 1)
    """

    mode: Mode
    format: Layout
    data_type: DataType
    nan_policy: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    epsilon: float
    exponential_average_factor: float
    running_mean: npt.NDArray[Any]
    running_variance: npt.NDArray[Any]
    saved_mean: npt.NDArray[Any]
    saved_inv_variance: npt.NDArray[Any]

    def __post_init__(self) -> None:
        mode, kind = _arguments.mode(self.mode), _arguments.data_type(self.data_type, "data_type")
        if _arguments.layout(self.format, "format") != Layout.CHANNELS_FIRST:
            raise ArgumentError("format", self.format, "'channels_first', which every derived descriptor is")
        if _arguments.derived_data_type(kind) != kind:
            raise ArgumentTypeError("data_type", kind.short, "f32 or f64, which statistics have")
        if not issubclass(type(self.nan_policy), str) or self.nan_policy != PROPAGATE_NAN:
            raise ArgumentError("nan_policy", self.nan_policy, repr(PROPAGATE_NAN))
        dims = _arguments.dims(self.dims)
        if _arguments.derived_dims(dims, mode) != dims:
            raise ArgumentError("dims", dims, f"a derived shape of mode {mode.name}: 1 in every reduced axis")
        strides, packed = _arguments.strides(self.strides, dims), _arguments.packed_strides(dims)
        if strides != packed:
            raise ArgumentError("strides", strides, f"those of packed dims {dims}, {packed}")
        epsilon, factor = _arguments.epsilon(self.epsilon), _arguments.factor(self.exponential_average_factor)
        checked: dict[str, Any] = {"mode": mode, "data_type": kind, "dims": dims, "strides": strides}
        checked |= {"format": Layout.CHANNELS_FIRST, "epsilon": epsilon, "exponential_average_factor": factor}
        dtype = np.dtype(kind.name.lower())
        for name in STATISTICS:
            array = getattr(self, name)
            allowed = f"a NumPy array of {dtype}, as data_type says"
            _arguments.instance(array, np.ndarray, name, allowed)
            array = np.ndarray.view(array, np.ndarray)  # a subclass may override its attributes
            if array.dtype != dtype:
                raise ArgumentTypeError(name, f"an array of {array.dtype}", allowed)
            if array.shape != dims:
                raise ArgumentError(name, f"shape {array.shape}", f"dims, {dims}")
            checked[name] = own = array.copy()
            own.flags.writeable = False
        vars(self).update(checked)  # the class is frozen

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Info):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in values)

    def to_json(self) -> str:
        """The state as JSON text; `from_json` gives an equal `Info`, bit by bit, on any machine.

        Statistics are base64 of their little-endian bytes, in logical order.
        """
        values: dict[str, object] = {"kind": _JSON_KIND, "version": _JSON_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = _encoded(value)
            elif isinstance(value, (Mode, Layout, DataType)):
                value = value.name
            values[field.name] = value
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Info:
        """The state that `to_json` wrote; an error names the field that is missing, unknown or wrong."""
        values = _object(text, f"the JSON of a {_JSON_KIND}")
        if (kind := values.pop("kind", None)) != _JSON_KIND:
            raise ArgumentError("text", f"JSON whose kind is {kind!r}", f"the JSON of a {_JSON_KIND}")
        if (version := values.pop("version", None)) != _JSON_VERSION or type(version) is not int:
            allowed = f"version {_JSON_VERSION}, which pybnorm {__version__} reads; if a later one wrote it, update"
            raise ArgumentError("text", f"version {version!r} of a {_JSON_KIND}", allowed)
        names = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            if name not in values:
                raise ArgumentError(name, "no such field in the JSON", "every field of Info")
        for name in sorted(values.keys() - names):
            raise ArgumentError(name, "a field of the JSON", "the fields of Info only: " + ", ".join(names))
        for name, enumeration in (("mode", Mode), ("format", Layout), ("data_type", DataType)):
            word = values[name]
            if type(word) is not str or word not in enumeration.__members__:
                raise ArgumentError(name, word, "one of " + ", ".join(enumeration.__members__))
            values[name] = enumeration[word]
        kind, dims = _arguments.derived_data_type(values["data_type"]), _arguments.dims(values["dims"])
        return cls(**values | {name: _decoded(name, values[name], kind, dims) for name in STATISTICS})

    def to_gocudnn_json(self) -> str:
        """The state as gocudnn's ``batchnorm.Info`` is written by Go's ``encoding/json``.

        gocudnn's factor is an unsigned integer: one that is not whole is written as 0, gocudnn's own value.
        """
        factor = self.exponential_average_factor
        numbers = (self.epsilon, int(factor) if factor == int(factor) else 0, int(self.mode), 0, int(self.data_type), 1)
        values: dict[str, object] = dict(zip(_GOCUDNN_NUMBERS, numbers, strict=True))
        values |= {"Dims": self.dims, "Stride": self.strides}
        values |= {name: _encoded(getattr(self, field)) for field, name in _GOCUDNN.items()}
        return json.dumps(values)

    @classmethod
    def from_gocudnn_json(cls, text: str | bytes) -> Info:
        """The state that gocudnn's ``batchnorm.Info`` has in JSON.

        Statistics are base64 of little-endian bytes, or lists of numbers, as older versions have them. gocudnn leaves
        epsilon and the factor at 0: they are those of the layer's next calls in gocudnn, and 0 here.
        """
        values = _object(text, "the JSON of gocudnn's Info")
        names = (*_GOCUDNN_NUMBERS, "Dims", "Stride", *_GOCUDNN.values())
        if any(name not in values for name in names):
            raise ArgumentError("text", values, "the JSON of gocudnn's Info, with " + ", ".join(names))
        mode = _numbered(Mode, values["Mode"], "Mode")
        kind = _numbered(DataType, values["DataType"], "DataType")
        if kind not in (DataType.FLOAT32, DataType.FLOAT64):
            raise ArgumentError("DataType", values["DataType"], "0 (float) or 1 (double), which statistics have")
        if values["Format"] != 0:
            raise ArgumentError("Format", values["Format"], "0 (NCHW), which every derived descriptor has")
        dims = _arguments.dims(values["Dims"], "Dims")
        strides = _arguments.strides(values["Stride"], dims, "Stride")
        packed = _arguments.packed_strides(dims)
        if any(d > 1 and s != p for d, s, p in zip(dims, strides, packed, strict=True)):
            raise ArgumentError("Stride", strides, f"those of packed dims {dims}, {packed}")
        arrays = {field: _decoded(name, values[name], kind, dims) for field, name in _GOCUDNN.items()}
        epsilon = _arguments.epsilon(values["Epsilon"])
        factor = _arguments.factor(values["Exponentialfactor"], "Exponentialfactor")
        return cls(mode, Layout.CHANNELS_FIRST, kind, PROPAGATE_NAN, dims, packed, epsilon, factor, **arrays)


_GOCUDNN_NUMBERS = ("Epsilon", "Exponentialfactor", "Mode", "Format", "DataType", "Nan")
_GOCUDNN = dict(zip(STATISTICS, ("RRM", "RRV", "RSM", "RSV"), strict=True))


def _object(text: object, allowed: str) -> dict[str, Any]:
    try:
        values = json.loads(text)  # type: ignore[arg-type]
    except Exception as error:  # also the object's own
        raise ArgumentError("text", f"{type(text).__name__}: {error}", allowed) from None
    if type(values) is not dict:
        raise ArgumentError("text", values, allowed)
    return values


def _numbered(enumeration: Any, value: object, argument: str) -> Any:
    """A member by its number, which cuDNN gives the modes and types that both have."""
    if type(value) is int and value in (members := {int(member): member for member in enumeration}):
        return members[value]
    raise ArgumentError(argument, value, "one of " + ", ".join(f"{int(m)} ({m.name})" for m in enumeration))


def _encoded(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def _decoded(name: str, text: object, kind: DataType, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    count = _arguments.numel(dims)
    nbytes = count * kind.itemsize
    if type(text) is list:
        if len(text) != count or any(type(number) not in (int, float) for number in text):
            raise ArgumentError(name, f"a list of {len(text)}", f"{count} numbers: dims {dims}")
        return np.array(text, np.float64).astype(kind.name.lower()).reshape(dims)
    try:
        if not isinstance(text, str):
            raise ValueError(f"{type(text).__name__}, not text")
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ArgumentError(name, str(error), f"base64 text of {nbytes} bytes") from None
    if len(raw) != nbytes:
        raise ArgumentError(name, f"{len(raw)} bytes", f"{nbytes} bytes: {kind.short} of dims {dims}")
    dtype = np.dtype(kind.name.lower())
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype).reshape(dims)


class BatchNorm:
    """A batch-norm layer with running and saved statistics in the device's memory.

    `per_activation`, `spatial`, `spatial_persistent` and `restore` make layers. A layer owns its four statistics from
    `stage` or `restore` to `close`. It borrows the handle, which must stay open as long as the layer is used. Scale
    and bias belong to the caller. Calls neither allocate nor synchronise; `info`, `stage` and `restore` do both. Use
    a layer from one thread at a time. What is done with calls that have a known defect is the handle's policy;
    `workspace_size` says what they need.

    Examples
    --------
    >>> x, dy = np.float32([[[[1, 2, 3]]]]), np.float32([[[[0, 0, 1]]]])
    >>> y, dx, (dscale, dbias) = np.empty_like(x), np.empty_like(x), np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle, pybnorm.layer.BatchNorm.spatial(handle, epsilon=0) as layer:
    ...     layer.stage(x)
    ...     properties = layer.bias_scale_properties()
    ...     scale = np.ones(properties.dims, np.float32)
    ...     bias = np.zeros(properties.dims, np.float32)
    ...     layer.forward_training(x, scale, bias, y)
    ...     layer.backward(x, dy, scale, dx, dscale, dbias)
    ...     layer.backward_prop(x, dy, scale, dx, dscale, dbias)  # the same, by gocudnn's name
    ...     text = layer.info().to_json()
    >>> layer.close()  # as the end of ``with``
    >>> dx.round(3), dbias
    (array([[[[ 0.204, -0.408,  0.204]]]], dtype=float32), array([1.], dtype=float32))
    """

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
        added = _arguments.epsilon(epsilon)
        self._factor = _arguments.factor(exponential_average_factor)
        variance = _arguments.scalar(initial_running_variance, "initial_running_variance", DataType.FLOAT32)
        if variance < 0:
            allowed = "a finite number >= 0 that float32 can hold"
            raise ArgumentError("initial_running_variance", initial_running_variance, allowed)
        self._initial_running_variance = variance
        if device is not None and not all(hasattr(type(device), n) for n in ("device_type", "from_numpy", "stream")):
            raise ArgumentTypeError("device", device, "a device of pybnorm.devices")
        self._device = device
        # The vendor's entry point, unless that has defects: another algorithm may have none.
        algorithm = "auto" if defects._of_library(handle.library) else None
        self._options: dict[str, Any] = {"mode": self._mode, "algorithm": algorithm, "epsilon": added}
        self._derived: TensorDescriptor | None = None
        self._state: dict[str, Any] = {}  # Buffer by name
        self._has_saved = False
        self._closed = False

    @classmethod
    def per_activation(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A layer with statistics of shape (1, C, spatial...), each over N (gocudnn's ``PreStagePerActivation``).

        Parameters
        ----------
        handle : Handle
            Of any backend; borrowed.
        epsilon, exponential_average_factor : float
            For calls that give none. Default 1e-5 and 0.1.
        initial_running_variance : float
            Initial value of the running variance. Default 1; gocudnn's is 0.
        device : Device, optional
            The device that holds the statistics. Default: the CPU. Required on a GPU. There the handle must use its
            stream (``handle.set_stream(device.stream)``), so that copies come after calls.

        Examples
        --------
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.per_activation(handle) as layer:
        ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
        ...     layer.bias_scale_properties().dims
        (1, 3, 4, 5)
        """
        return cls(handle, Mode.PER_ACTIVATION, **options)

    @classmethod
    def spatial(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A layer with statistics of shape (1, C, 1...), each over N and space (gocudnn's ``PreStageSpatial``).

        Parameters are those of `per_activation`.
        """
        return cls(handle, Mode.SPATIAL, **options)

    @classmethod
    def spatial_persistent(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A `spatial` layer by cuDNN's persistent kernels (gocudnn's ``PreStageSpatialPersistant``).

        Often faster, with a narrower range of values: large finite x may overflow to NaN or infinity. Other backends
        refuse it when staged.

        Examples
        --------
        >>> with pybnorm.Handle("native") as handle:
        ...     pybnorm.layer.BatchNorm.spatial_persistent(handle).mode.name
        'SPATIAL_PERSISTENT'
        """
        return cls(handle, Mode.SPATIAL_PERSISTENT, **options)

    @classmethod
    def restore(cls, handle: Handle, info: Info, *, mode: object = None, device: Device | None = None) -> BatchNorm:
        """A staged layer with the state of another layer, also one of another backend or machine.

        Parameters
        ----------
        handle, device
            As in `per_activation`.
        info : Info
        mode : Mode, optional
            Default: that of `info`. SPATIAL and cuDNN's SPATIAL_PERSISTENT may replace each other: they compute the
            same.

        Examples
        --------
        >>> from pybnorm.layer import BatchNorm, Info
        >>> with pybnorm.Handle("native") as handle, BatchNorm.spatial(handle, epsilon=1e-3) as layer:
        ...     layer.stage(np.ones((2, 3, 4, 5), np.float32))
        ...     text = layer.info().to_json()
        >>> with pybnorm.Handle("onednn") as handle, BatchNorm.restore(handle, Info.from_json(text)) as layer:
        ...     layer.info().epsilon
        0.001
        """
        _arguments.instance(info, Info, "info", "an Info")
        chosen = info.mode if mode is None else _arguments.mode(mode)
        if (chosen == Mode.PER_ACTIVATION) != (info.mode == Mode.PER_ACTIVATION):
            raise ArgumentError("mode", chosen, f"a mode of the same mathematics as that of info, {info.mode.name}")
        options = {"epsilon": info.epsilon, "exponential_average_factor": info.exponential_average_factor}
        layer = cls(handle, chosen, device=device, **options)
        # Deriving from the derived shape gives it back, and applies the backend's rules for mode and dtype.
        derived = derive_bn_tensor_descriptor(TensorDescriptor(handle.backend, info.data_type, info.dims), chosen)
        layer._allocate(derived, {name: getattr(info, name) for name in STATISTICS})
        # An inverse standard deviation is 0 only for an infinite variance: all zeros mean that nothing was saved.
        layer._has_saved = bool(np.any(info.saved_inv_variance != 0))
        return layer

    def stage(self, x: Any) -> None:
        """Derive the shape of the statistics from x, allocate them, and write their initial values.

        Parameters
        ----------
        x : array or TensorDescriptor
            Later calls may differ from it in N. The array's memory is not read.

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
        device, library, backend = self._device, self._handle.library, self._handle.backend
        if device is None and library.device_type != CPU:
            allowed = f"a device of pybnorm.devices for backend {backend}, on whose stream the handle works"
            raise ArgumentError("device", None, allowed)
        device = devices.device_for(library.device_type) if device is None else device
        if device.device_type != library.device_type:
            given = f"a device of type {device.device_type} ({device.name})"
            raise ArgumentError("device", given, f"type {library.device_type}, where backend {backend} computes")
        self._ordered(device)
        self._state = {name: device.from_numpy(values[name]) for name in STATISTICS}
        self._device, self._derived = device, derived

    def _ordered(self, device: Device) -> None:
        """Check that the device and the handle use one stream, which orders copies and calls."""
        if device.stream and device.stream != self._handle.stream:
            allowed = f"the handle's stream, {self._handle.stream:#x}: use handle.set_stream(device.stream)"
            raise ArgumentError("device", f"a device whose stream is {device.stream:#x}", allowed)

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
        """Layout, data type and shape of scale and bias (gocudnn's ``BiasScaleProperties``)."""
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

        Examples
        --------
        >>> x = np.ones((2, 3, 4, 5), np.float32)
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.spatial(handle) as layer:
        ...     layer.stage(x)
        ...     layer.workspace_size("backward", handle.descriptor(x))
        0
        """
        self._need_staged()
        return self._handle.workspace_size(operation, x_desc, **self._options | options)

    def info(self) -> Info:
        """The whole state, copied to the host after all earlier calls have ended."""
        derived = self._need_staged()
        device = self._device
        assert device is not None
        self._ordered(device)
        described = derived.layout, derived.dtype, PROPAGATE_NAN, derived.dims, derived.strides
        arrays = [device.to_numpy(self._state[name]) for name in STATISTICS]
        return Info(self._mode, *described, self._options["epsilon"], self._factor, *arrays)

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
            allowed = f"dims of which {derived.dims} is derived, as staged in {self._mode.name}"
            raise ArgumentError("x", f"dims {buffer.dims}", allowed)
        if _arguments.derived_data_type(buffer.dtype) != derived.dtype:
            allowed = f"one with {derived.dtype.short} statistics, as staged"
            raise ArgumentTypeError("x", f"dtype {buffer.dtype.short}", allowed)
        return buffer

    def _own(self, epsilon: float | None, **own: Any) -> dict[str, Any]:
        """The options of a call: the layer's, and its own."""
        return self._options | own | ({} if epsilon is None else {"epsilon": epsilon})

    # ------------------------------------------------------------ calls

    def forward_training(
        self, x: Any, scale: Any, bias: Any, y: Any, *, exponential_average_factor: float | None = None,
        epsilon: float | None = None, alpha: float = 1.0, beta: float = 0.0, unbiased: bool = True,
        workspace: Any = None,
    ) -> None:  # fmt: skip
        """Normalize by the statistics of the batch; update the running statistics and save the batch's for `backward`.

        Parameters
        ----------
        x, y : array, shape (N, C, spatial...)
            At least two elements per statistic.
        scale, bias : array
            As `bias_scale_properties` says.
        exponential_average_factor, epsilon : float, optional
            Default: the layer's. A value given becomes the layer's, and part of `info`.
            `pybnorm.miopen.cumulative_average_factor` makes the running statistics a plain average.
        alpha, beta, unbiased, workspace
            As in `Handle.forward_training`.
        """
        data = self._data(x)
        given = exponential_average_factor
        factor = self._factor if given is None else _arguments.factor(given)
        own = self._own(epsilon, exponential_average_factor=factor, alpha=alpha, beta=beta, unbiased=unbiased)
        own["epsilon"] = _arguments.epsilon(own["epsilon"])
        self._handle.forward_training(data, scale, bias, y, **self._state, **own, workspace=workspace)
        self._options["epsilon"], self._factor, self._has_saved = own["epsilon"], factor, True

    def forward_inference(
        self, x: Any, scale: Any, bias: Any, y: Any, *, epsilon: float | None = None, alpha: float = 1.0,
        beta: float = 0.0, workspace: Any = None,
    ) -> None:  # fmt: skip
        """Normalize by the running statistics.

        Parameters
        ----------
        x, scale, bias, y
            As in `forward_training`.
        epsilon : float, optional
            For this call. Default: the layer's, that of the last forward training.
        alpha, beta, workspace
            As in `Handle.forward_inference`.

        Examples
        --------
        >>> x, y = np.float32([[[[1, 2, 3, 4]]]]), np.empty((1, 1, 1, 4), np.float32)
        >>> scale, bias = np.ones((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
        >>> with pybnorm.Handle("native") as handle, pybnorm.layer.BatchNorm.spatial(handle, epsilon=0) as layer:
        ...     layer.stage(x)
        ...     layer.forward_inference(x, scale, bias, y)
        >>> y  # the running statistics begin as 0 and 1
        array([[[[1., 2., 3., 4.]]]], dtype=float32)
        """
        data = self._data(x)
        mean, variance = self._state["running_mean"], self._state["running_variance"]
        own = self._own(epsilon, alpha=alpha, beta=beta, workspace=workspace)
        self._handle.forward_inference(data, scale, bias, mean, variance, y, **own)

    def backward(
        self, x: Any, dy: Any, scale: Any, dx: Any, dscale: Any, dbias: Any, *, epsilon: float | None = None,
        alpha: float = 1.0, beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, workspace: Any = None,
    ) -> None:  # fmt: skip
        """Gradients of the last `forward_training`, from the statistics it saved.

        Parameters
        ----------
        x : array
            That of the forward call.
        dy, dx : array, shape and dtype of x
        scale, dscale, dbias : array
            As `bias_scale_properties` says.
        epsilon : float, optional
            Checked and not used, because the saved statistics hold it already; gocudnn has the argument.
        alpha, beta, alpha_param, beta_param, workspace
            As in `Handle.backward`.

        Notes
        -----
        The order is that of `Handle.backward`; gocudnn's ``BackwardProp``, here `backward_prop`, has x, scale, dscale,
        dbias, dx, dy: port it by keywords.
        """
        data = self._data(x)
        if not self._has_saved:
            raise ArgumentError("layer", "a layer without saved statistics", "a forward_training before backward")
        saved = {name: self._state[name] for name in ("saved_mean", "saved_inv_variance")}
        own = self._own(epsilon, alpha=alpha, beta=beta, alpha_param=alpha_param, beta_param=beta_param)
        self._handle.backward(data, dy, scale, dx, dscale, dbias, **own, **saved, workspace=workspace)

    backward_prop = backward

    def close(self) -> None:
        """Release the statistics; closing twice does nothing. The handle stays open.

        Their memory is freed when no `Buffer` from the layer is left. On a GPU that happens in the order of the
        device's stream, after the calls that use the memory.
        """
        self._closed = True
        self._state = {}
        self._derived = None

    def __enter__(self) -> BatchNorm:
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
