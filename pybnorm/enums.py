"""Enumerations shared by all backends, with the values of ``include/pybnorm/shim.h`` (a test compares them)."""

from __future__ import annotations

import enum

__all__ = ["Activation", "Capability", "DataType", "Layout", "Mode", "Operation", "StatusClass"]


class _Named(enum.IntEnum):
    """Members print as their name; formatted as an integer, ``f"{mode:d}"``, as their number."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(int(self) if spec.endswith(("b", "d", "n", "o", "x", "X")) else self.name, spec)


class Mode(_Named):
    """The axes that statistics are taken over, by the names of cuDNN and MIOpen.

    Examples
    --------
    >>> pybnorm.Mode.SPATIAL == 1
    True
    """

    PER_ACTIVATION = 0
    """Parameters of shape ``(1, C, D...)``, reduced over N."""
    SPATIAL = 1
    """Parameters of shape ``(1, C, 1...)``, reduced over N and the spatial axes."""
    SPATIAL_PERSISTENT = 2
    """The mathematics of `SPATIAL` by cuDNN's persistent kernels: often faster, with limits on the value range."""


class DataType(_Named):
    """Element types of x, y, dy and dx.

    Examples
    --------
    >>> pybnorm.DataType.BFLOAT16.itemsize, pybnorm.DataType.BFLOAT16.short
    (2, 'bf16')
    """

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def short(self) -> str:
        """``f32``, ``f64``, ``f16`` or ``bf16``: how problems and tables spell it."""
        return _SHORT[self]


_ITEMSIZE = {DataType.FLOAT32: 4, DataType.FLOAT64: 8, DataType.FLOAT16: 2, DataType.BFLOAT16: 2}
_SHORT = {DataType.FLOAT32: "f32", DataType.FLOAT64: "f64", DataType.FLOAT16: "f16", DataType.BFLOAT16: "bf16"}


class Layout(_Named):
    """The order of a tensor in memory; axis 0 is N and axis 1 is C whatever the layout.

    Examples
    --------
    >>> pybnorm.Layout.CHANNELS_LAST.name
    'CHANNELS_LAST'
    """

    CHANNELS_FIRST = 0
    """Packed NC, NCL, NCHW, NCDHW."""
    CHANNELS_LAST = 1
    """Packed NLC, NHWC, NDHWC."""
    STRIDED = 2
    """Any other strides that do not overlap."""


class Operation(_Named):
    """A call of a backend.

    Examples
    --------
    >>> pybnorm.Operation.FORWARD_TRAINING.name
    'FORWARD_TRAINING'
    """

    DERIVE = 0
    FORWARD_TRAINING = 1
    FORWARD_INFERENCE = 2
    BACKWARD = 3
    AXPBY = 4
    FILL = 5
    RELU = 6
    RELU_BACKWARD = 7


class Activation(_Named):
    """Activations that a call applies to batch norm's result before blending.

    Examples
    --------
    >>> pybnorm.Activation.RELU.name
    'RELU'
    """

    NONE = 0
    RELU = 1
    """``max(x, 0)``"""
    CLIPPED_RELU = 2
    """``min(max(x, 0), high)``"""
    CLAMP = 3
    """``min(max(x, low), high)``"""


class Capability(enum.IntFlag):
    """The ways in which a backend computes one combination. No bit set: it refuses the combination.

    Examples
    --------
    >>> bits, reason = pybnorm.capability("native", "train", "spatial", "f64", "nhwc", 4)
    >>> pybnorm.Capability.RUNS in bits
    True
    """

    RUNS = 1
    BLEND_NATIVE = 2
    """The vendor applies alpha and beta itself."""
    BLEND_SCRATCH = 4
    """alpha other than 1 or beta other than 0 needs a copy in the workspace."""
    FOLDED = 8
    """The vendor is given the same memory with another rank or shape."""
    HOST_STEPS = 16
    """Part of the result is computed by pybnorm's adapter on the CPU."""
    BLEND_ROUNDS = 32
    """A blended result (beta other than 0) is rounded to x's type more than once."""
    ACTIVATION = 64
    """The loaded library computes the call with a fused activation, correctly. Plans of cuDNN fuse by themselves."""
    WIDENED = 128
    """16-bit data are computed in float32, and results rounded to 16 bits once: the vendor has no kernel for them."""
    IN_PLACE = 256
    """With beta 0 y may be the array x, and dx the array dy; a call with a known defect there is refused."""
    INVERSE = 512
    """The loaded library has inference from the inverse standard deviation, which is composed elsewhere."""
    HALVES = 1024
    """Plans can make the halves of a synchronized batch norm, sums alone and dx from given sums, in one pass each."""
    RESIDUAL = 2048
    """Some plan adds `z` before the activation, and its backward writes `dz`."""
    OWN_PARAMETERS = 4096
    """Parameters and running statistics may be of x's own dtype of 16 bits; saved statistics are float32 still."""
    CONSTANTS = 8192
    """Backward takes running statistics as constants, by plans: the gradients of inference."""

    def __repr__(self) -> str:
        return "|".join(f"Capability.{bit.name}" for bit in Capability if bit & self) or "Capability(0)"

    def __str__(self) -> str:
        return "|".join(str(bit.name) for bit in Capability if bit & self) or "0"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class StatusClass(_Named):
    """Families of vendor statuses."""

    SUCCESS = 0
    BAD_PARAMETER = 1
    NOT_SUPPORTED = 2
    ALLOCATION = 3
    NOT_INITIALIZED = 4
    EXECUTION = 5
    VERSION = 6
    INTERNAL = 7
