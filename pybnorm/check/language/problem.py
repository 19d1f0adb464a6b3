"""The problem language: one batch-norm case on one line that a shell passes through unquoted.

::

    train,spatial,f32,nchw,8x64x32x32,fill=randn,kappa=3,alpha=2,beta=0.5,running=0,saved=0,factor=0.25,eps=1e-05,seed=7

Five positional tokens (operation, mode, dtype, layout, dims), then options in any order. Options at their default are
left out when a problem is printed. `expand` also takes alternatives separated by ``/`` in any token and multiplies
them out: ``train/infer,spatial,f32/bf16,nchw/nhwc,4x3x5x7``.

``frozen``, ``training_grad``, ``backward_reduce``, ``backward_elemt``, ``elemt`` and ``gather_stats`` in place of the
operation are those of `pybnorm.operations` (the first is its ``backward_frozen``), which are composed of vendor calls
on every backend. The dims of gather_stats are those of the means: ranks and statistics, of float32 or float64; how many
elements each rank has is made of the seed, and where there are three the second has none (`Problem.counts`).
``sync_train`` and ``sync_backward`` are those of `pybnorm.sync`: ``ranks`` threads with uneven shares of the batch
(`Problem.shares`), judged as one call on the whole of it.

A suite file holds such lines, comments from ``#`` on, and ``@name`` for all cases of another suite.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from pybnorm import _arguments, _core, _words
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

OPERATIONS = {"train": Operation.FORWARD_TRAINING, "infer": Operation.FORWARD_INFERENCE, "backward": Operation.BACKWARD}
COMPOSED = {
    "frozen": Operation.BACKWARD,
    "training_grad": Operation.BACKWARD,
    "backward_reduce": Operation.BACKWARD,
    "backward_elemt": Operation.BACKWARD,
    "elemt": Operation.FORWARD_INFERENCE,
    "gather_stats": Operation.FORWARD_TRAINING,
    "sync_train": Operation.FORWARD_TRAINING,
    "sync_backward": Operation.BACKWARD,
}
"""Words of operations that are composed of vendor calls (`pybnorm.operations`), with the one that each is like."""
MODES = {"spatial": Mode.SPATIAL, "persistent": Mode.SPATIAL_PERSISTENT, "peract": Mode.PER_ACTIVATION}
DATA_TYPES = {d.short: d for d in DataType}
LAYOUTS = {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST}
ACTIVATIONS = {activation.name.lower(): activation for activation in Activation}
LIMITS = {"low": {Activation.CLAMP: -0.5}, "high": {Activation.CLIPPED_RELU: 1.5, Activation.CLAMP: 1.5}}
"""Limits by default, of the activations that have them."""
DATA_OUTPUTS = ("y", "dx", "dz")
"""Outputs of x's shape and dtype."""
FILLS = (
    *("exact", "randn", "sqrteps", "ramp", "constant", "range", "paired", "special"),
    *("relu", "image", "sparse", "level"),
)
"""The names of the fills; `pybnorm.check.language.fills` says what each is for."""
FILE = "file"
"""The fill of a problem whose data come from a file."""
_EXAMPLE = "train,spatial,f32,nchw,8x64x32x32"
CHOICES = {
    "scale": ("drawn", "zero", "small"),
    "old": ("drawn", "nan"),
    "sign": ("drawn", "negative"),
    "fence": ("", "start", "end"),
}
"""Options that are one of a few words, the default first."""

