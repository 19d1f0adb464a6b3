"""Where PyTorch's own batch norm was measured faster than every way of pybnorm, and right: data, no code.

`MEASURED` has entries: the names of devices as ``torch.cuda.get_device_name`` gives them, PyTorch's and cuDNN's
version, "major.minor", and boxes. A box: operation, dtypes, layout, the smallest and the largest N, C, product of the
spatial axes, and megabytes of x (1e6 bytes) that it holds, and whether C elements fill whole 16 bytes; None: either.
"""

from typing import Any

MEASURED: tuple[Any, ...] = (
    (
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3"),
        "2.11",
        "9.19",
        (
            ("training", ("bfloat16", "float16", "float32"), "first", (1, 8), (1, 1 << 40), (1, 1), (0.0, 1e9), None),
            ("inference", ("bfloat16", "float16"), "last", (1, 1 << 40), (1, 63), (1, 31), (0.0, 1e9), None),
            ("inference", ("bfloat16", "float16"), "last", (1, 1 << 40), (1, 8), (8192, 1 << 40), (0.0, 1e9), None),
            ("backward", ("float32",), "first", (1, 1 << 40), (768, 1 << 40), (1, 1 << 40), (0.0, 0.393216), None),
            (
                "backward",
                ("bfloat16", "float16", "float32"),
                "last",
                (1, 1 << 40),
                (1, 16),
                (1, 1 << 40),
                (0.393216, 1e9),
                True,
            ),
            (
                "backward",
                ("bfloat16", "float16", "float32"),
                "last",
                (1, 1 << 40),
                (1, 1 << 40),
                (1, 1 << 40),
                (0.032768, 1e9),
                False,
            ),
        ),
    ),
)
