"""Memory of the CPU between pages without access: a read or write outside of an array is caught and named.

A handler of the fault notes the address, opens the page for reading, later for writing, and lets the kernel go on: one
run names all arrays that are left. It is Python code (ctypes), which runs in whatever thread the fault is in and needs
the interpreter's lock; a vendor call is made without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from pybnorm._arrays import CPU, Buffer
from pybnorm.devices._copying import Allocation
from pybnorm.enums import DataType
from pybnorm.reference.namespaces import Array

_WIDTH = 16 * mmap.PAGESIZE
"""Bytes without access at each end."""
_NONE, _READ, _WRITE = 0, 1, 3
_SIGINFO = 4
_ADDRESS = 16 if ctypes.sizeof(ctypes.c_void_p) == 8 else 12
"""The offset of a fault's address in ``siginfo_t``."""


class _Action(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (1024 // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def reason(device_type: int) -> str:
    """Why there can be no fence, or nothing."""
    if device_type != CPU:
        return "only the memory of a CPU has pages that can be fenced"
    return "" if sys.platform.startswith("linux") else "pages can be fenced with Linux only"


def described(owner: Array, address: int, size: int) -> Buffer:
    """Bytes of the CPU as a buffer: devices copy floating-point arrays, so these are of the narrowest type."""
    allocation = Allocation(owner, address, size, np.dtype(np.float16))
    return Buffer(address, (size // 2,), (1,), DataType.FLOAT16, CPU, 0, True, allocation)


class Fence:
    """Memory for `image`, with a page without access at each end; it lies against `side`, ``"start"`` or ``"end"``."""

    def __init__(self, name: str, image: Array, side: str) -> None:
        self.name = name
        inner = -(-max(image.size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapping = mmap.mmap(-1, inner + 2 * _WIDTH)
        whole = np.frombuffer(self._mapping, np.uint8)
        whole[:] = 0xFF  # NaN, for a read that goes on
        self._base = int(whole.ctypes.data)
        self._ends = self._base, self._base + _WIDTH + inner
        self.first = self._base + _WIDTH + (inner - image.size if side == "end" else 0)
        self.size = image.size
        start = self.first - self._base
        whole[start : start + image.size] = image
        self.buffer = described(whole, self.first, image.size)
        self._access = [_NONE, _NONE]
        self._touches: set[tuple[int, int]] = set()
        self._found: dict[str, str] = {}
        """Reads and writes outside, by place."""
        for low in self._ends:
            _protect(low, _NONE)

    def meets(self, address: int) -> bool:
        """Note a fault, and open the page for what was tried; False where the address lies elsewhere."""
        for number, low in enumerate(self._ends):
            if not low <= address < low + _WIDTH:
                continue
            touch = address, threading.get_ident()
            # the same again, though it may be read by now: it is written
            written = self._access[number] == _READ and touch in self._touches
            self._touches.add(touch)
            if self._access[number] == _NONE or written:
                behind = address - self.first - self.size
                where = (
                    f"{behind} bytes behind its end"
                    if behind >= 0
                    else f"{self.first - address} bytes before its start"
                )
                self._found[where] = "wrote" if written else "read"  # a write is taken for a read first
                self._access[number] = _WRITE if written else _READ
                _protect(low, self._access[number])
            return True
        return False

    def told(self) -> list[str]:
        """The faults that were found."""
        return [f"{word} outside of {self.name}: {where}" for where, word in self._found.items()]


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return library


def _protect(low: int, access: int) -> None:
    if _libc().mprotect(low, _WIDTH, access):
        raise MemoryError(f"mprotect: error {ctypes.get_errno()}")


@contextlib.contextmanager
def watched(fences: list[Fence]) -> Iterator[None]:
    """Catch what touches the fences inside a ``with`` block; any other fault ends the process as it would have."""
    if not fences:
        yield
        return
    libc, before = _libc(), _Action()

    def met(number: int, info: int, _: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS).value or 0
        if not any(fence.meets(address) for fence in fences):
            libc.sigaction(number, ctypes.addressof(before), None)  # and the fault comes again

    handler = _HANDLER(met)
    action = _Action(ctypes.cast(handler, ctypes.c_void_p).value, flags=_SIGINFO)
    libc.sigaction(signal.SIGSEGV, ctypes.addressof(action), ctypes.addressof(before))
    try:
        yield
    finally:
        libc.sigaction(signal.SIGSEGV, ctypes.addressof(before), None)
