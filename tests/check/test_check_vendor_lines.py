"""Vendor lines: whole lines for typical cases, and None where a tool has no such call."""

import re

from tables import table

from pybnorm.check.language.lines import load_suite
from pybnorm.check.language.problem import Problem
from pybnorm.check.language.vendor_lines import benchdnn, cudnn_call, miopen_driver, vendor_lines

MIOPEN = {
    "train,spatial,f32,nchw,8x64x32x16": "bnorm -n 8 -c 64 -H 32 -W 16 -m 1 -F 1 -r 1 -s 1",
    "train,spatial,f16,nhwc,8x64x32x16,running=0": "bnormfp16 -n 8 -c 64 -H 32 -W 16 -m 1 -F 1 -r 0 -s 1 -L NHWC",
    "train,peract,bf16,nchw,8x64x32,saved=0": "bnormbfp16 -n 8 -c 64 -H 32 -W 1 -m 0 -F 1 -r 1 -s 0",
    "infer,spatial,f32,nchw,2x3x4x5x6": "bnorm -n 2 -c 3 -D 4 -H 5 -W 6 -m 1 -F 2 -r 1",
    "infer,spatial,f32,nhwc,2x3x4x5x6": "bnorm -n 2 -c 3 -D 4 -H 5 -W 6 -m 1 -F 2 -r 1 -L NDHWC",
    "backward,peract,f32,nchw,4x2x3x3,saved=0,seed=4": "bnorm -n 4 -c 2 -H 3 -W 3 -m 0 -F 0 -b 1 -s 0",
}
BENCHDNN = {
    "train,spatial,f32,nchw,8x64x32x16": "--dir=FWD_D --flags=CH --dt=f32 mb8ic64ih32iw16",
    "train,spatial,bf16,nhwc,8x64x7,fill=randn": "--dir=FWD_D --flags=CH --dt=bf16 --tag=axb mb8ic64iw7eps1e-05",
    "infer,spatial,f16,nchw,2x10,eps=0.001": "--dir=FWD_I --flags=GCH --dt=f16 mb2ic10eps0.001",
    "backward,spatial,f32,strides=300x90x18x3,2x3x4x5,saved=0": (
        "--dir=BWD_DW --flags=CH --dt=f32 --strides=300x90x18x3:300x90x18x3 mb2ic3ih4iw5"
    ),
    "train,spatial,f32,nchw,2x10,activation=relu": "--dir=FWD_D --flags=CHR --dt=f32 mb2ic10eps0.75",
    "backward,spatial,f32,nchw,8x10,activation=relu,residual=1": "--dir=BWD_DW --flags=CHA --dt=f32 mb8ic10",
    "frozen,spatial,f32,nchw,4x6x5x3,fill=randn": "--dir=BWD_DW --flags=GCH --dt=f32 mb4ic6ih5iw3eps1e-05",
    "infer,spatial,f32,nchw,2x10,inplace=1": "--dir=FWD_I --flags=GCH --dt=f32 --inplace=true mb2ic10",
    "infer,spatial,f32,nhwc,2x3x4x5x6": "--dir=FWD_I --flags=GCH --dt=f32 --tag=axb mb2ic3id4ih5iw6",
}


@table("write, start, lines", [(miopen_driver, "MIOpenDriver ", MIOPEN), (benchdnn, "benchdnn --bnorm ", BENCHDNN)])
def test_lines_of_command_line_tools(write, start, lines):
    assert {line: write(Problem.parse(line)) for line in lines} == {line: start + own for line, own in lines.items()}


FLOATS = "&(float){1.0}, &(float){0.0}, "


