"""Writes docs/results/findings.md: what saved runs of frameworks found wrong, or less accurate than blocked sums.

pybnorm check --implementation FILE.py:CLASS --suite smoke --suite standard --json RUN.json
python ci/findings-page.py RUN.json...
"""

import collections
import json
import sys
from pathlib import Path

HEAD = """# Known findings in frameworks

What `pybnorm check` found in the kernels of frameworks; made of saved runs by `python ci/findings-page.py RUN.json...`.
A line stands for all cases of one operation, dtype, layout and rank.
Its command, in `examples/implementations`, shows the worst again.
FAIL is wrong by the bound of every correct kernel; CHAIN is [less accurate](../judging.md) than blocked sums.
"""
COLUMNS = (
    "| operation | dtype | layout | rank | status | cases | outputs, error / bound | to see it |\n" + "|---" * 8 + "|"
)


def findings(cases: list[dict]) -> list[str]:
    """The rows of a run's table, the worst first."""
    groups: dict[tuple, list[dict]] = collections.defaultdict(list)
    for case in cases:
        if case["status"] in ("FAIL", "CHAIN") and case["verdicts"]:
            operation, _, dtype, layout, dims = case["case"].split(",")[:5]
            key = (operation, dtype, layout.partition("=")[0], len(dims.split("x")), case["status"])
            groups[key].append(case)
    return [row for _, row in sorted((row_of(key, group) for key, group in groups.items()), reverse=True)]


def row_of(key: tuple, group: list[dict]) -> tuple[tuple[bool, float], str]:
    """What a group is sorted by, and its row."""
    worst: dict[str, float] = {}
    for case in group:
        for verdict in case["verdicts"]:
            if verdict["status"] == case["status"]:
                worst[verdict["output"]] = max(worst.get(verdict["output"], 0.0), float(verdict["ratio"]))
    shown = max(group, key=lambda case: max(float(v["ratio"]) for v in case["verdicts"]))
    outputs = ", ".join(f"{name} {ratio:.3g}" for name, ratio in worst.items())
    cells = [*map(str, key), str(len(group)), outputs, f"`{shown['repro']}`"]
    return (key[-1] == "FAIL", max(worst.values(), default=0.0)), f"| {' | '.join(cells)} |"


def section(run: dict) -> str:
    """A run's part of the page."""
    (backend,) = run["backends"]
    place = run["environment"]
    version = ".".join(map(str, backend["version"]))
    counts = collections.Counter(case["status"] for case in run["cases"])
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    lines = [f"## {backend['label']} {version} on {backend['device']}", "", f"{told}; {place['date'][:10]}.", ""]
    rows = findings(run["cases"])
    return "\n".join([*lines, *([COLUMNS, *rows] if rows else ["Nothing."]), ""])


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "results" / "findings.md"
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    target.write_text("\n".join([HEAD, *map(section, runs)]))
    print(target)
