"""First on PYTHONPATH, this makes the search of every process find no vendor library."""

import dataclasses

from pybnorm import _find

NOTHING = {"loaded_names": (), "pathfinder": "", "rocm_sdk": "", "distributions": (), "roots": (), "folders": ()}
for _name, _spec in _find.SPECS.items():
    _find.SPECS[_name] = dataclasses.replace(_spec, sonames=(f"lib{_name}-nowhere.so",), **NOTHING)
