"""A comparison as JSON; ``schema.json`` describes it."""

from __future__ import annotations

import datetime
from typing import Any

from pybnorm import __version__
from pybnorm.check.compare import conclusions
from pybnorm.check.compare.comparison import CasePair, Comparison
from pybnorm.check.judging.results import to_json

__all__ = ["SCHEMA", "contents", "document"]

SCHEMA = "pybnorm.compare/1"


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as `json.dumps` writes it; ``schema.json`` describes it."""
    return to_json(contents(comparison))


def contents(comparison: Comparison) -> dict[str, Any]:
    """Collect what `document` makes JSON of; the cases, which are many, are made one after another."""
    return {
        "schema": SCHEMA,
        "pybnorm": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "runs": [
            {
                "name": run.name,
                "path": run.path,
                "environment": run.environment,
                "backends": list(run.backends.values()),
                "cases": len(run.results),
                "outputs": sum(bool(r.saved) for r in run.results.values()) if run.folder is not None else 0,
                "complete": run.complete,
            }
            for run in comparison.runs
        ],
        "conclusions": [vars(found) for found in conclusions.found(comparison)],
        "pairs": [vars(pair) for pair in comparison.pairs],
        "cases": (
            vars(case) | {"outcome": case.outcome.value, "change": case.change.value, "outputs": _outputs(case)}
            for case in comparison.cases
        ),
        "alone": [vars(item) for item in comparison.alone],
        "only": comparison.only,
        "notices": comparison.notices,
        "lost": [vars(item) for item in comparison.lost],
        "allow_known": comparison.allow_known,
        "exit_status": comparison.exit_status,
    }


def _outputs(case: CasePair) -> list[dict[str, Any]]:
    return [
        vars(o)
        | {
            "outcome": o.outcome.value,
            # the points of differences within the bounds are many and of no interest
            "worst": [vars(point) for point in o.worst] if not o.outcome.good else [],
        }
        for o in case.outputs
    ]
