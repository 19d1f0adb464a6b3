"""The check from Python: cases as values, verdicts as values. ``python examples/check_library.py``"""

import pybnorm
from pybnorm.check import Problem, Worker, expand

LINES = "train/infer/backward,spatial,f32/bf16,nchw/nhwc,8x16x14x14,fill=randn,kappa=30"

problems = list(expand(LINES))
with Worker("onednn", timeout=60) as worker:  # a process of its own, since a vendor may crash or hang
    results = [worker.run(problem) for problem in problems]
for result in results[:3]:
    print(f"{result.status.name} {result.case}")
    for verdict in result.verdicts:
        print(f"    {verdict.output:<20}{verdict.ratio:.3f} of its bound")
print({status.name: sum(r.status == status for r in results) for status in {r.status for r in results}})
met = Problem.parse("backward,spatial,f32,nchw,4x8x35x35")
print(f"known defects that {met} meets on MIOpen 3.4:", [d.id for d in pybnorm.known_defects("miopen", met, (3, 4, 0))])
