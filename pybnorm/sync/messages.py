"""The messages between ranks: headers, failures, and integers as floats.

A message is a vector of two sections, each of a parameter's length rounded up, and a header. Forward sends mean and
variance over n - 1, backward sum_dy and sum_dy_xmu. Communicators add floats only, so a header carries a count as
digits whose sums over ranks stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pybnorm._core import backends
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, RankError
from pybnorm.sync.communicators import Array, Communicator

FORWARD, BACKWARD, FAILED = 1, 2, 0  # the code in a header: the sender's call
_ALIGN = 16  # elements; sections of a message start at multiples of 64 bytes
_HEADER = 16
_CODE, _COUNT, _FAILURES, _FAILED_RANK = 0, 1, 4, 5  # fields of a header; the count takes _DIGITS
_BASE = 4096  # of the digits of a count: sums over 4096 ranks are exact in float32
_DIGITS = 3
_WEIGHT = 6  # the count again, as one number that a device can compute with: forward's alone
_NO_WEIGHT = 2.0**-100  # of an empty rank: nothing beside a count, and 1 over it is finite


def _digits(number: int) -> list[float]:
    """Digits of an integer below 2**36, lowest first."""
    return [float(number // _BASE**place % _BASE) for place in range(_DIGITS)]


def _number(digits: Array) -> int:
    return sum(round(float(digit)) * _BASE**place for place, digit in enumerate(digits))


class _Agreed(NamedTuple):
    """The constructor's header of one rank."""

    failed: int = 1
    dtype: int = 0
    backend: int = 0
    deterministic: int = 0
    counts: int = 0
    """0 without counts, else a hash of them."""
    channels: tuple[int, ...] = ()

    def message(self) -> Array:
        """The digits of all fields; channels are sent as their number and 8 sizes."""
        sizes = (*self.channels, *[0] * (8 - len(self.channels)))
        return np.array([d for n in (*self[:5], len(self.channels), *sizes) for d in _digits(n)], np.float32)

    @classmethod
    def of(cls, message: Array) -> _Agreed:
        """Read what `message` wrote."""
        numbers = [_number(digits) for digits in message.reshape(-1, _DIGITS)]
        failed, dtype, backend, deterministic, counts, rank, *sizes = numbers
        return cls(failed, dtype, backend, deterministic, counts, tuple(sizes[:rank]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _raise_failed(failed: Sequence[int], me: int) -> NoReturn:
    raise RankError(f"rank {me}: the call cannot be completed, because it failed on {_ranks(failed)}", failed)


def _message(values: int, dtype: np.dtype[Any], rank: int, code: int, fill: float = 0.0) -> Array:
    """A message of so many values and a header."""
    body, header = np.full(values, fill, dtype), np.zeros(_HEADER, dtype)
    header[_CODE], header[_WEIGHT] = code, _NO_WEIGHT
    if code == FAILED:
        header[_FAILURES], header[_FAILED_RANK] = 1, rank + 1
    return np.concatenate([body, header])


def _read_headers(heads: Array, code: int, gathered: bool, adapter: Communicator) -> tuple[int, ...]:
    """The counts in the headers of the ranks, or in their sum; raises if a rank failed or none has any element."""
    me = adapter.rank
    if gathered:
        failed = tuple(np.flatnonzero(heads[:, _CODE] == FAILED).tolist())
        if failed:
            _raise_failed(failed, me)
        others = tuple(np.flatnonzero(heads[:, _CODE] != code).tolist())
        if others:
            names = {FORWARD: "forward", BACKWARD: "backward"}
            raise RankError(f"rank {me} called {names[code]}, but {_ranks(others)} did not: other calls", others)
    else:
        heads = heads[:1]
        failures = round(float(heads[0, _FAILURES]))
        if failures == 1:
            _raise_failed((round(float(heads[0, _FAILED_RANK])) - 1,), me)
        if heads[0, _CODE] != code * adapter.size:
            raise RankError(f"rank {me}: the call cannot be completed, because it failed on {failures} other ranks")
    counts = tuple([_number(head[_COUNT : _COUNT + _DIGITS]) for head in heads])
    if not any(counts):
        raise ArgumentError("x", "no elements on any rank", "at least one rank with elements")
    return counts


def _agree(adapter: Communicator, mine: _Agreed, failure: Exception | None) -> None:
    """Exchange the constructor's headers; raise on all ranks if one failed or they differ."""
    values, device, size = mine.message(), adapter.devices[0], adapter.size
    received = adapter.vector(np.zeros(size * values.size, np.float32), device, 0)
    adapter.all_gather(adapter.vector(values, device, 0), received, 0)
    host = np.zeros(size * values.size, np.float32)
    adapter.read(received, host, 0)
    if failure is not None:
        raise failure
    heads = [_Agreed.of(row) for row in host.reshape(size, -1)]
    failed = [rank for rank, head in enumerate(heads) if head.failed]
    if failed:
        message = f"rank {adapter.rank}: no SyncBatchNorm, because its arguments were refused on {_ranks(failed)}"
        raise RankError(message, failed)
    names = backends()
    texts: dict[str, list[str]] = {
        "channels": [str(head.channels[0] if len(head.channels) == 1 else head.channels) for head in heads],
        "dtype": [DataType(head.dtype).short for head in heads],
        "backend": [names[head.backend] for head in heads],
        "deterministic": [str(bool(head.deterministic)) for head in heads],
        "counts": [f"#{head.counts:x}" if head.counts else "None" for head in heads],
    }
    for field, shown in texts.items():
        if len({getattr(head, field) for head in heads}) > 1:
            given = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
            raise ArgumentError("handle" if field == "backend" else field, given, f"one {field} on all ranks")
