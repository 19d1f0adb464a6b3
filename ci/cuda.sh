#!/usr/bin/env bash
# Tests and checks on a machine with an NVIDIA GPU and cuDNN; writes the reports into DIR.
#   ci/cuda.sh DIR        DIR: where the reports go
# Uses the python3 that is active, with its CUDA packages; builds the extension in place.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: ci/cuda.sh DIR}
mkdir -p "$out"
python3 setup.py -q build_ext --inplace
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYBNORM_REQUIRE=cudnn PYBNORM_REQUIRE_DEVICE=cudnn
python3 -m pybnorm info
python3 -m pybnorm info --json >"$out/cuda-info.json"
python3 -m pytest -q -p no:cacheprovider tests/backends tests/abi --junitxml="$out/cuda-backends.xml" 2>&1 | tail -n 60 | tee "$out/cuda-backends.txt"
python3 -m pybnorm check --backend cudnn --suite smoke --json "$out/cuda-smoke.json" | tee "$out/cuda-smoke.txt"
