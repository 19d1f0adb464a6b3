"""A check's JSON from standard input to standard output, short enough to keep.

Counts, the worst ratio of every output with its case by operation, mode, dtype and layout, whether repeated calls gave
the same bits by operation and algorithm, the cases that are neither PASS nor UNSUPPORTED (of known defects their lines
only), and the reasons of refusal.
"""

import collections
import json
import sys

report = json.load(sys.stdin)
cases = report.pop("cases")
groups: dict[tuple[str, ...], dict] = {}
refusals: collections.Counter[str] = collections.Counter()
repeats: collections.Counter[str] = collections.Counter()
open_cases = []
known: dict[str, dict[str, list[str]]] = {}
for case in cases:
    operation, mode, dtype, layout = case["case"].split(",")[:4]
    layout = layout.partition("=")[0]
    key = (case["backend"], operation, mode, dtype, layout)
    group = groups.setdefault(key, {"statuses": collections.Counter(), "worst": {}})
    group["statuses"][case["status"]] += 1
    if case["repeat"]:
        algorithm = case["case"].partition(",algorithm=")[2].partition(",")[0] or "entry point"
        word = "equal" if case["repeat"] == "equal" else "differs"
        repeats[f"{case['backend']} {operation} {algorithm}: {word}"] += 1
    for verdict in case["verdicts"]:
        ratio = float(verdict["ratio"])
        worst = group["worst"].setdefault(verdict["output"], {"ratio": -1.0})
        if case["status"] in ("PASS", "WARN", "CHAIN") and ratio > worst["ratio"]:
            group["worst"][verdict["output"]] = {"ratio": round(ratio, 4), "case": case["case"]}
    if case["status"] == "UNSUPPORTED":
        refusals[f"{case['backend']}: {case['message'].splitlines()[0]}"] += 1
    elif case["known"]:
        known.setdefault(f"{case['backend']} {case['status']}", {}).setdefault(case["known"], []).append(case["case"])
    elif case["status"] != "PASS":
        outputs = {}
        for verdict in case["verdicts"]:
            if verdict["status"] != "PASS":
                names = ("status", "tier", "ratio", "over", "elements", "note")
                outputs[verdict["output"]] = {n: verdict[n] for n in names} | {"worst": verdict["worst"][:1]}
        kept = {k: case[k] for k in ("backend", "case", "status", "claim", "message", "repeat")}
        open_cases.append(kept | {"outputs": outputs})
names = ("backend", "operation", "mode", "dtype", "layout")
report |= {
    "schema": "pybnorm.summary/1",
    "statuses": collections.Counter(f"{c['backend']} {c['status']}" for c in cases),
    "known": collections.Counter(i for c in cases for i in c["known"].replace(",", " ").split()),
    "groups": [dict(zip(names, key, strict=True)) | group for key, group in sorted(groups.items())],
    "refusals": dict(refusals.most_common()),
    "repeats": dict(sorted(repeats.items())),
    "known_cases": known,
    "cases": open_cases,
}
for group in report["groups"]:
    group["worst"] = {name: worst for name, worst in group["worst"].items() if worst["ratio"] >= 0}
rows = {name: report.pop(name) for name in ("groups", "cases")}  # a line each
print(json.dumps(report, indent=1)[:-2] + ",")
for i, (name, values) in enumerate(rows.items()):
    print(f' "{name}": [')
    print(",\n".join("  " + json.dumps(value, separators=(",", ":")) for value in values))
    print(" ]" + ("," if i == 0 else ""))
print("}")
