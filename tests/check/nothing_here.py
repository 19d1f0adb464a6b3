"""The command, where the search finds no vendor library. Its worker processes import this file too."""

import dataclasses

from pybnorm import _find
from pybnorm.cli import main

NOTHING = {"loaded_names": (), "pathfinder": "", "rocm_sdk": "", "distributions": (), "roots": (), "folders": ()}
for _name, _spec in _find.SPECS.items():
    _find.SPECS[_name] = dataclasses.replace(_spec, sonames=(f"lib{_name}-nowhere.so",), **NOTHING)

if __name__ == "__main__":
    main(prog_name="pybnorm")
