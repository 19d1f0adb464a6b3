"""Runs the case of each known defect on the library of this machine: the evidence that the table names.

python ci/defects-seen.py BACKEND >>docs/results/defects-BACKEND.txt
"""

import dataclasses
import datetime
import os
import re
import sys
import tempfile
from pathlib import Path

from pybnorm.check.judging.results import BackendInfo, CaseResult, version_text
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.executors import annotated
from pybnorm.check.run.worker import Worker
from pybnorm.defects import DEFECTS, Defect
from pybnorm.defects.kinds import BACKWARD


def tuned(case: str, folder: Path) -> CaseResult:
    """A case's result while MIOpen tunes it; its record then names kernel variant 1, as where that is the fastest."""
    with Worker("miopen", timeout=300, environment={"MIOPEN_FIND_ENFORCE": "SEARCH"}) as worker:
        result = worker.run(Problem.parse(case))
    for record in folder.glob("batchnorm_*.udb.txt"):
        record.write_text(re.sub(r":Variant\S+", ":Variant1-1", record.read_text()))
    return result


def ran(defect: Defect, folder: Path) -> tuple[BackendInfo, CaseResult, CaseResult]:
    """The library, and what it and algorithm "auto" make of a case; MIOPEN_USER_DB_PATH names the empty `folder`."""
    searched = tuned(defect.case, folder) if defect.tuned else None
    problem = Problem.parse(defect.case)
    auto = dataclasses.replace(problem, algorithm="auto")
    with Worker(defect.backend, timeout=300, environment={"OMP_NUM_THREADS": "1"}) as worker:
        info = worker.describe()
        # backward shows what tuning leaves; the other calls show what it does meanwhile
        result = searched if searched and defect.outputs != BACKWARD else worker.run(problem)
        return info, annotated(result, info, problem), worker.run(auto)


def main(backend: str) -> None:
    with Worker(backend, timeout=300) as worker:
        info = worker.describe()
    date = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"\n{version_text(info)}, build {info.digest}, on {info.device}, {date}")
    for defect in DEFECTS:
        own = defect.backend == backend and defect.in_version(info.version, info.digest)
        if not own or not defect.on_card(info.device):
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MIOPEN_USER_DB_PATH"] = folder
            _, result, _ = ran(defect, Path(folder))
        worst = max((v.ratio for v in result.verdicts), default=0.0)
        print(f"{defect.id:<36} {result.status.value:<12} {worst:<9.3g} {result.known or '-'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
