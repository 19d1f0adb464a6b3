#!/usr/bin/env bash
# Tests and the check on a machine with an NVIDIA GPU and cuDNN; writes the reports into DIR.
#   ci/cuda.sh DIR        uses the python3 that is active, with its CUDA packages; builds the extension in place
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: ci/cuda.sh DIR}
mkdir -p "$out"
python3 setup.py -q build_ext --inplace >"$out/cuda-build.txt" 2>&1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYBNORM_REQUIRE=cudnn PYBNORM_REQUIRE_DEVICE=cudnn
python3 -m pybnorm info | tee "$out/cuda-info.txt"
status=0
python3 -m pytest -q -p no:cacheprovider tests/unit/test_devices.py tests/backends 2>&1 | tail -n 40 | tee "$out/cuda-tests.txt" || status=1
python3 -m pybnorm check --backend cudnn --json >"$out/cuda-smoke.json" || status=1
python3 -m pybnorm check --backend cudnn | tee "$out/cuda-smoke.txt" || status=1
exit $status
