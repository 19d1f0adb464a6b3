"""The words that arguments take, for type checkers and editors; tests hold them against the tables that read them.

Any case is read, and numbers and members of `pybnorm.enums`, too. Backends of one's own have other names.
"""

import difflib
from collections.abc import Iterable
from typing import Literal, TypeAlias

BackendWord: TypeAlias = Literal["cudnn", "miopen", "onednn", "native", "native_cuda", "native_rocm"]
ModeWord: TypeAlias = Literal["per_activation", "spatial", "spatial_persistent", "peract", "persistent"]
LayoutWord: TypeAlias = Literal["channels_first", "channels_last", "strided", "nchw", "nhwc", "strides"]
DataTypeWord: TypeAlias = Literal["float32", "float64", "float16", "bfloat16", "f32", "f64", "f16", "bf16"]
ActivationWord: TypeAlias = Literal["none", "relu", "clipped_relu", "clamp"]
OperationWord: TypeAlias = Literal[
    "derive", "forward_training", "forward_inference", "backward", "axpby", "fill", "relu", "relu_backward",
    "train", "training", "infer", "inference",
]  # fmt: skip
AlgorithmWord: TypeAlias = Literal["auto", "fast", "plain", "spatial", "persistent", "ex", "graph", "pointwise"]

_ELSEWHERE = {
    **dict.fromkeys(("float", "single"), "f32"),
    **{"half": "f16", "double": "f64", "bfloat": "bf16"},
    **dict.fromkeys(("nc", "ncw", "ncdhw", "contiguous"), "nchw"),
    **dict.fromkeys(("nwc", "ndhwc"), "nhwc"),
    **dict.fromkeys(("channel", "per_channel"), "spatial"),
    **{"cuda": "cudnn", "hip": "miopen", "rocm": "miopen"},
    **dict.fromkeys(("mkldnn", "dnnl", "cpu"), "onednn"),
    **{"fwd": "train", "bwd": "backward", "epsilon": "eps", "momentum": "factor"},
}
"""Words of other systems, and what says the same here."""


ARGUMENTS = {
    **dict.fromkeys(("input", "data"), ("x",)),
    **dict.fromkeys(("output", "result"), ("y", "out")),
    **dict.fromkeys(("grad", "grad_out", "grad_output", "grad_y"), ("dy",)),
    **dict.fromkeys(("grad_in", "grad_input", "grad_x"), ("dx",)),
    **dict.fromkeys(("grad_weight", "grad_scale", "dgamma", "dweight"), ("dscale",)),
    **dict.fromkeys(("grad_bias", "dbeta", "dshift"), ("dbias",)),
    **dict.fromkeys(("weight", "gamma"), ("scale",)),
    **dict.fromkeys(("shift", "offset", "beta"), ("bias",)),
    **dict.fromkeys(("eps", "variance_epsilon"), ("epsilon",)),
    **dict.fromkeys(
        ("momentum", "factor", "average_factor", "averaging_factor", "decay"), ("exponential_average_factor",)
    ),
    **{"affine": ("scale",), "num_features": ("channels",), "track_running_stats": ("running_mean",)},
    **dict.fromkeys(("moving_mean", "running_avg", "mean"), ("running_mean", "saved_mean")),
    **dict.fromkeys(("running_var", "moving_var", "moving_variance"), ("running_variance",)),
    "var": ("variance", "running_variance"),
    "variance": ("running_variance",),
    **dict.fromkeys(("save_mean", "batch_mean"), ("saved_mean", "mean")),
    **dict.fromkeys(
        ("invstd", "inv_std", "rstd", "inv_var", "save_invstd", "save_inv_variance", "saved_invstd", "saved_inv_std"),
        ("saved_inv_variance", "inv_variance"),
    ),
    **dict.fromkeys(("axes", "dim", "mode"), ("axis",)),
    "axis": ("mode",),
}
"""Names of other systems for an argument, and the names here, the likeliest first."""


def meant(value: object, words: Iterable[str]) -> str:
    """The one of `words` that `value` was probably to be, as a question; empty if there is none."""
    if not issubclass(type(value), str) or len(str.__str__(value)) > 40:
        return ""
    given, known = str.lower(str.__str__(value)), list(words)
    near = [_ELSEWHERE[given]] if _ELSEWHERE.get(given) in known else difflib.get_close_matches(given, known, 1)
    return f" (did you mean {near[0]!r}?)" if near and near[0] != value else ""
