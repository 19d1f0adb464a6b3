"""What a run of `benchmarks.device` comes to: ratios to a rival, and everything as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

__all__ = ["LOW_RATIO", "render", "summarize"]

NAMED = 4
"""Cases that are left out for one reason are named up to this number; JSON has all."""

LARGE_BYTES = 50 << 20
"""The summary has the percent of the ceiling of tensors from this size."""
LOW_RATIO = 0.97
"""A row whose ratio is below this is listed."""

Row = dict[str, Any]


def summarize(rows: Sequence[Row], name: str, base: str) -> dict[str, Any]:
    """The ratios of a rival's times to those of one algorithm; above 1 the algorithm is faster.

    Returns
    -------
    dict
        ``base``; ``rows``, how many have both; ``geometric_mean`` of all and ``worst``, the lowest (None without rows);
        ``below``, the rows under `LOW_RATIO`, lowest first; ``groups`` by operation, layout and dtype with
        ``geometric_mean``, ``lowest``, and ``lowest_percent`` of the ceiling among tensors of `LARGE_BYTES` and more
        (None without).
    """
    found = []
    percents: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        group = (row["operation"], row["layout"], row["dtype"])
        own, other = row["contenders"].get(name, {}), row["contenders"].get(base, {})
        if "seconds" in own and row["tensor_bytes"] >= LARGE_BYTES:
            percents.setdefault(group, []).append(own["percent"])
        if "seconds" in own and "seconds" in other:
            keys = ("operation", "layout", "dtype", "shape", "hot")
            found.append({key: row[key] for key in keys} | {"ratio": other["seconds"] / own["seconds"]})
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in found:
        groups.setdefault((row["operation"], row["layout"], row["dtype"]), []).append(row["ratio"])
    ordered = sorted(found, key=lambda row: row["ratio"])
    return {
        "base": base,
        "rows": len(found),
        "geometric_mean": statistics.geometric_mean([row["ratio"] for row in found]) if found else None,
        "worst": ordered[0] if found else None,
        "below": [row for row in ordered if row["ratio"] < LOW_RATIO],
        "groups": [
            dict(zip(("operation", "layout", "dtype"), group, strict=True))
            | {
                "rows": len(ratios),
                "geometric_mean": statistics.geometric_mean(ratios),
                "lowest": min(ratios),
                "lowest_percent": min(percents[group]) if group in percents else None,
            }
            for group, ratios in groups.items()
        ],
    }


def render(result: Mapping[str, Any], console: Any) -> None:
    """Print what `benchmarks.device.run` returned as tables."""
    tables = _Tables(console)
    tables.head(result)
    if result["host"]:
        tables.host(result)
    if result["rows"]:
        tables.rows(result)
    for name, summary in result["summary"].items():
        tables.summary(name, summary)
    reasons: dict[str, list[str]] = {}
    for left in result["left_out"]:
        reasons.setdefault(left["reason"], []).append(left["case"])
    for reason, left_out in reasons.items():
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        tables.say(f"left out: {', '.join(left_out[:NAMED])}{more}: {reason}", "yellow")
    if not result["complete"]:
        tables.say(f"{result['stopped']}: the rows above are those that were finished", "bold red")


class _Tables:
    def __init__(self, console: Any) -> None:
        self._console = console

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def _print(self, columns: Sequence[str], left: int, rows: Sequence[Sequence[str]]) -> None:
        """A table whose first `left` columns are aligned to the left."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def head(self, result: Mapping[str, Any]) -> None:
        library, ceiling = result["library"], result["ceiling"]
        version = ".".join(map(str, library["version"]))
        self.say(f"{library['label']} {version} ({library['found_via']}) on {result['device']}")
        self.say(f"shapes: {', '.join(result['shapes'])}")
        self.say(f"ceiling {ceiling['bytes_per_second'] / 1e9:.0f} GB/s: {ceiling['how']}")
        for name, found in result["rivals"].items():
            if "absent" in found:
                self.say(f"{name}: not measured, {found['absent']}", "yellow")
            else:
                self.say(f"{name}: " + ", ".join(v if k == "version" else f"{k} {v}" for k, v in found.items()))

    def host(self, result: Mapping[str, Any]) -> None:
        self._console.print()
        self.say(f"host microseconds per call, tensor {'x'.join(map(str, result['host_shape']))} f32 nchw")
        # An algorithm's name differs between operations; the way to call is what counts in a line.
        ways: dict[str, dict[str, str]] = {}
        for row in result["host"]:
            way, note = row["call"], ""
            if way.startswith("plan "):
                algorithm, _, rest = way[5:].partition(", ")
                way, note = f"plan, {rest}", f" {algorithm}"
            text = f"{row['microseconds']:.2f}{note}" if "microseconds" in row else row["failure"]
            ways.setdefault(way, {})[row["operation"]] = text
        kinds = list(dict.fromkeys(row["operation"] for row in result["host"]))
        rows = [(way, *(cells.get(kind, "-") for kind in kinds)) for way, cells in ways.items()]
        self._print(("call", *kinds), 1, rows)

    def rows(self, result: Mapping[str, Any]) -> None:
        self._console.print()
        self.say(
            "microseconds per call, percent of the ceiling; * hot: stays in the cache, ! spread over 5 %, "
            "~ events around plain calls"
        )
        names = list(result["rows"][0]["contenders"])
        rows, failures = [], []
        for row in result["rows"]:
            place = [row[key] for key in ("operation", "layout", "dtype")]
            shape = "x".join(map(str, row["shape"])) + ("*" if row["hot"] else "")
            rows.append((*place, shape, *(_cell(row["contenders"][name]) for name in names)))
            for name, found in row["contenders"].items():
                if "failure" in found:
                    failures.append(f"{name}, {_row_name(row)}: {found['failure']}")
        self._print(("operation", "layout", "dtype", "shape", *names), 4, rows)
        for failure in failures:
            self.say(failure, "bold red")

    def summary(self, name: str, summary: Mapping[str, Any]) -> None:
        self._console.print()
        if not summary["rows"]:
            self.say(f"{name}: no row to compare with {summary['base']}")
            return
        worst = summary["worst"]
        self.say(
            f"{name} against {summary['base']}, ratio of times (above 1: {name} is faster): geometric mean "
            f"{summary['geometric_mean']:.2f} over {summary['rows']} rows, worst {worst['ratio']:.2f} "
            f"({_row_name(worst)}), {len(summary['below'])} below {LOW_RATIO}"
        )
        rows = []
        for group in summary["groups"]:
            place, percent = [group[key] for key in ("operation", "layout", "dtype")], group["lowest_percent"]
            ratios = f"{group['geometric_mean']:.2f}", f"{group['lowest']:.2f}"
            rows.append((*place, *ratios, "-" if percent is None else f"{percent:.0f}"))
        columns = ("operation", "layout", "dtype", "geometric mean", "lowest", "lowest % of ceiling, large")
        self._print(columns, 3, rows)
        for row in summary["below"]:
            self.say(f"  {row['ratio']:.2f}  {_row_name(row)}")


def _row_name(row: Mapping[str, Any]) -> str:
    name = f"{row['operation']} {row['layout']} {row['dtype']} {'x'.join(map(str, row['shape']))}"
    return name + (" hot" if row["hot"] else "")


def _cell(found: Mapping[str, Any]) -> str:
    if "seconds" not in found:
        return "FAILED" if "failure" in found else "n/s"
    marks = ("!" if found["spread"] > 0.05 else "") + ("~" if found["method"] == "events around calls" else "")
    words = [f"{found['seconds'] * 1e6:.4g}{marks}", f"{found['percent']:.0f}%"]
    if found.get("algorithm"):
        words.append(found["algorithm"])
    return " ".join(words)
