"""On random problems no way to make a call gives a wrong number: it is right, or it refuses and says why."""

import pytest
from random_problems import WAYS, judged, problems

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.known_defects import explain
from pybnorm.defects import Effect, named


@pytest.mark.parametrize("way", WAYS)
def test_no_way_gives_a_wrong_number(way, handle):
    found, statuses = problems(16, 15, 8_000), []
    for problem, result in zip(found, judged(found, way, handle.backend), strict=True):
        statuses.append(result.status)
        if result.status in (Status.PASS, Status.MISTRUSTED):  # what a problem's data cannot show is not judged
            continue
        what = f"{problem}: {result.status.name} {result.message} {[(v.output, v.ratio) for v in result.verdicts]}"
        if result.status == Status.UNSUPPORTED:
            assert "UnsupportedError" in result.message, what
            continue
        version = handle.library.version
        known = explain(handle.backend, version, problem, result.verdicts, result.status, result.message)
        assert known, what
        assert all(named(defect.id).effect == Effect.WEAK for defect in known), what
    assert statuses.count(Status.PASS) > len(statuses) / 2, statuses
