"""Where PyTorch's own batch norm was measured faster than every way of pybnorm, and right: data, no code.

`MEASURED` has an entry for each device: its name as ``torch.cuda.get_device_name`` gives it, PyTorch's and cuDNN's
version, "major.minor", and boxes. A box: operation, dtypes, layout, then the smallest and the largest N, C, product of
the spatial axes, and megabytes of x (1e6 bytes) that it holds.
"""

from typing import Any

MEASURED: tuple[Any, ...] = (
    (
        "NVIDIA H200",
        "2.11",
        "9.19",
        (("training", ("float16", "float32"), "first", (1, 4), (1, 1 << 40), (1, 4), (0.0, 1e9)),),
    ),
)
