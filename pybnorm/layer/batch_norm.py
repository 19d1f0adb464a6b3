"""The layer: its statistics, its calls and its state."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, devices
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import Handle, TensorDescriptor, derive_bn_tensor_descriptor
from pybnorm.devices import Device
from pybnorm.enums import DataType, Layout, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError

__all__ = ["BatchNorm", "BiasScaleProperties", "Info"]

PROPAGATE_NAN = "propagate"
_STATE = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
_JSON_KIND = "pybnorm.layer.Info"
_JSON_VERSION = 2  # 1 named the factor exponential_factor


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
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("mode", _arguments.mode(self.mode))
        if _arguments.layout(self.format, "format") != Layout.CHANNELS_FIRST:
            raise ArgumentError("format", self.format, "'channels_first', which every derived descriptor is")
        put("format", Layout.CHANNELS_FIRST)
        kind = _arguments.data_type(self.data_type, "data_type")
        if _arguments.derived_data_type(kind) != kind:
            raise ArgumentTypeError("data_type", kind.short, "f32 or f64, which statistics have")
        put("data_type", kind)
        if not issubclass(type(self.nan_policy), str) or self.nan_policy != PROPAGATE_NAN:
            raise ArgumentError("nan_policy", self.nan_policy, repr(PROPAGATE_NAN))
        dims = _arguments.dims(self.dims)
        if _arguments.derived_dims(dims, self.mode) != dims:
            raise ArgumentError("dims", dims, f"a derived shape of mode {self.mode.name}: 1 in every reduced axis")
        put("dims", dims)
        strides = _arguments.strides(self.strides, dims)
        if strides != _arguments.packed_strides(dims):
            raise ArgumentError("strides", strides, f"those of packed dims {dims}, {_arguments.packed_strides(dims)}")
        put("strides", strides)
        put("epsilon", _arguments.epsilon(self.epsilon))
        put("exponential_average_factor", _arguments.factor(self.exponential_average_factor))
        dtype = np.dtype(kind.name.lower())
        for name in _STATE:
            array = getattr(self, name)
            allowed = f"a NumPy array of {dtype}, as data_type says"
            _arguments.instance(array, np.ndarray, name, allowed)
            array = np.ndarray.view(array, np.ndarray)  # a subclass may override its attributes
            if array.dtype != dtype:
                raise ArgumentTypeError(name, f"an array of {array.dtype}", allowed)
            if array.shape != dims:
                raise ArgumentError(name, f"shape {array.shape}", f"dims, {dims}")
            own = array.copy()
            own.flags.writeable = False
            put(name, own)

    @property
    def exponential_factor(self) -> float:
        """Deprecated name of `exponential_average_factor`."""
        value = self.exponential_average_factor
        return _arguments.renamed("exponential_average_factor", 0.0, "exponential_factor", value, 0.0)

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

        Returns
        -------
        str
            An object. Statistics are base64 of their little-endian bytes, in logical order.
        """
        little = np.dtype(self.data_type.name.lower()).newbyteorder("<")
        values: dict[str, object] = {"kind": _JSON_KIND, "version": _JSON_VERSION}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = base64.b64encode(value.astype(little).tobytes()).decode("ascii")
            elif isinstance(value, (Mode, Layout, DataType)):
                value = value.name
            values[field.name] = value
        return json.dumps(values, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Info:
        """The state that `to_json` wrote.

        Parameters
        ----------
        text : str or bytes

        Returns
        -------
        Info

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not such JSON: the error names the field that is missing, unknown, of the wrong size or out of range.
        """
        try:
            values = json.loads(text)
        except Exception as error:  # also the object's own
            raise ArgumentError("text", f"{type(text).__name__}: {error}", f"the JSON of a {_JSON_KIND}") from None
        if not isinstance(values, dict):
            raise ArgumentError("text", values, f"a JSON object, of a {_JSON_KIND}")
        if values.get("version") == 1 and "exponential_factor" in values:
            values |= {"version": _JSON_VERSION, "exponential_average_factor": values.pop("exponential_factor")}
        for name, expected in (("kind", _JSON_KIND), ("version", _JSON_VERSION)):
            if values.pop(name, None) != expected:
                raise ArgumentError("text", f"another {name} than {expected!r}", f"the JSON of a {_JSON_KIND}")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            if name not in values:
                raise ArgumentError(name, "no such field in the JSON", "every field of Info")
        for name in values:
            if name not in names:
                raise ArgumentError(str(name), "a field of the JSON", "the fields of Info only: " + ", ".join(names))
        for name, enumeration in (("mode", Mode), ("format", Layout), ("data_type", DataType)):
            values[name] = _named(enumeration, values[name], name)
        kind = _arguments.derived_data_type(values["data_type"])
        dims = _arguments.dims(values["dims"])
        for name in _STATE:
            values[name] = _decoded(name, values[name], kind, dims)
        return cls(**values)


def _named(enumeration: Any, value: object, argument: str) -> Any:
    try:
        return enumeration[value]
    except (KeyError, TypeError):
        raise ArgumentError(argument, value, "one of " + ", ".join(enumeration.__members__)) from None


def _decoded(name: str, text: object, kind: DataType, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    nbytes = _arguments.numel(dims) * kind.itemsize
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
    """A batch-norm layer: a mode, and from `stage` on running and saved statistics in the device's memory.

    Made by `per_activation`, `spatial`, `spatial_persistent` or `restore`. The layer owns its four statistics from
    `stage` or `restore` to `close`. It borrows the handle, which must stay open as long as the layer is used. Scale
    and bias are the caller's. Calls neither allocate nor synchronise; `info`, `stage` and `restore` do both. Use
    a layer from one thread at a time.

    Examples
    --------
    >>> with pybnorm.Handle("onednn") as handle, BatchNorm.spatial(handle) as layer:
    ...     layer.stage(x)
    ...     properties = layer.bias_scale_properties()
    ...     scale = np.ones(properties.dims, np.float32)
    ...     bias = np.zeros(properties.dims, np.float32)
    ...     layer.forward_training(x, scale, bias, y)
    ...     layer.backward(x, dy, scale, dx, dscale, dbias)
    ...     text = layer.info().to_json()
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
        averaging_factor: float | None = None,
    ) -> None:
        factor = exponential_average_factor
        factor = _arguments.renamed("exponential_average_factor", factor, "averaging_factor", averaging_factor, 0.1)
        _arguments.instance(handle, Handle, "handle", "a Handle")
        if handle.closed:
            raise ClosedError("handle")
        self._handle = handle
        self._mode = _arguments.mode(mode)
        self._epsilon = _arguments.epsilon(epsilon)
        self._factor = _arguments.factor(factor)
        self._initial_running_variance = _not_negative(initial_running_variance, "initial_running_variance")
        self._device = device
        self._derived: TensorDescriptor | None = None
        self._state: dict[str, Buffer] = {}
        self._has_saved = False
        self._closed = False

    # ------------------------------------------------------------ construction

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
            The device that holds the statistics. Default: the CPU. Required on a GPU, where the handle must use its
            stream (``handle.set_stream(device.stream)``), so that copies are ordered after calls.

        Returns
        -------
        BatchNorm

        Raises
        ------
        ArgumentError, ArgumentTypeError
        """
        return cls(handle, Mode.PER_ACTIVATION, **options)

    @classmethod
    def spatial(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A layer with statistics of shape (1, C, 1...), each over N and space (gocudnn's ``PreStageSpatial``).

        Parameters
        ----------
        handle, epsilon, exponential_average_factor, initial_running_variance, device
            As in `per_activation`.

        Returns
        -------
        BatchNorm
        """
        return cls(handle, Mode.SPATIAL, **options)

    @classmethod
    def spatial_persistent(cls, handle: Handle, **options: Any) -> BatchNorm:
        """A `spatial` layer by cuDNN's persistent kernels (gocudnn's ``PreStageSpatialPersistant``).

        Often faster, with a narrower range of values: large finite x may overflow to NaN or infinity. Other backends
        refuse it when staged.

        Parameters
        ----------
        handle, epsilon, exponential_average_factor, initial_running_variance, device
            As in `per_activation`.

        Returns
        -------
        BatchNorm
        """
        return cls(handle, Mode.SPATIAL_PERSISTENT, **options)

    @classmethod
    def restore(cls, handle: Handle, info: Info, *, mode: object = None, device: Device | None = None) -> BatchNorm:
        """A staged layer with the state of another one, which may come from another backend or machine.

        Parameters
        ----------
        handle : Handle
            Of any backend; borrowed.
        info : Info
        mode : Mode, optional
            Default: that of `info`. SPATIAL and SPATIAL_PERSISTENT, which only cuDNN has, may replace each other: they
            compute the same.
        device : Device, optional
            As in `per_activation`.

        Returns
        -------
        BatchNorm

        Raises
        ------
        ArgumentError, ArgumentTypeError
        UnsupportedError
            The backend has no such mode.

        Notes
        -----
        Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`. Waits for the copies of the statistics.
        """
        _arguments.instance(info, Info, "info", "an Info")
        chosen = info.mode if mode is None else _arguments.mode(mode)
        if (chosen == Mode.PER_ACTIVATION) != (info.mode == Mode.PER_ACTIVATION):
            raise ArgumentError("mode", chosen, f"a mode of the same mathematics as that of info, {info.mode.name}")
        layer = cls(
            handle,
            chosen,
            epsilon=info.epsilon,
            exponential_average_factor=info.exponential_average_factor,
            device=device,
        )
        # Derived from a tensor of the derived shape itself, so that the backend's rules for mode and dtype apply.
        derived = derive_bn_tensor_descriptor(TensorDescriptor(handle.backend, info.data_type, info.dims), chosen)
        layer._allocate(derived, {name: getattr(info, name) for name in _STATE})
        # An inverse standard deviation is never 0 but for an infinite variance, so zeros say that nothing was saved.
        layer._has_saved = bool(np.any(info.saved_inv_variance != 0))
        return layer

    def stage(self, x: Any) -> None:
        """Derive the shape of the statistics from x, allocate them and fill them with their initial values.

        Parameters
        ----------
        x : array or TensorDescriptor
            Like those of later calls, which may differ in N. The array's memory is not read.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A bad x, or the layer is staged already.
        UnsupportedError
            The backend has no such mode or dtype.

        Notes
        -----
        Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`. Statistics start at 0, but for the running variance,
        which starts at `initial_running_variance`. Waits for the copies of these.
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
        self._allocate(derived, dict.fromkeys(_STATE, zeros) | {"running_variance": variance})

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
        elif not all(hasattr(type(device), name) for name in ("device_type", "from_numpy", "stream")):
            raise ArgumentTypeError("device", device, "a device of pybnorm.devices")
        if device.device_type != library.device_type:
            raise ArgumentError(
                "device",
                f"a device of type {device.device_type} ({device.name})",
                f"type {library.device_type}, where backend {self._handle.backend} computes",
            )
        self._ordered(device)
        self._state = {name: device.from_numpy(values[name]) for name in _STATE}
        self._device, self._derived = device, derived

    def _ordered(self, device: Device) -> None:
        """Check that the device's copies and the handle's calls use one stream, which orders them."""
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
        """Whether the layer has statistics, from `stage` or `restore`."""
        return self._derived is not None

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
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
        return self._state[name]

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

    def info(self) -> Info:
        """The whole state, copied to the host after all earlier calls.

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
            **{name: device.to_numpy(self._state[name]) for name in _STATE},
        )

    # ------------------------------------------------------------ calls

    def forward_training(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        exponential_average_factor: float | None = None,
        epsilon: float | None = None,
        workspace: Any = None,
        averaging_factor: float | None = None,
    ) -> None:
        """Normalize by the statistics of the batch; update the running statistics and save the batch's for `backward`.

        ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``,
        ``running = (1 - factor) * running + factor * batch``, the batch variance unbiased there.

        Parameters
        ----------
        x : array, shape (N, C, spatial...)
            At least two elements per statistic.
        scale, bias : array
            As `bias_scale_properties` says.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        alpha, beta : float
        exponential_average_factor, epsilon : float, optional
            Default: the layer's. A value given becomes the layer's, and part of `info`.
            `pybnorm.miopen.cumulative_average_factor` makes the running statistics a plain average.
        workspace : array or (int, int), optional
            As in `Handle.forward_training`.
        averaging_factor : float, optional
            Deprecated name of `exponential_average_factor`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError

        Notes
        -----
        Source of the formula: Ioffe & Szegedy 2015; ``cudnnBatchNormalizationForwardTraining``.
        Vendor symbols: see `pybnorm.batch_normalization_forward_training`.
        Workspace: `Handle.workspace_size` of `Operation.FORWARD_TRAINING`.
        """
        data = self._data(x)
        if averaging_factor is not None:
            exponential_average_factor = _arguments.renamed(
                "exponential_average_factor", exponential_average_factor, "averaging_factor", averaging_factor
            )
        factor = self._factor
        if exponential_average_factor is not None:
            factor = _arguments.factor(exponential_average_factor)
        added = self._epsilon if epsilon is None else _arguments.epsilon(epsilon)
        state: dict[str, Any] = dict(self._state)
        self._handle.forward_training(
            data,
            scale,
            bias,
            y,
            mode=self._mode,
            alpha=alpha,
            beta=beta,
            epsilon=added,
            exponential_average_factor=factor,
            workspace=workspace,
            **state,
        )
        self._epsilon, self._factor, self._has_saved = added, factor, True

    def forward_inference(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float | None = None,
        workspace: Any = None,
    ) -> None:
        """Normalize by the running statistics.

        ``y = alpha * (scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...)
        scale, bias : array
            As `bias_scale_properties` says.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        alpha, beta : float
        epsilon : float, optional
            For this call. Default: the layer's, that of the last forward training.
        workspace : array or (int, int), optional
            As in `Handle.forward_inference`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError

        Notes
        -----
        Source of the formula: ``cudnnBatchNormalizationForwardInference``.
        Vendor symbols: see `pybnorm.batch_normalization_forward_inference`.
        Workspace: `Handle.workspace_size` of `Operation.FORWARD_INFERENCE`.
        """
        self._handle.forward_inference(
            self._data(x),
            scale,
            bias,
            self._state["running_mean"],
            self._state["running_variance"],
            y,
            mode=self._mode,
            alpha=alpha,
            beta=beta,
            epsilon=self._epsilon if epsilon is None else epsilon,
            workspace=workspace,
        )

    def backward(
        self,
        x: Any,
        dy: Any,
        scale: Any,
        dx: Any,
        dscale: Any,
        dbias: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        epsilon: float | None = None,
        workspace: Any = None,
        alpha_data: float | None = None,
        beta_data: float | None = None,
    ) -> None:
        """Gradients of the last `forward_training`, from the statistics it saved.

        With ``xhat = (x - saved_mean) * saved_inv_variance``: ``dbias = sum(dy)``, ``dscale = sum(dy * xhat)``,
        ``dx = scale * saved_inv_variance * (dy - dbias / m - xhat * dscale / m)``; dx is blended by the data pair,
        dscale and dbias by the parameter pair.

        Parameters
        ----------
        x : array
            That of the forward call.
        dy : array, shape and dtype of x
        scale : array
            As `bias_scale_properties` says.
        dx : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        dscale, dbias : array
            As `scale`. Written. Read only if `beta_param` is not 0.
        alpha, beta, alpha_param, beta_param : float
        epsilon : float, optional
            Checked and not used, because the saved statistics hold it already; gocudnn has the argument.
        workspace : array or (int, int), optional
            As in `Handle.backward`.
        alpha_data, beta_data : float, optional
            Deprecated names of `alpha` and `beta`.

        Raises
        ------
        ArgumentError
            Also without a forward training since `stage`.
        UnsupportedError, VendorError

        Notes
        -----
        The order is that of `Handle.backward`; gocudnn's ``BackwardProp``, here `backward_prop`, has x, scale, dscale,
        dbias, dx, dy: port it by keywords.
        Source of the formula: Ioffe & Szegedy 2015, section 3; ``cudnnBatchNormalizationBackward``.
        Vendor symbols: see `pybnorm.batch_normalization_backward`.
        Workspace: `Handle.workspace_size` of `Operation.BACKWARD`.
        """
        if alpha_data is not None or beta_data is not None:
            alpha = _arguments.renamed("alpha", alpha, "alpha_data", alpha_data, 1.0)
            beta = _arguments.renamed("beta", beta, "beta_data", beta_data, 0.0)
        data = self._data(x)
        if not self._has_saved:
            raise ArgumentError("layer", "a layer without saved statistics", "a forward_training before backward")
        self._handle.backward(
            data,
            dy,
            scale,
            dx,
            dscale,
            dbias,
            mode=self._mode,
            alpha=alpha,
            beta=beta,
            alpha_param=alpha_param,
            beta_param=beta_param,
            epsilon=self._epsilon if epsilon is None else epsilon,
            saved_mean=self._state["saved_mean"],
            saved_inv_variance=self._state["saved_inv_variance"],
            workspace=workspace,
        )

    backward_prop = backward

    def _need_staged(self) -> TensorDescriptor:
        if self._closed:
            raise ClosedError("layer")
        if self._derived is None:
            raise ArgumentError("layer", "a layer that is not staged", "stage(x) first")
        return self._derived

    def _data(self, x: Any) -> Buffer:
        """Check that x fits the layer's statistics, so that an error names x and not the statistics."""
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

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Release the statistics; closing twice does nothing. The handle stays open.

        Their memory is freed when no `Buffer` from the layer is left; on a GPU in the order of the device's stream,
        after the calls that use it.
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


def _not_negative(value: object, argument: str) -> float:
    number = _arguments.scalar(value, argument, DataType.FLOAT32)
    if number < 0:
        raise ArgumentError(argument, value, "a finite number >= 0 that float32 can hold")
    return number
