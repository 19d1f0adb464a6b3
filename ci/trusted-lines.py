#!/usr/bin/env python3
"""Make the file of the cases that need not be asked again whether they would notice a change of their inputs.

With --check only say whether it is of this code. See pybnorm/check/trusted.py.
"""

import math
import pathlib
import sys

from pybnorm.check import trusted
from pybnorm.check.bounds import untrusted
from pybnorm.check.data import generate
from pybnorm.check.problem import FILE, load_suite

SUITES = ("smoke", "standard")
LARGEST = 1 << 23
"""Elements of x; of larger cases four statistics are a small part of the work."""

target = pathlib.Path(trusted.__file__).parent / trusted.FILE_NAME
if "--check" in sys.argv[1:]:
    sys.exit(0 if trusted.kept() else f"{target}: of other code; run {sys.argv[0]}")
cases = {trusted.digest(p): p for name in SUITES for p in load_suite(name) if p.fill != FILE}
numbers = []
for number, problem in cases.items():
    if math.prod(problem.dims) <= LARGEST and not untrusted(problem, generate(problem)):
        numbers.append(number)
target.write_text("\n".join([trusted.fingerprint(), *(f"{number:016x}" for number in sorted(numbers))]) + "\n")
print(f"{len(numbers)} of {len(cases)} cases: {target}")
