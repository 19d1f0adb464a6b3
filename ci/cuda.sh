#!/usr/bin/env bash
# Tests and the check on a machine with an NVIDIA GPU and cuDNN; writes the reports into DIR.
#   ci/cuda.sh DIR        uses the python3 that is active, with its CUDA packages; builds the extension in place
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: ci/cuda.sh DIR}
mkdir -p "$out"
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Reports say which library, not where this machine keeps it.
public() { sed -e "s#$site#<site-packages>#g" -e "s#$PWD#<checkout>#g" -e "s#${PYBNORM_LIB_ONEDNN:-\$none}#<libdnnl>#g"; }
python3 setup.py -q build_ext --inplace >"$out/build.txt" 2>&1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYBNORM_REQUIRE=cudnn PYBNORM_REQUIRE_DEVICE=cudnn
status=0
python3 -m pybnorm info | public | tee "$out/cuda-info.txt"
python3 -m pytest -p no:cacheprovider -q tests/unit/test_devices.py tests/backends tests/operations tests/layer tests/graph \
    tests/functional tests/pytorch tests/bench 2>&1 | grep -vE '^[.sxX]+ +\[' | public | tee "$out/cuda-tests.txt" || status=1
COLUMNS=150 python3 -m pybnorm check | public | tee "$out/cuda-smoke.txt" || status=1
jobs=$(($(nproc) < 12 ? $(nproc) : 12)) # the data are made and judged on the host, which takes longer than the calls
python3 -m pybnorm check --backend cudnn --suite full --jobs "$jobs" --json "$out/full.json" >"$out/full.txt" || status=1
tail -2 "$out/full.txt"
public <"$out/full.json" | python3 ci/summarize.py >"$out/cuda-full.json" || status=1
rm -f "$out/full.json" "$out/full.txt"
for example in examples/*.py; do
    [ "$example" = examples/example.py ] && continue
    for dtype in f32 f16 bf16; do
        python3 "$example" --backend cudnn --dtype $dtype 2>&1 || echo "exit status $?"
    done
done | public | tee "$out/cuda-examples.txt"
exit $status
