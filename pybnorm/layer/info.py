"""The state of a layer as plain data, and its JSON."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import __version__, _arguments
from pybnorm.enums import DataType, Layout, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError

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
        for name in STATISTICS:
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
        for name in values:
            if name not in names:
                raise ArgumentError(str(name), "a field of the JSON", "the fields of Info only: " + ", ".join(names))
        for name, enumeration in (("mode", Mode), ("format", Layout), ("data_type", DataType)):
            values[name] = _named(enumeration, values[name], name)
        kind = _arguments.derived_data_type(values["data_type"])
        dims = _arguments.dims(values["dims"])
        for name in STATISTICS:
            values[name] = _decoded(name, values[name], kind, dims)
        return cls(**values)

    def to_gocudnn_json(self) -> str:
        """The state as gocudnn's ``batchnorm.Info`` is written by Go's ``encoding/json``.

        gocudnn's factor is an unsigned integer: one that is not whole is written as 0, gocudnn's own value.
        """
        factor = self.exponential_average_factor
        numbers = (self.epsilon, int(factor) if factor == int(factor) else 0, int(self.mode), 0, int(self.data_type), 1)
        little = np.dtype(self.data_type.name.lower()).newbyteorder("<")
        values: dict[str, object] = dict(zip(_GOCUDNN_NUMBERS, numbers, strict=True))
        values |= {"Dims": self.dims, "Stride": self.strides}
        for name, field in zip(_GOCUDNN_STATISTICS, STATISTICS, strict=True):
            values[name] = base64.b64encode(getattr(self, field).astype(little).tobytes()).decode("ascii")
        return json.dumps(values)

    @classmethod
    def from_gocudnn_json(cls, text: str | bytes) -> Info:
        """The state that gocudnn's ``batchnorm.Info`` has in JSON.

        Statistics are base64 of little-endian bytes, or lists of numbers, as older versions have them. gocudnn leaves
        epsilon and the factor at 0: they are those of the layer's next calls in gocudnn, and 0 here.
        """
        values = _object(text, "the JSON of gocudnn's Info")
        names = (*_GOCUDNN_NUMBERS, "Dims", "Stride", *_GOCUDNN_STATISTICS)
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
        arrays = {
            field: _decoded(name, values[name], kind, dims)
            for field, name in zip(STATISTICS, _GOCUDNN_STATISTICS, strict=True)
        }
        epsilon = _arguments.epsilon(values["Epsilon"])
        factor = _arguments.factor(values["Exponentialfactor"], "Exponentialfactor")
        return cls(mode, Layout.CHANNELS_FIRST, kind, PROPAGATE_NAN, dims, packed, epsilon, factor, **arrays)


_GOCUDNN_NUMBERS = ("Epsilon", "Exponentialfactor", "Mode", "Format", "DataType", "Nan")
_GOCUDNN_STATISTICS = ("RRM", "RRV", "RSM", "RSV")  # as STATISTICS


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
    for member in enumeration:
        if type(value) is int and value == member:
            return member
    raise ArgumentError(argument, value, "one of " + ", ".join(f"{int(m)} ({m.name})" for m in enumeration))


def _named(enumeration: Any, value: object, argument: str) -> Any:
    try:
        return enumeration[value]
    except (KeyError, TypeError):
        raise ArgumentError(argument, value, "one of " + ", ".join(enumeration.__members__)) from None


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
