"""Plans chosen by measurement: ``handle.plan_forward_training(..., tune=True)`` and its siblings call `choose`.

`choose` measures the candidates of ``"auto"`` or ``"fast"`` once and remembers the fastest in a file, by version of the
library and of pybnorm, by device, driver and problem. The next plan of the problem, in this process or another,
measures nothing. The choice of the backend's own rules stays unless another is faster by `MARGIN`. Only a candidate
whose results on ordinary data are in the stable class of `pybnorm.check.bounds` can replace it.

While a graph is captured nothing can be measured: if the handle's own stream is captured, `choose` refuses. It does
not see captures on other streams; measuring breaks one that forbids allocation in other threads (mode *global*).
"""

from pybnorm.tuning.cache import VARIABLE, cache_file, clear, entries
from pybnorm.tuning.choice import MARGIN, choose

__all__ = ["MARGIN", "VARIABLE", "cache_file", "choose", "clear", "entries"]
