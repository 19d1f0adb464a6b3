"""One page of the versions of a library: cases that any of them gets wrong, and from which version on.

python ci/version-matrix.py [--without TEXT] RUN.json... >PAGE.md

RUN.json: what `pybnorm check --json RUN.json` wrote, the oldest version first. TEXT: cases whose message has it in one
of the runs are counted, and left out: those that need a part of the library that was not there, say.
"""

import collections
import json
import sys

RIGHT = ("PASS", "WARN", "UNSUPPORTED")


def worst(case: dict) -> str:
    """The largest share of a bound, where the case was judged."""
    ratios = [float(verdict["ratio"]) for verdict in case["verdicts"]]
    if case["status"] not in ("PASS", "WARN", "FAIL") or not ratios:
        return case["status"]
    return f"{case['status']} {max(ratios):.3g}"


def bounds(statuses: list[str], names: list[str]) -> tuple[str, str]:
    """The first version that is wrong, and the first after it that is right."""
    bad = next((i for i, status in enumerate(statuses) if status not in RIGHT), None)
    if bad is None:
        return "-", "-"
    good = next((i for i in range(bad, len(names)) if statuses[i] in RIGHT), None)
    return names[bad], "-" if good is None else names[good]


def page(runs: list[dict], without: str = "") -> str:
    """Markdown: a table of the versions, and one of cases."""
    names, held = [], []
    for run in runs:
        (backend,) = run["backends"]
        names.append(".".join(map(str, backend["version"])))
        held.append({case["case"]: case for case in run["cases"]})
    lines = ["| version | machine | cases | " + " | ".join(("PASS", "WARN", "UNSUPPORTED", "others")) + " |"]
    lines.append("|---" * 7 + "|")
    for name, run, cases in zip(names, runs, held, strict=True):
        counts = collections.Counter(case["status"] for case in cases.values())
        others = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if status not in RIGHT) or "0"
        machine = run["backends"][0]["device"]
        lines.append(
            f"| {name} | {machine} | {len(cases)} | " + " | ".join(str(counts[s]) for s in RIGHT) + f" | {others} |"
        )
    common = sorted(set.intersection(*map(set, held)))
    left_out = [case for case in common if without and any(without in cases[case]["message"] for cases in held)]
    common = [case for case in common if case not in left_out]
    rows = []
    for case in common:
        statuses = [cases[case]["status"] for cases in held]
        if len(set(statuses)) > 1 or statuses[0] not in RIGHT:
            shown = " | ".join(worst(cases[case]) for cases in held)
            rows.append(f"| `{case}` | {shown} | " + " | ".join(bounds(statuses, names)) + " |")
    lines += [
        "",
        f"{len(common)} cases ran on all. Those that are not right on all, or differ, with the worst error as a",
    ]
    lines += ["share of its bound:", ""]
    if left_out:
        lines[-3] = f"{len(left_out)} cases are left out, whose message has `{without}` in one of them. {lines[-3]}"
    lines += ["| case | " + " | ".join(names) + " | first bad | first good after it |", "|---" * (len(names) + 3) + "|"]
    lines += rows
    return "\n".join(lines)


if __name__ == "__main__":
    paths, text = sys.argv[1:], ""
    if paths[:1] == ["--without"]:
        text, paths = paths[1], paths[2:]
    documents = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            documents.append(json.load(file))
    print(page(documents, text))
