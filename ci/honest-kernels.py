"""Random problems, computed by honest kernels of every style and judged: nobody may be accused.

    python ci/honest-kernels.py OUTPUTS SEED

Ends after so many judged outputs. Exit status 1 if one was objected to; each such is printed with its case.
"""

import collections
import random
import sys
from pathlib import Path

from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "check"))
from selftest_tool import rows

wanted, pick = int(sys.argv[1]), random.Random(int(sys.argv[2]))
CHAINS = rows.ONE_CHAIN | {"blocks of 1024 in sequence", "4 lanes"}
"""Chains of a quarter of a sum and more, which may be CHAIN where roundings add up."""
FILLS = ("exact", "paired", "randn", "sqrteps", "ramp", "constant", "range", "relu", "image", "sparse", "level")


def problem() -> Problem:
    """A small one, with some of the options; m from 2 to some thousands, now and then some ten thousands."""
    operation = pick.choice(("train", "backward", "infer"))
    n, c = pick.randint(1, 12), pick.choice((2, 3, 5, 8, 16))
    plane = pick.choice((1, 4, 9, 30, 49, 64, 100, 196, 784, 3136))
    fill = pick.choice(FILLS)
    options = [f"fill={fill}", f"seed={pick.randint(0, 999)}"]
    if fill in ("randn", "sqrteps"):
        options.append(f"kappa={pick.choice((0, 0.5, 1, 3))}")
    if pick.random() < 0.3:
        options.append(f"alpha={pick.choice((2, -0.5))},beta={pick.choice((0, 0.5, -1))}")
    if operation == "backward" and pick.random() < 0.4:
        options.append("saved=0")
    dtype = pick.choice(("f32", "f32", "f16", "bf16"))
    return Problem.parse(f"{operation},spatial,{dtype},nchw,{max(n, 2)}x{c}x1x{plane},{','.join(options)}")


counts: collections.Counter[str] = collections.Counter()
objections = problems = 0
while sum(counts.values()) < wanted:
    case = problem()
    inputs = generate(case)
    expected, by_channel = expect(case, inputs), rows.Rows(case, inputs)
    problems += 1
    for style, kernel in rows.STYLES.items():
        for verdict in judge_call(expected, rows.outputs(kernel, by_channel)).values():
            counts[verdict.status.value] += 1
            # what cancels in one pass may be WARN; no bound holds a variance of 0 in one pass
            allowed = {Status.PASS, Status.WARN, Status.INCONCLUSIVE} if style == "one pass" else {Status.PASS}
            allowed |= {Status.CHAIN, Status.WARN} if style in CHAINS else set()
            if verdict.status not in allowed:
                objections += 1
                print(f"{case}: {style}: {verdict.output} {verdict.status.value} {verdict.ratio:.3g}: {verdict.note}")
told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
judged = f"{sum(counts.values())} outputs of {len(rows.STYLES)} styles, {problems} problems"
print(f"{judged}: {told}; {objections} objected to")
sys.exit(1 if objections else 0)
