"""The bench fixture, and the table of worst ratios at the end of a run."""

import collections
import itertools
import zlib

import pytest
from operation_bench import Bench, worst

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


def pytest_terminal_summary(terminalreporter):
    """The worst error / bound of every operation, backend and dtype that ran."""
    if worst:
        terminalreporter.section("operations: worst error / bound")
        backends = sorted({(b, d) for _, b, d in worst})
        terminalreporter.write_line(" " * 34 + "".join(f"{b}/{d}".rjust(13) for b, d in backends))
        for name, rows in itertools.groupby(sorted(worst), key=lambda key: key[0]):
            ratios = {key[1:]: worst[key] for key in rows}
            cells = [f"{ratios[key]:.3f}" if key in ratios else "-" for key in backends]
            terminalreporter.write_line(name.ljust(34) + "".join(cell.rjust(13) for cell in cells))