@table(
    ("line", "function", "arguments", "tensors"),
    [
        ("train,spatial,f32,nchw,8x64x32x16,fill=randn,alpha=2,beta=0.5", "ForwardTraining",
         "CUDNN_BATCHNORM_SPATIAL, &(float){2.0}, &(float){0.5}, xDesc, x, yDesc, y, bnDesc, scale, bias, 0.25, "
         "runningMean, runningVariance, 1e-05, savedMean, savedInvVariance",
         "xDesc, yDesc: CUDNN_DATA_FLOAT dims 8x64x32x16 strides 32768x512x16x1; "
         "bnDesc: CUDNN_DATA_FLOAT dims 1x64x1x1"),
        ("train,persistent,f32,nchw,8x64x32x16,running=0,saved=0", "ForwardTraining",
         f"CUDNN_BATCHNORM_SPATIAL_PERSISTENT, {FLOATS}xDesc, x, yDesc, y, bnDesc, scale, bias, 0.25, NULL, NULL, "
         "0.0625, NULL, NULL", ""),
        ("infer,peract,f64,nhwc,3x5x7", "ForwardInference",
         "CUDNN_BATCHNORM_PER_ACTIVATION, &(double){1.0}, &(double){0.0}, xDesc, x, yDesc, y, bnDesc, scale, bias, "
         "estimatedMean, estimatedVariance, 0.0625",
         "xDesc, yDesc: CUDNN_DATA_DOUBLE dims 3x5x7x1 strides 35x1x5x5; bnDesc: CUDNN_DATA_DOUBLE dims 1x5x7x1"),
        ("backward,spatial,bf16,nchw,2x3x4x5x6x7,saved=0,alpha_param=0.5,beta_param=1", "Backward",
         f"CUDNN_BATCHNORM_SPATIAL, {FLOATS}&(float){{0.5}}, &(float){{1.0}}, xDesc, x, dyDesc, dy, dxDesc, dx, "
         "bnDesc, scale, dscale, dbias, 0.0625, NULL, NULL",
         "xDesc, dyDesc, dxDesc: CUDNN_DATA_BFLOAT16 dims 2x3x840x1 strides 2520x840x1x1; "
         "bnDesc: CUDNN_DATA_FLOAT dims 1x3x1x1"),
        ("train,spatial,f32,nchw,8x64x32x16,activation=relu,residual=1", "ForwardTrainingEx",
         f"CUDNN_BATCHNORM_SPATIAL, CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION, {FLOATS}xDesc, x, zDesc, z, yDesc, y, "
         "bnDesc, scale, bias, 0.25, runningMean, runningVariance, 0.0625, savedMean, savedInvVariance, reluDesc, "
         "workspace, workspaceSize, reserve, reserveSize", "xDesc, zDesc, yDesc: CUDNN_DATA_FLOAT"),
        ("backward,spatial,f32,nchw,8x64x32x16,activation=relu", "BackwardEx",
         f"CUDNN_BATCHNORM_SPATIAL, CUDNN_BATCHNORM_OPS_BN_ACTIVATION, {FLOATS * 2}xDesc, x, yDesc, y, dyDesc, dy, "
         "NULL, NULL, dxDesc, dx, bnDesc, scale, bias, dscale, dbias, 0.0625, savedMean, savedInvVariance, reluDesc, "
         "workspace, workspaceSize, reserve, reserveSize", "xDesc, yDesc, dyDesc, dxDesc: CUDNN_DATA_FLOAT"),
    ],
)  # fmt: skip
def test_cudnn_call(line, function, arguments, tensors):
    assert cudnn_call(Problem.parse(line)).startswith(
        f"cudnnBatchNormalization{function}(handle, {arguments}); /* {tensors}"
    )


@table(
    ("line", "tools"),
    [
        ("train,spatial,f32,nchw,2x3", {"MIOpenDriver", "benchdnn", "cuDNN"}),
        ("train,spatial,f64,nchw,2x3", {"cuDNN"}),
        ("infer,spatial,f32,nchw,2x3,inverse=1", set()),
        ("train,spatial,f32,nchw,2x3,inplace=1", {"benchdnn", "cuDNN"}),
        ("train,spatial,f32,nchw,2x3,activation=relu", {"benchdnn", "cuDNN"}),
        ("infer,spatial,f32,nchw,2x3,activation=relu", {"benchdnn"}),
        ("train,spatial,f32,nchw,2x3,activation=clamp", set()),
        ("train,spatial,f32,nchw,2x3,alpha=2", {"cuDNN"}),
        ("train,spatial,f32,nchw,2x3,beta=1", {"cuDNN"}),
        ("backward,spatial,f32,nchw,2x3,alpha_param=2", {"cuDNN"}),
        ("backward,spatial,f32,nchw,2x3,beta_param=2", {"cuDNN"}),
        ("train,persistent,f32,nchw,2x3", {"cuDNN"}),
        ("train,peract,f32,nchw,2x3", {"MIOpenDriver", "cuDNN"}),
        ("train,spatial,f32,strides=8x2,2x3", {"benchdnn", "cuDNN"}),
        ("train,spatial,f16,nchw,2x3,params=f16", set()),
        ("train,spatial,f32,nchw,2x3x1x1x1x4", {"cuDNN"}),
        ("infer,spatial,f32,strides=999x200x60x20x5x1,2x3x2x2x2x2", set()),
    ],
)
def test_a_tool_without_such_a_call_has_no_line(line, tools):
    assert set(vendor_lines(Problem.parse(line))) == tools


def test_calls_have_the_arguments_of_the_prototypes():
    """17, 14 and 19 arguments, as in cuDNN's header; every line of a suite is one line."""
    counts = {"Training": 17, "Inference": 14, "Backward": 19}
    seen = set()
    for problem in load_suite("smoke"):
        for line in vendor_lines(problem).values():
            assert "\n" not in line
        call = cudnn_call(problem)
        if call is None:
            continue
        name, arguments = re.fullmatch(r"cudnnBatchNormalization(?:Forward)?(\w+)\((.*)\); /\*.*\*/", call).groups()
        assert len(arguments.split(", ")) == counts[name]
        seen.add(name)
    assert seen == set(counts)
