"""Every call of MIOpen's on fixed inputs; prints which form was called and the digest of all outputs, as JSON."""

import hashlib
import json

import numpy as np
from place import device_of

import pybnorm
from pybnorm.check.language import data
from pybnorm.check.language.lines import expand
from pybnorm.check.run import runner

LINES = [
    "train/backward,spatial/peract,f32/f16/bf16,nchw/nhwc,3x4x5x6,fill=randn,kappa=1,saved=0/1",
    "infer,spatial/peract,f32/f16/bf16,nchw/nhwc,3x4x5x6,fill=randn,kappa=1",
]
NAMES = [f"miopenBatchNormalization{n}_V2" for n in ("ForwardTraining", "ForwardInference", "Backward")]


def main():
    found = {}
    with pybnorm.Handle("miopen") as handle:
        session = runner.Session("miopen", handle, device_of(handle))
        for problem in (problem for line in LINES for problem in expand(line)):
            if session.capability(problem):
                seen = runner.execute(problem, data.generate(problem), session).outputs
                assert all(np.isfinite(a.astype(np.float64)).all() for a in seen.values()), problem
                found[str(problem)] = hashlib.sha256(b"".join(a.tobytes() for a in seen.values())).hexdigest()
    print(json.dumps({"v2": [pybnorm.has_symbol("miopen", n) for n in NAMES], "digests": found}))


if __name__ == "__main__":
    main()
