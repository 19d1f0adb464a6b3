"""Large arrays in threads: NumPy lets go of the interpreter's lock while it computes."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["LARGE", "in_threads", "threads"]

LARGE = 1 << 20
"""Elements of an array from which threads take less time than one."""


def threads() -> int:
    """Threads that make a large array: the processors that this process may use, or OMP_NUM_THREADS if that is less.

    A worker that is one of several jobs has its share of the processors there (`pybnorm.check.run.executors`).
    """
    allowed, given = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed, max(1, int(given))) if given.isdecimal() else allowed


def in_threads(function: Callable[[int], None], items: Sequence[int]) -> None:
    """Call a function of each item; each must write to a place of its own, so that their order does not matter."""
    count = min(threads(), len(items))
    if count <= 1:
        for item in items:
            function(item)
        return
    states = np.geterr()  # a thread has its own

    def call(item: int) -> None:
        with np.errstate(**states):
            function(item)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(contextvars.copy_context().run, call, item) for item in items]:
            done.result()
