"""The bench fixture, and how many cases MIOpen has to compile kernels for."""

import collections
import zlib

import pytest
from operation_bench import Bench

MOST_ON_MIOPEN = 24


def pytest_collection_modifyitems(config, items):
    """MIOpen compiles kernels for each shape: of a test with many cases, so many that their names choose."""
    found = collections.defaultdict(list)
    for item in items:
        here = item.path.parent.name == "operations" and hasattr(item, "callspec")
        if here and item.callspec.params.get("backend") == "miopen":
            found[item.function].append(item)
    left = set()
    for many in found.values():
        left.update(sorted(many, key=lambda item: zlib.crc32(item.nodeid.encode()))[MOST_ON_MIOPEN:])
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def bench(right):
    """The operations on each backend that finds a device."""
    return Bench(right)
