"""A check's JSON from standard input to standard output: one line a case, the worst point of each output only."""

import json
import sys

report = json.load(sys.stdin)
for case in report["cases"]:
    for verdict in case["verdicts"]:
        verdict["worst"] = verdict["worst"][:1]
cases = report.pop("cases")
print(json.dumps(report, indent=1)[:-2] + ',\n "cases": [')
print(",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases))
print(" ]\n}")
