"""The words that arguments take, for type checkers and editors; tests hold them against the tables that read them.

Any case is read, and numbers and members of `pybnorm.enums`, too. Backends of one's own have other names.
"""

from typing import Literal, TypeAlias

__all__ = ["ActivationWord", "AlgorithmWord", "BackendWord", "DataTypeWord", "LayoutWord", "ModeWord", "OperationWord"]

BackendWord: TypeAlias = Literal["cudnn", "miopen", "onednn"]
ModeWord: TypeAlias = Literal["per_activation", "spatial", "spatial_persistent", "peract", "persistent"]
LayoutWord: TypeAlias = Literal["channels_first", "channels_last", "strided", "nchw", "nhwc", "strides"]
DataTypeWord: TypeAlias = Literal["float32", "float64", "float16", "bfloat16", "f32", "f64", "f16", "bf16"]
ActivationWord: TypeAlias = Literal["none", "relu", "clipped_relu", "clamp"]
OperationWord: TypeAlias = Literal[
    "derive", "forward_training", "forward_inference", "backward", "axpby", "fill", "relu", "relu_backward",
    "train", "training", "infer", "inference",
]  # fmt: skip
AlgorithmWord: TypeAlias = Literal[
    "auto",
    "fast",
    "plain",
    "spatial",
    "persistent",
    "ex",
    "graph",
    "pointwise",
    "split",
    "columns",
    "rows",
    "dense",
    "folded",
]
