"""Runs the tool and prints its tables. Exit status 1 if a bug was missed or an honest kernel accused."""

import argparse
import sys

from pybnorm.check.selftest import faults
from selftest_tool import more_faults, power

parser = argparse.ArgumentParser(prog="selftest_tool")
parser.add_argument("--whole", action="store_true", help="sums of up to 10^6 terms, too; half an hour, not a minute")
options = parser.parse_args()
of_calls = faults.run(more_faults.FAULTS, more_faults.FaultyCalls)
seen = power.run(power.WHOLE if options.whole else power.QUICK)
print(f"{faults.render(of_calls)}\n\n{power.render(seen)}")
sys.exit(0 if seen.good and all(fault.good for fault in of_calls) else 1)
