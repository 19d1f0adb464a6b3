"""On random problems no way to make a call gives a wrong number: it is right, or it refuses and says why."""

import pytest
from random_problems import WAYS, problems, run

from pybnorm.check.judging.bounds import Status
from pybnorm.defects import Effect, named


@pytest.mark.parametrize("name", WAYS)
def test_no_way_gives_a_wrong_number(name, handle):
    way = WAYS[name](handle.backend)
    statuses = []
    with way.handle:
        for problem in problems(16, 15, 8_000):
            result = run(problem, way)
            statuses.append(result.status)
            if result.status in (Status.PASS, Status.MISTRUSTED):  # what a problem's data cannot show is not judged
                continue
            what = f"{problem}: {result.status.name} {result.message} {[(v.output, v.ratio) for v in result.verdicts]}"
            if result.status == Status.UNSUPPORTED:
                assert "UnsupportedError" in result.message, what
                continue
            assert result.known, what
            assert all(named(identity).effect == Effect.WEAK for identity in result.known.split(", ")), what
    assert statuses.count(Status.PASS) > len(statuses) / 2, statuses
