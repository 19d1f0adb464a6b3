"""One launch of each kind of communicator for all tests, and the worst ratios at the end."""

import pytest
from sync_launch import GPU_KINDS, KINDS, launch, ranks_of, scenarios_of


@pytest.fixture(scope="session", params=KINDS)
def ranks(request, tmp_path_factory, need_device):
    """(kind, size, results by rank) of one launch with every scenario."""
    kind = request.param
    size = ranks_of(kind)
    need_device("cudnn" if kind in GPU_KINDS else "onednn")
    return kind, size, launch(kind, size, tmp_path_factory.mktemp(kind), scenarios_of(kind))


def pytest_terminal_summary(terminalreporter):
    """The worst error / bound over each communicator."""
    import test_sync

    if test_sync.worst:
        terminalreporter.section("sync: worst error / bound")
        for (kind, dtype, output), ratio in sorted(test_sync.worst.items()):
            terminalreporter.write_line(f"{kind:<10}{dtype:<6}{output:<20}{ratio:.3f}")