_WITH_KAPPA = ("randn", "sqrteps")
_MIXED = ("constant", "special", "level")
_ORDER = (
    *("fill", "data", "kappa", "magnitude", "scale", "alpha", "beta", "alpha_param", "beta_param"),
    *("running", "unbiased", "old", "saved", "sign", "factor", "eps", "params", "algorithm", "inplace"),
    *("activation", "low", "high", "residual", "inverse", "ranks", "misalign", "fence", "bitwise", "repeats"),
    *("streams", "seed"),
)
"""Every option, in the order of a line."""
_PLAIN = ("fill", "data", "kappa", "magnitude", "params", "misalign", "fence", "bitwise", "repeats", "streams", "seed")
_BLENDED = (*_PLAIN, "scale", "alpha", "beta")
_COMMON = (*_BLENDED, "eps", "algorithm", "inplace", "activation", "low", "high", "residual")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "train": (*_COMMON, "running", "unbiased", "old", "saved", "factor"),
    "infer": (*_COMMON, "inverse"),
    "backward": (*_COMMON, "alpha_param", "beta_param", "saved", "sign"),
    **dict.fromkeys(("frozen", "training_grad"), (*_BLENDED, "alpha_param", "beta_param", "eps")),
    "backward_reduce": (*_PLAIN, "sign"),
    "backward_elemt": (*_BLENDED, "sign"),
    "elemt": _BLENDED,
    "gather_stats": (*_PLAIN, "running", "old", "factor", "eps"),
    "sync_train": (*_BLENDED, "running", "old", "factor", "eps", "ranks"),
    "sync_backward": (*_BLENDED, "sign", "ranks"),
}
OPTIONS = {word: tuple(n for n in _ORDER if n in options) for word, options in _OPTIONS.items()}
"""Which options each operation has, in the order of a line."""
_NOT_OPTIONS = {word: tuple(n for n in _ORDER if n not in options) for word, options in OPTIONS.items()}

FLAGS = ("running", "unbiased", "saved", "inplace", "residual", "bitwise", "inverse")
"""Options that are 0 or 1."""
_RANGES = {"misalign": (0, 63), "repeats": (1, 1000), "streams": (1, 8), "ranks": (2, 8), "seed": (0, 2**64 - 1)}
RANDOM = "random"
"""The seed of a line that draws one."""


def _default_magnitude(fill: str, dtype: DataType) -> float:
    """The magnitude of a problem that names none; 0 for the fills that have none.

    For ``range`` the largest at which float32 still holds the sum of squares of a million elements, and near the end
    of the range of float16.
    """
    if fill == "range":
        return {DataType.FLOAT16: 6e4, DataType.FLOAT64: 1e100}.get(dtype, 1e15)
    return {"constant": 1.0, "level": 0.1}.get(fill, 0.0)


