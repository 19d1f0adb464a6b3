"""``python -m pybnorm`` is the command ``pybnorm``."""

from pybnorm.cli import main

if __name__ == "__main__":  # worker processes import this module too
    main(prog_name="pybnorm")
