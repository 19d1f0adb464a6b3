"""Every call of MIOpen's on fixed inputs; prints which form was called and the digest of all outputs, as JSON."""

import hashlib
import itertools
import json

import numpy as np
from place import device_of

import pybnorm
from pybnorm import DataType, Layout, Mode, Operation, _arguments, capability
from pybnorm.check.language import data
from pybnorm.check.language.problem import Problem


def main():
    found = {}
    with pybnorm.Handle("miopen") as handle:
        device = device_of(handle)
        for operation, mode, dtype, layout, saved in itertools.product(
            (Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD),
            (Mode.SPATIAL, Mode.PER_ACTIVATION),
            (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16),
            (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST),
            (False, True),
        ):
            if not capability("miopen", operation, mode, dtype, layout, 4)[0]:
                continue
            dims = (3, 4, 5, 6)
            options = {"fill": "randn", "kappa": 1.0}
            if operation != Operation.FORWARD_INFERENCE:
                options["saved"] = saved
            problem = Problem(operation, mode, dtype, dims, _arguments.packed_strides(dims, layout), **options)
            found[str(problem)] = digest(handle, device, problem, data.generate(problem))
    names = [f"miopenBatchNormalization{n}_V2" for n in ("ForwardTraining", "ForwardInference", "Backward")]
    print(json.dumps({"v2": [pybnorm.has_symbol("miopen", n) for n in names], "digests": found}))


def digest(handle, device, problem, inputs):
    def put(array, strides=None):
        if strides is None:
            return device.from_numpy(np.ascontiguousarray(array))
        memory = np.empty(array.size, array.dtype)
        view = np.lib.stride_tricks.as_strided(memory, array.shape, [s * array.itemsize for s in strides])
        view[...] = array
        return device.from_numpy(view)

    x, scale = put(inputs.x, problem.strides), put(inputs.scale)
    blank = np.full_like(inputs.scale, np.nan)
    out = {"y": put(np.zeros_like(inputs.x), problem.strides)}
    options = {"mode": problem.mode, "epsilon": problem.epsilon}
    if problem.operation == Operation.FORWARD_INFERENCE:
        given = (put(inputs.bias), put(inputs.mean), put(inputs.variance))
        handle.forward_inference(x, scale, *given, out["y"], **options)
    elif problem.operation == Operation.FORWARD_TRAINING:
        out |= {"running_mean": put(inputs.mean), "running_variance": put(inputs.variance)}
        if problem.saved:
            out |= {"saved_mean": put(blank), "saved_inv_variance": put(blank)}
        handle.forward_training(x, scale, put(inputs.bias), **out, **options)
    else:
        out |= {"dscale": put(blank), "dbias": put(blank)}
        saved = {n: put(getattr(inputs, n)) for n in ("saved_mean", "saved_inv_variance") if problem.saved}
        dy = put(inputs.dy, problem.strides)
        handle.backward(x, dy, scale, out["y"], out["dscale"], out["dbias"], **saved, **options)
    device.synchronize()
    arrays = [device.to_numpy(b) for b in out.values()]
    assert all(np.isfinite(a.astype(np.float64)).all() for a in arrays), problem
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


if __name__ == "__main__":
    main()