def checked(problem: object) -> None:
    """Refuse an argument that is no problem."""
    _arguments.instance(problem, Problem, "problem", "a Problem")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One case. Immutable and hashable; ``str()`` prints its line and `Problem.parse` reads it back equal.

    Parameters
    ----------
    operation : Operation
        FORWARD_TRAINING, FORWARD_INFERENCE or BACKWARD.
    mode : Mode
    dtype : DataType
        Of x, y, dy and dx.
    dims : tuple of int
        N, C, then 0 to 6 spatial sizes.
    strides : tuple of int, optional
        In elements; packed channels-first when left out.
    fill : str
        One of `FILLS`, or `FILE`. ``"constant"``, ``"level"`` and ``"special"`` need two statistics at least, one of
        which stays ordinary.
    data : str
        Name of a NumPy archive with the tensors (`pybnorm.check.language.data.read`), with ``fill="file"`` only.
    kappa : float
        \\|mean\\| / standard deviation of x (``randn`` and ``sqrteps`` only).
    magnitude : float, optional
        Largest \\|x\\| of ``range``, or of the constant channels of ``constant`` and ``level``; for each its own by
        default (1e15 of range, 6e4 in float16; 1 of constant, 0.1 of level).
    scale : str
        ``"zero"``: every second scale, but for the last, is 0. ``"small"``: it and its bias are 1e-7 and 1e-30 times
        as large, in turn.
    alpha, beta : float
        out = alpha * result + beta * prior; in backward the data pair, for dx.
    alpha_param, beta_param : float
        The same for dscale and dbias.
    running : bool
        Training updates running statistics.
    unbiased : bool
        The running variance takes the unbiased variance, a sum over m - 1, as vendors' does; else the biased one, as
        ONNX, TensorFlow and Keras have it. That is for other implementations: no vendor's call has it.
    old : str
        ``"nan"``: running statistics before training are NaN, as in memory that nobody set; with a factor of 1 only,
        which leaves nothing of them.
    saved : bool
        Training writes, backward reads, the saved statistics.
    saves_variance : bool
        ``saved=variance``: what training saves is the variance, in place of the inverse standard deviation. No vendor's
        call has it.
    sign : str
        ``"negative"``: every second saved 1/sigma that backward reads is below 0.
    factor : float
        Exponential average factor, the weight of the batch: PyTorch's momentum; 1 - momentum of Keras, ONNX and flax.
    eps : float, optional
        Epsilon; see `Problem.default_epsilon`.
    params : DataType, optional
        Data type of scale, bias, their gradients and running statistics; by default float64 for float64 data, else
        float32. Where it is that of data of 16 bits, saved statistics are float32 still.
    algorithm : str
        One of the backend's algorithms (`pybnorm.algorithms`); empty for its entry point. An algorithm that no backend
        has is an error. With one that only other backends have the case is UNSUPPORTED.
    inplace : bool
        The result is written over what it is made of: y over x, or dx over dy. beta is 0 then.
    activation : Activation
        Activation of batch norm's result, before it is blended; in backward dy is the gradient at its output. Not with
        the fill special: what an activation makes of NaN is not fixed.
    low, high : float, optional
        Limits of clipped_relu (high) and clamp; see `LIMITS`.
    residual : bool
        Something of x's shape is added before the activation; in backward its gradient, dz, is written, and the
        activation's mask comes from forward's result.
    inverse : bool
        Inference is given the inverse standard deviation in place of the variance; epsilon is not used then. Composed
        on every backend, so not with an algorithm, an activation or in place.
    bitwise : bool
        All calls must give the same bits; `repeats` is at least 2 then.
    misalign : int
        Elements by which every array is off the alignment of an allocation; 0 to 63.
    fence : str
        ``"start"`` or ``"end"``: where every array lies against a page without access (`pybnorm.check.run.fence`); only
        on a CPU.
    repeats : int
        How often the call is made, each time in fresh memory; 1 to 1000.
    streams : int
        Repeat i runs on stream i mod `streams`; 1 to 8 and not more than `repeats`.
    seed : int
        Seed of the counter-based generator, 0 to 2**64 - 1.
    composed : str
        One of `COMPOSED`: the function of `pybnorm.operations` that is called in place of the vendor's entry point,
        with `operation` the one it is like.
    ranks : int
        Ranks of a synchronized call, 2 to 8.

    Raises
    ------
    ArgumentError
        A value that is not allowed; the message names the token and what is allowed.

    Examples
    --------
    >>> problem = pybnorm.check.Problem.parse("backward,spatial,bf16,nhwc,8x3x4x4,fill=randn")
    >>> problem.dims, problem.strides, problem.dtype
    ((8, 3, 4, 4), (48, 1, 12, 3), DataType.BFLOAT16)
    >>> str(problem)
    'backward,spatial,bf16,nhwc,8x3x4x4,fill=randn'
    """

    operation: Operation
    mode: Mode
    dtype: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...] = ()
    fill: str = "exact"
    data: str = ""
    kappa: float = 0.0
    magnitude: float | None = None
    scale: str = "drawn"
    alpha: float = 1.0
    beta: float = 0.0
    alpha_param: float = 1.0
    beta_param: float = 0.0
    running: bool = True
    unbiased: bool = True
    old: str = "drawn"
    saved: bool = True
    saves_variance: bool = False
    sign: str = "drawn"
    factor: float = 0.25
    eps: float | None = None
    params: DataType | None = None
    algorithm: str = ""
    inplace: bool = False
    activation: Activation = Activation.NONE
    low: float | None = None
    high: float | None = None
    residual: bool = False
    inverse: bool = False
    bitwise: bool = False
    misalign: int = 0
    fence: str = ""
    repeats: int = 2
    streams: int = 1
    seed: int = 0
    composed: str = ""
    ranks: int = 2

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("operation", _arguments.operation(self.operation))
        if self.operation not in OPERATIONS.values():
            raise ArgumentError("operation", self.operation, _choice(OPERATIONS))
        put("mode", _arguments.mode(self.mode))
        put("dtype", _arguments.data_type(self.dtype))
        put("dims", _arguments.dims(self.dims))
        self._check_composed(put)
        given = self.strides
        if given is None or (type(given) in (tuple, list) and not given):
            given = _arguments.packed_strides(self.dims)
        put("strides", _arguments.strides(given, self.dims))
        self._check_fill(put)
        for name in FLAGS:
            put(name, _arguments.boolean(getattr(self, name), name))
        put("algorithm", _arguments.text(self.algorithm, "algorithm"))
        for name in ("kappa", "alpha", "beta", "alpha_param", "beta_param"):
            put(name, _arguments.scalar(getattr(self, name), name, self.dtype))
        put("factor", _arguments.factor(self.factor, "factor", self.dtype))
        if self.kappa < 0:
            raise ArgumentError("kappa", self.kappa, "a finite number >= 0")
        if self.kappa and self.fill not in _WITH_KAPPA:
            raise ArgumentError("kappa", self.kappa, f"kappa with fill={'/'.join(_WITH_KAPPA)} only (fill={self.fill})")
        self._check_magnitude(put)
        put("eps", _arguments.epsilon(self.default_epsilon if self.eps is None else self.eps, self.dtype))
        if self.fill == "sqrteps" and not self.epsilon:
            raise ArgumentError("eps", self.eps, "a number > 0 with fill=sqrteps, which it is the scale of")
        statistics = _arguments.numel(self.parameter_dims)
        if (self.fill in _MIXED or self.scale != "drawn") and statistics < 2:
            name = "fill" if self.fill in _MIXED else "scale"
            raise ArgumentError(name, getattr(self, name), "at least two statistics, one of which stays ordinary")
        put("params", self.default_params if self.params is None else _arguments.data_type(self.params, "params"))
        for name, ends in _RANGES.items():
            put(name, _arguments.integer(getattr(self, name), name, *ends))
        if self.algorithm:  # what no backend has; one refuses another's as it refuses what it does not support
            _arguments.algorithm(self.algorithm, *_algorithms())
        if self.bitwise and self.repeats < 2:
            raise ArgumentError("bitwise", 1, f"at least two calls with bitwise=1 (repeats={self.repeats})")
        if self.fence == "end" and self.misalign:
            raise ArgumentError("misalign", self.misalign, "0 with fence=end, where an array's size decides")
        if self.streams > self.repeats:
            raise ArgumentError("streams", self.streams, f"not more streams than repeats (repeats={self.repeats})")
        if self.inplace and self.beta:
            raise ArgumentError("inplace", 1, f"beta=0 with inplace=1, where no prior is left (beta={self.beta:g})")
        self._check_activation(put)
        self._check_operation()

    def _check_composed(self, put: Callable[[str, object], None]) -> None:
        name = _arguments.text(self.composed, "composed")
        if not name:
            return
        if COMPOSED.get(name) != self.operation:
            known = [word for word, operation in COMPOSED.items() if operation == self.operation]
            raise ArgumentError("composed", name, _choice(known) or "no composed operation")
        if self.mode == Mode.SPATIAL_PERSISTENT:
            raise ArgumentError("mode", "persistent", f"spatial | peract for {name}, which is of several calls")
        put("inverse", name == "elemt")
        if name != "gather_stats":
            return
        if len(self.dims) != 2:
            raise ArgumentError("dims", "x".join(map(str, self.dims)), "RxC for gather_stats: ranks and statistics")
        if self.mode != Mode.SPATIAL:
            raise ArgumentError("mode", "peract", "spatial for gather_stats")
        if self.dtype not in (DataType.FLOAT32, DataType.FLOAT64):
            raise ArgumentError("dtype", self.dtype, "f32 | f64 for gather_stats, which merges statistics")
        if self.fill == "special":
            raise ArgumentError("fill", self.fill, "another fill for gather_stats")

    def _check_activation(self, put: Callable[[str, object], None]) -> None:
        kind = _arguments.activation_kind(self.activation)
        low, high = (  # those by default where none is given; 0 is as none for an activation that has no such limit
            default if value is None or (default is None and type(value) in (int, float) and not value) else value
            for value, default in ((getattr(self, name), limits.get(kind)) for name, limits in LIMITS.items())
        )
        try:
            _, bottom, top = _arguments.activation(kind, low, high, self.dtype)
        except ArgumentError as error:
            raise ArgumentError(error.argument.removeprefix("activation_"), error.value, error.allowed) from None
        for name, value in (("activation", kind), ("low", bottom), ("high", top)):
            put(name, value)
        if self.inverse and (kind or self.inplace or self.algorithm):
            raise ArgumentError("inverse", 1, "inverse=1 without activation=, inplace=1 and algorithm=")
        if self.residual and self.inplace:
            raise ArgumentError("inplace", 1, "inplace=0 with residual=1")
        if self.residual and not kind:
            raise ArgumentError("residual", 1, "residual=1 with an activation, which the sum is for")
        if kind and self.data:
            raise ArgumentError("data", self.data, "no activation with data=FILE.npz")
        if kind and self.fill == "special":
            raise ArgumentError("fill", self.fill, "another fill with an activation: what it makes of NaN is not fixed")

    def _check_fill(self, put: Callable[[str, object], None]) -> None:
        put("data", _arguments.text(self.data, "data"))
        if self.data and self.fill == type(self).fill:
            put("fill", FILE)
        put("fill", _arguments.text(self.fill, "fill"))
        if self.fill not in (*FILLS, FILE):
            raise ArgumentError("fill", self.fill, _choice((*FILLS, FILE)))
        if (self.fill == FILE) != bool(self.data):
            raise ArgumentError("data", self.data, f"data=FILE.npz with fill={FILE}, and only with it")
        if "," in self.data:
            raise ArgumentError("data", self.data, "a name without commas, which separate the options of a line")
        for name, words in CHOICES.items():
            if _arguments.text(getattr(self, name), name) not in words:
                raise ArgumentError(name, getattr(self, name), _choice(filter(None, words)))

    def _check_magnitude(self, put: Callable[[str, object], None]) -> None:
        default = _default_magnitude(self.fill, self.dtype)
        value = default if self.magnitude is None else _arguments.scalar(self.magnitude, "magnitude")
        largest = _arguments.largest(self.dtype)
        if default and not 0 < value <= largest:
            raise ArgumentError("magnitude", self.magnitude, f"a number > 0 that {self.dtype.short} can hold")
        if value and not default:
            raise ArgumentError("magnitude", value, f"magnitude with fill=range/constant/level only (fill={self.fill})")
        put("magnitude", value)

    def _check_operation(self) -> None:
        allowed, derived = self.options, self._derived() | {"inverse": self.composed == "elemt"}
        for name in _NOT_OPTIONS[self.word]:
            value = getattr(self, name)
            if value not in (_DEFAULTS[name], derived.get(name)):
                raise ArgumentError(name, value, f"for {self.word} only the options {', '.join(allowed)}")
        if self.old == "nan" and not (self.running and self.factor == 1):
            raise ArgumentError("old", "nan", "running=1 and factor=1 with it, which leave nothing of what was there")
        if not (self.unbiased or self.running):
            raise ArgumentError("unbiased", 0, "running=1 with it, the statistics that it is about")
        _arguments.boolean(self.saves_variance, "saves_variance")
        if self.saves_variance and (self.word != "train" or not self.saved):
            raise ArgumentError("saved", "variance", "train with it, whose result it is about")
        if self.sign == "negative" and not self.saved:
            raise ArgumentError("sign", "negative", "saved=1 with it, the statistics that backward reads")
        if self.operation == Operation.FORWARD_TRAINING and self.running and self.m == 1:
            raise ArgumentError(
                "running", 1, "running=0 where a statistic is of one element: its unbiased variance is undefined"
            )

    @property
    def word(self) -> str:
        """``train``, ``infer`` or ``backward``, or one of `COMPOSED`."""
        return self.composed or next(word for word, operation in OPERATIONS.items() if operation == self.operation)

    @property
    def options(self) -> tuple[str, ...]:
        """Options of its operation."""
        return OPTIONS[self.word]

    @property
    def takes_variance(self) -> bool:
        """True where a backward operation is given a variance, in place of the inverse standard deviation."""
        return self.composed in ("frozen", "training_grad")

    @property
    def count(self) -> int:
        """Elements per statistic of all ranks, of which the sums are that ``backward_elemt`` is given."""
        return 3 * self.m + 1

    @property
    def shares(self) -> tuple[int, ...]:
        """Images of each rank of a synchronized call: as 1 to 2 to 3 and so on, so that the first may have none."""
        ends = [self.dims[0] * k * (k + 1) // (self.ranks * (self.ranks + 1)) for k in range(self.ranks + 1)]
        return tuple(end - start for start, end in itertools.pairwise(ends))

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements per statistic of each rank whose statistics ``gather_stats`` merges."""
        ranks = self.dims[0]
        return tuple(0 if k == 1 and ranks > 2 else 2 + (37 * k + 11 * (self.seed % 64)) % 61 for k in range(ranks))

    @property
    def epsilon(self) -> float:
        """The epsilon of the call."""
        assert self.eps is not None
        return self.eps

    @functools.cached_property
    def default_epsilon(self) -> float:
        """Value of `eps` if the line does not name it; 0 if only float64 can hold that.

        For the exact fill it makes 1/sqrt(variance + epsilon) a power of two: 1/16 for the variance 3/16 of
        three-valued data, 3/4 for the variance 1/4 of the two-valued data of an even m that is not divisible by 8. For
        range it stays small against the variance.
        """
        if self.fill in ("exact", "paired"):
            given = self.fill == "paired" or self.operation == Operation.FORWARD_INFERENCE or self.takes_variance
            return 0.0625 if given or self.m % 8 == 0 or self.m % 2 else 0.75
        value = 1e-5 * min(1.0, self.magnitude or 0.0) ** 2 if self.fill == "range" else 1e-5
        return value if value >= 1.4e-45 or self.dtype == DataType.FLOAT64 else 0.0

    @property
    def default_params(self) -> DataType:
        """Value of `params` if the line does not name it."""
        return _arguments.derived_data_type(self.dtype)

    @functools.cached_property
    def m(self) -> int:
        """Elements per statistic."""
        return _arguments.reduced_count(self.dims, self.mode)

    @property
    def correction(self) -> float:
        """Factor of the batch's variance in the running variance: m / (m - 1), or 1."""
        return self.m / (self.m - 1) if self.unbiased else 1.0

    @functools.cached_property
    def parameter_dims(self) -> tuple[int, ...]:
        """Shape of scale, bias and statistics: rank kept, reduced axes 1."""
        return _arguments.derived_dims(self.dims, self.mode)

    @property
    def parameter_dtype(self) -> DataType:
        """dtype of scale, bias and statistics, but as `vector_dtype` says."""
        assert self.params is not None
        return self.params

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        """Axes that statistics sum over."""
        return _arguments.reduced_axes(len(self.dims), self.mode)

    @property
    def masked(self) -> bool:
        """True where a backward call is given forward's result, to mask dy by."""
        return bool(self.activation) and (self.residual or bool(self.algorithm))

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of x in memory."""
        return _arguments.layout_of(self.dims, self.strides)

    @functools.cached_property
    def alignment(self) -> int:
        """Bytes that the addresses of data are multiples of, up to 16."""
        offset = self.misalign * self.dtype.itemsize
        return min(16, offset & -offset) if offset else 16

    @functools.cached_property
    def recomputes(self) -> bool:
        """True where the call computes mean and variance from x."""
        of_saved = self.operation == Operation.BACKWARD and self.saved
        return self.operation != Operation.FORWARD_INFERENCE and not of_saved

    def __str__(self) -> str:
        return self._line

    @functools.cached_property
    def _line(self) -> str:
        packed = [w for w, layout in LAYOUTS.items() if self.strides == _arguments.packed_strides(self.dims, layout)]
        layout = packed[0] if packed else "strides=" + "x".join(map(str, self.strides))
        mode = next(word for word, mode in MODES.items() if mode == self.mode)
        tokens = [self.word, mode, self.dtype.short, layout, "x".join(map(str, self.dims))]
        derived = self._derived()
        for name in self.options:
            value = getattr(self, name)
            if name == "saved" and self.saves_variance:
                tokens.append("saved=variance")
            elif value != derived.get(name, _DEFAULTS[name]):
                tokens.append(f"{name}={_format(value)}")
        return ",".join(tokens)

    def _derived(self) -> dict[str, Any]:
        """Values of options that the line does not name, where other tokens decide them."""
        return {
            "eps": self.default_epsilon,
            "magnitude": _default_magnitude(self.fill, self.dtype),
            "params": self.default_params,
            **{name: limits.get(self.activation, 0.0) for name, limits in LIMITS.items()},
        }

    @classmethod
    def parse(cls, line: str) -> Problem:
        """The problem that `line` names.

        Raises
        ------
        ArgumentError
            The message holds the bad token and what is allowed there.
        """
        tokens = [token.strip() for token in _arguments.text(line, "line").strip().split(",")]
        if len(tokens) < 5:
            raise ArgumentError("case", line, f"operation,mode,dtype,layout,dims[,option=value...], such as {_EXAMPLE}")
        operation = _word(tokens[0], "operation", OPERATIONS | COMPOSED)
        values: dict[str, Any] = {
            "operation": operation,
            "composed": tokens[0] if tokens[0] in COMPOSED else "",
            "mode": _word(tokens[1], "mode", MODES),
            "dtype": _word(tokens[2], "dtype", DATA_TYPES),
            "dims": _sizes(tokens[4], "dims"),
        }
        layout = tokens[3]
        if layout.startswith("strides="):
            values["strides"] = _sizes(layout.removeprefix("strides="), "strides")
        else:
            order = _word(layout, "layout", LAYOUTS, also="strides=AxBx...")
            values["strides"] = _arguments.packed_strides(_arguments.dims(values["dims"]), order)
        allowed = OPTIONS[tokens[0]]
        for token in tokens[5:]:
            name, equals, text = token.partition("=")
            if not equals or name not in allowed:
                near = _words.meant(name, allowed) if name not in allowed else ""
                if name == "momentum" and near:
                    near = f"{near[:-1]} It is PyTorch's momentum, and 1 - momentum of Keras, ONNX and flax.)"
                raise ArgumentError("option", token, " ".join(f"{o}=" for o in allowed) + f" after {tokens[0]}{near}")
            if name in values:
                raise ArgumentError("option", token, f"{name}= once")
            values[name] = _READERS[name](text, name)
        if values.get("saved") == "variance":
            values |= {"saved": True, "saves_variance": True}
        return cls(**values)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Problem)}


@functools.cache
def _algorithms() -> tuple[tuple[str, ...], ...]:
    """Names that a plan takes on any backend, and those of them that take a number."""
    listings = (_core.algorithms, _core.numbered_algorithms)
    return tuple(tuple(dict.fromkeys(name for b in _core.backends() for name in listed(b))) for listed in listings)


def _choice(words: Iterable[str]) -> str:
    return " | ".join(words)


def _word(token: str, argument: str, words: dict[str, Any], also: str = "") -> Any:
    if token not in words:
        raise ArgumentError(argument, token, _choice([*words, also] if also else words))
    return words[token]


def is_integer(text: str) -> bool:
    """Say whether it is a number >= 0 of no more digits than one of 64 bits: of thousands `int` makes none."""
    return text.isascii() and text.isdigit() and len(text) <= 20


def _sizes(text: str, argument: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(map(is_integer, parts)):
        raise ArgumentError(argument, text, "positive integers joined by x, such as 8x64x32x32")
    return tuple(map(int, parts))


def _number(text: str, argument: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(argument, text, "a number") from None


def _integer(text: str, argument: str) -> int:
    if not is_integer(text):
        raise ArgumentError(argument, text, f"an integer from {_RANGES[argument][0]} to {_RANGES[argument][1]}")
    return int(text)


def _flag(text: str, argument: str) -> bool | str:
    if argument == "saved" and text == "variance":
        return text
    if text not in ("0", "1"):
        more = " or variance (the variance in place of 1/sigma)" if argument == "saved" else ""
        raise ArgumentError(argument, text, f"0 (absent) or 1 (given){more}")
    return text == "1"


_READERS: dict[str, Callable[[str, str], Any]] = dict.fromkeys(_ORDER, _number) | {
    **dict.fromkeys(("fill", "data", "algorithm", *CHOICES), lambda text, _: text),
    **dict.fromkeys(FLAGS, _flag),
    "params": lambda text, argument: _word(text, argument, DATA_TYPES),
    "activation": lambda text, argument: _word(text, argument, ACTIVATIONS),
    **dict.fromkeys(_RANGES, _integer),
    "seed": lambda text, argument: secrets.randbits(32) if text == RANDOM else _integer(text, argument),
}


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, DataType):
        return value.short
    if isinstance(value, Activation):
        return value.name.lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def vector_dtype(problem: Problem, name: str) -> DataType:
    """The dtype of a vector, by its field or output: the saved pair is wider than parameters of the data's 16 bits."""
    saved = name in ("saved_mean", "saved_inv_variance") and not problem.composed
    return problem.default_params if saved and problem.parameter_dtype == problem.dtype else problem.parameter_dtype
