"""Names of hipDNN's Python that `pybnorm.hipdnn` lacks, with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_OTHER = "this package has batch norm, ReLU and addition"
_ENGINES = "a handle's backend is the only engine here and has one plan, without knobs"
_UNBOUND = "hipDNN lists this name and has nothing of it; see BatchnormInferenceAttributes, PointwiseAttributes"
_HIP = "hipDNN calls it no part of its API; pybnorm.devices has streams, events and times"
_PLUGINS = "there are no plugins here: PYBNORM_LIB_MIOPEN, _CUDNN and _ONEDNN name the libraries"

_WHY = {
    _OTHER: """
        BlockScaleDequantizeAttributes BlockScaleQuantizeAttributes ConvDgradAttributes ConvFpropAttributes
        ConvWgradAttributes ConvolutionDgradAttributes ConvolutionFpropAttributes ConvolutionWgradAttributes
        CustomOpAttributes LayernormAttributes LayernormBackwardAttributes MatmulAttributes MoeGroupedMatmulAttributes
        RMSNormAttributes RMSNormBackwardAttributes ReductionAttributes ResampleBwdAttributes ResampleFwdAttributes
        SdpaAttributes SdpaBackwardAttributes
        AttentionImplementation ConvolutionMode DiagonalAlignment MoeGroupedMatmulMode NormFwdPhase PaddingMode
        ReductionMode ResampleMode
        Graph.block_scale_dequantize Graph.block_scale_quantize Graph.conv_dgrad Graph.conv_fprop Graph.conv_wgrad
        Graph.custom_op Graph.layernorm Graph.layernorm_backward Graph.matmul Graph.moe_grouped_matmul
        Graph.reduction Graph.resample Graph.resample_bwd Graph.resample_fwd Graph.rmsnorm Graph.rmsnorm_backward
        Graph.sdpa Graph.sdpa_backward
        PointwiseAttributes.set_swish_beta PointwiseAttributes.get_swish_beta
        PointwiseAttributes.set_elu_alpha PointwiseAttributes.get_elu_alpha
        PointwiseAttributes.set_softplus_beta PointwiseAttributes.get_softplus_beta
        PointwiseAttributes.set_axis PointwiseAttributes.get_axis
    """,
    _ENGINES: """
        AutotuneCacheWriteOutcome AutotuneConfig AutotuneResult AutotuneStorageConfig AutotuneStrategy EngineConfigInfo
        EngineSweepSpec EngineVariant FloatConstraint IntConstraint Knob KnobSetting KnobSweepAxis KnobValueType
        PrimingFailurePolicy StringConstraint TuneMode
        Graph.add_all_engines Graph.add_engine Graph.add_engine_configs Graph.add_engine_sweep
        Graph.add_engine_variants Graph.add_engines Graph.autotune Graph.autotune_exhaustive_sweep
        Graph.deselect_engines Graph.deselect_workspace_greater_than Graph.get_engine_configs
        Graph.get_estimated_max_workspace_size
    """,
    _UNBOUND: """
        ActivationAttributes ActivationMode BatchnormForwardInferenceAttributes BatchnormMode
        ConvolutionForwardAttributes PoolingForwardAttributes PoolingMode TensorLayout
    """,
    _HIP: """
        HipEvent HipStallGate hip_can_use_stream_wait_value hip_device_synchronize hip_get_device_count
        hip_stream_synchronize ExecutionTiming TimingQuality Graph.execute_timed_ext
    """,
    _PLUGINS: "PluginLoadingMode set_engine_plugin_paths",
}
_REASONS = {name: why for why, names in _WHY.items() for name in names.split()}


def _refuse(owner: str, name: str) -> NoReturn:
    """Raise the `AttributeError` of a name that is absent; `owner` is a class, or empty for the module."""
    shown = f"{owner}.{name}" if owner else name
    why = _REASONS.get(shown)
    if why is None:
        raise AttributeError(f"pybnorm.hipdnn.{shown}: neither hipDNN nor this package has it")
    raise AttributeError(f"pybnorm.hipdnn.{shown} is hipDNN's and not here: {why}")


class _Chosen(type):
    """Metaclass of an enumeration's names, some of which are here: any other is refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            here = ", ".join(member for member in vars(cls) if member.isupper())
            raise AttributeError(f"pybnorm.hipdnn.{cls.__name__}.{name} is not here; these are: {here}")


class _Refusing:
    """Objects whose absent attributes are refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            _refuse(type(self).__name__, name)
