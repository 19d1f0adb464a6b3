"""The problem language: one batch-norm case on one line that a shell passes through unquoted.

::

    train,spatial,f32,nchw,8x64x32x32,fill=randn,kappa=3,alpha=2,beta=0.5,running=0,saved=0,factor=0.25,eps=1e-05,seed=7

Five positional tokens (operation, mode, dtype, layout, dims), then options in any order. Options at their default are
left out when a problem is printed. `expand` also takes alternatives separated by ``/`` in any token and multiplies
them out: ``train/infer,spatial,f32/bf16,nchw/nhwc,4x3x5x7``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pybnorm import _arguments
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

__all__ = ["FILLS", "OPTIONS", "Problem", "default_epsilon", "expand", "read_suite"]

OPERATIONS = {
    "train": Operation.FORWARD_TRAINING,
    "infer": Operation.FORWARD_INFERENCE,
    "backward": Operation.BACKWARD,
}
MODES = {"spatial": Mode.SPATIAL, "persistent": Mode.SPATIAL_PERSISTENT, "peract": Mode.PER_ACTIVATION}
DATA_TYPES = {d.short: d for d in DataType}
LAYOUTS = {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST}
FILLS = ("exact", "randn")

_COMMON = ("fill", "kappa", "alpha", "beta", "eps", "seed")
OPTIONS = {
    Operation.FORWARD_TRAINING: (*_COMMON, "running", "saved", "factor"),
    Operation.FORWARD_INFERENCE: _COMMON,
    Operation.BACKWARD: (*_COMMON, "alpha_param", "beta_param", "saved"),
}
"""Which options each operation has."""

SEED_MAX = 2**64 - 1
_ORDER = ("fill", "kappa", "alpha", "beta", "alpha_param", "beta_param", "running", "saved", "factor", "eps", "seed")


def default_epsilon(operation: Operation, fill: str, m: int) -> float:
    """The epsilon of a problem that names none.

    For the exact fill it is the one that makes 1/sqrt(variance + epsilon) a power of two: 1/16 beside the variance
    3/16 of its three-valued data, 3/4 beside the variance 1/4 of the two-valued data that an even m not divisible by 8
    gets. Other fills use 1e-5.
    """
    if fill != "exact":
        return 1e-5
    if operation != Operation.FORWARD_INFERENCE and m % 2 == 0 and m % 8 != 0:
        return 0.75
    return 0.0625


@dataclasses.dataclass(frozen=True)
class Problem:
    """One case. Immutable and hashable; ``str()`` prints its line and `Problem.parse` reads it back equal.

    Parameters
    ----------
    operation : Operation
        FORWARD_TRAINING, FORWARD_INFERENCE or BACKWARD.
    mode : Mode
    dtype : DataType
        Of x, y, dy and dx; parameters and statistics are float64 for float64 data, else float32.
    dims : tuple of int
        N, C, then 0 to 6 spatial sizes.
    strides : tuple of int, optional
        In elements; packed channels-first when left out.
    fill : str
        ``"exact"`` or ``"randn"``.
    kappa : float
        \\|mean\\| / standard deviation of x (``fill="randn"`` only).
    alpha, beta : float
        out = alpha * result + beta * prior; in backward the data pair, for dx.
    alpha_param, beta_param : float
        The same for dscale and dbias.
    running : bool
        Training updates running statistics.
    saved : bool
        Training writes, backward reads, the saved statistics.
    factor : float
        Exponential average factor.
    eps : float, optional
        Epsilon; see `default_epsilon`.
    seed : int
        Of the counter-based generator, 0 to 2**64 - 1.

    Raises
    ------
    ArgumentError
        A value that is not allowed; the message names the token and what is allowed.
    """

    operation: Operation
    mode: Mode
    dtype: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...] = ()
    fill: str = "exact"
    kappa: float = 0.0
    alpha: float = 1.0
    beta: float = 0.0
    alpha_param: float = 1.0
    beta_param: float = 0.0
    running: bool = True
    saved: bool = True
    factor: float = 0.25
    eps: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("operation", _arguments.operation(self.operation))
        if self.operation not in OPTIONS:
            raise ArgumentError("operation", self.operation, _choice(OPERATIONS))
        put("mode", _arguments.mode(self.mode))
        put("dtype", _arguments.data_type(self.dtype))
        put("dims", _arguments.dims(self.dims))
        put("strides", _arguments.strides(self.strides or _arguments.packed_strides(self.dims), self.dims))
        if self.fill not in FILLS:
            raise ArgumentError("fill", self.fill, _choice(FILLS))
        for name in ("kappa", "alpha", "beta", "alpha_param", "beta_param"):
            put(name, _arguments.scalar(getattr(self, name), name, self.dtype))
        put("factor", _arguments.factor(self.factor, "factor"))
        if self.kappa < 0:
            raise ArgumentError("kappa", self.kappa, "a finite number >= 0")
        if self.kappa and self.fill != "randn":
            raise ArgumentError("kappa", self.kappa, f"kappa with fill=randn only (fill={self.fill})")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= SEED_MAX:
            raise ArgumentError("seed", self.seed, f"an integer from 0 to {SEED_MAX}")
        put("eps", _arguments.epsilon(self.default_epsilon if self.eps is None else self.eps))
        allowed = OPTIONS[self.operation]
        for field in dataclasses.fields(self):
            if field.name in _ORDER and field.name not in allowed and getattr(self, field.name) != field.default:
                raise ArgumentError(
                    field.name, getattr(self, field.name), f"for {self.word} only the options {', '.join(allowed)}"
                )
        if self.operation == Operation.FORWARD_TRAINING and self.running and self.m == 1:
            raise ArgumentError(
                "running", 1, "running=0 where a statistic is of one element: its unbiased variance is undefined"
            )

    # ------------------------------------------------------------ derived

    @property
    def word(self) -> str:
        """``train``, ``infer`` or ``backward``."""
        return next(word for word, operation in OPERATIONS.items() if operation == self.operation)

    @property
    def epsilon(self) -> float:
        """The epsilon of the call."""
        assert self.eps is not None
        return self.eps

    @property
    def default_epsilon(self) -> float:
        """What `eps` is when the line does not name it."""
        return default_epsilon(self.operation, self.fill, self.m)

    @property
    def m(self) -> int:
        """Elements per statistic."""
        return _arguments.reduced_count(self.dims, self.mode)

    @property
    def parameter_dims(self) -> tuple[int, ...]:
        """Shape of scale, bias and statistics: rank kept, reduced axes 1."""
        return _arguments.derived_dims(self.dims, self.mode)

    @property
    def parameter_dtype(self) -> DataType:
        """dtype of scale, bias and statistics."""
        return _arguments.derived_data_type(self.dtype)

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        """Axes that statistics sum over."""
        return _arguments.reduced_axes(len(self.dims), self.mode)

    @property
    def layout(self) -> Layout:
        """How x lies in memory."""
        return _arguments.layout_of(self.dims, self.strides)

    @property
    def recomputes(self) -> bool:
        """Whether the call takes mean and variance from x itself."""
        if self.operation == Operation.BACKWARD:
            return not self.saved
        return self.operation == Operation.FORWARD_TRAINING

    # ------------------------------------------------------------ text

    def __str__(self) -> str:
        tokens = [
            self.word,
            next(word for word, mode in MODES.items() if mode == self.mode),
            self.dtype.short,
            self._layout_token(),
            "x".join(map(str, self.dims)),
        ]
        for name in _ORDER:
            value = getattr(self, name)
            default = self.default_epsilon if name == "eps" else _DEFAULTS[name]
            if name in OPTIONS[self.operation] and value != default:
                tokens.append(f"{name}={_format(value)}")
        return ",".join(tokens)

    def _layout_token(self) -> str:
        for word, layout in LAYOUTS.items():
            if self.strides == _arguments.packed_strides(self.dims, layout):
                return word
        return "strides=" + "x".join(map(str, self.strides))

    @classmethod
    def parse(cls, line: str) -> Problem:
        """The problem that `line` names.

        Raises
        ------
        ArgumentError
            The message holds the bad token and what is allowed there.
        """
        tokens = [token.strip() for token in line.strip().split(",")]
        if len(tokens) < 5:
            raise ArgumentError("case", line, "operation,mode,dtype,layout,dims[,option=value...]")
        values: dict[str, Any] = {
            "operation": _word(tokens[0], "operation", OPERATIONS),
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
        allowed = OPTIONS[values["operation"]]
        for token in tokens[5:]:
            name, equals, text = token.partition("=")
            if not equals or name not in allowed:
                raise ArgumentError("option", token, " ".join(f"{o}=" for o in allowed) + f" after {tokens[0]}")
            if name in values:
                raise ArgumentError("option", token, f"{name}= once")
            values[name] = _READERS[name](text, name)
        return cls(**values)


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Problem)}


def _choice(words: Iterable[str]) -> str:
    return " | ".join(words)


def _word(token: str, argument: str, words: dict[str, Any], also: str = "") -> Any:
    if token not in words:
        raise ArgumentError(argument, token, _choice([*words, also] if also else words))
    return words[token]


def _sizes(text: str, argument: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(argument, text, "positive integers joined by x, such as 8x64x32x32")
    return tuple(map(int, parts))


def _number(text: str, argument: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(argument, text, "a number") from None


def _integer(text: str, argument: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(argument, text, f"an integer from 0 to {SEED_MAX}")
    return int(text)


def _flag(text: str, argument: str) -> bool:
    if text not in ("0", "1"):
        raise ArgumentError(argument, text, "0 (absent) or 1 (given)")
    return text == "1"


def _text(text: str, argument: str) -> str:
    return text


_READERS: dict[str, Callable[[str, str], Any]] = dict.fromkeys(_ORDER, _number) | {
    "fill": _text,
    "running": _flag,
    "saved": _flag,
    "seed": _integer,
}


def _format(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def expand(line: str) -> Iterator[Problem]:
    """Every problem of a line whose tokens may hold alternatives separated by ``/``, the last token varying fastest."""
    choices = []
    for token in line.strip().split(","):
        first, *rest = (part.strip() for part in token.split("/"))
        name, equals, _ = first.partition("=")
        choices.append([first, *(f"{name}={part}" if equals else part for part in rest)])
    for tokens in itertools.product(*choices):
        yield Problem.parse(",".join(tokens))


def read_suite(text: str, name: str = "suite") -> list[Problem]:
    """The problems of a suite file: one line each, alternatives multiplied out, ``#`` starts a comment.

    Alternatives of one line that mean the same, such as nchw/nhwc of one channel, are one problem.

    Raises
    ------
    ArgumentError
        With the file's name and line number in front of the bad token, also for a problem on two lines.
    """
    problems: dict[Problem, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        body = line.partition("#")[0].strip()
        if not body:
            continue
        try:
            for problem in expand(body):
                if problems.get(problem, number) != number:
                    raise ArgumentError("case", str(problem), f"each case once; it is on line {problems[problem]} too")
                problems[problem] = number
        except ArgumentError as error:
            raise ArgumentError(f"{name}:{number}: {error.argument}", error.value, error.allowed) from None
    if not problems:
        raise ArgumentError(name, "no case", "at least one case")
    return list(problems)
