"""Cases of tests/backends on a device and a stream of their own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
