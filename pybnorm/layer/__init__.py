"""A batch-norm layer that keeps its statistics, modelled on gocudnn's ``batchnorm`` package, for every backend.

Make a layer, stage it with the first x, then call forward training, inference and backward. `BatchNorm.info` returns
the whole state as plain data, which can be stored as JSON. `BatchNorm.restore` makes a layer from it, on any backend
and machine.

Differences from gocudnn:

* The running variance starts at 1, so that inference before training leaves x unchanged but for epsilon. gocudnn's
  buffers are zero-filled, which divides by sqrt(epsilon): ``initial_running_variance=0.0`` gives that. The running mean
  starts at 0 in both.
* A call before `stage` raises an error that says "not staged"; gocudnn dereferences nil. Backward needs a forward
  training first; gocudnn's zero-filled saved statistics give dx = 0. Staging twice is refused, because it would discard
  trained statistics.
* `Info` can be restored and has every field filled. gocudnn declares epsilon, factor and NaN policy and leaves them
  empty. The factor is a float; gocudnn's is an unsigned integer. `Info.from_gocudnn_json` and `Info.to_gocudnn_json`
  read and write gocudnn's own JSON.
* y = alpha * result + beta * y, as in the library; a comment in gocudnn swaps the two. Backward uses the statistics
  that the last forward training saved.
* All dtypes of the backend, bfloat16 too.
* A call that has a known defect is made of others that are correct: `BatchNorm.workspace_size` says what it then needs.
"""

from pybnorm.layer.batch_norm import BatchNorm
from pybnorm.layer.info import BiasScaleProperties, Info

__all__ = ["BatchNorm", "BiasScaleProperties", "Info"]
