"""``python -m benchmarks`` is ``pybnorm bench``."""

import sys

from pybnorm.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]], prog_name="pybnorm")
