#!/usr/bin/env bash
# Checks and tests on a machine with no GPU: real oneDNN computes, real cuDNN loads, describes and derives.
#   ci/cpu.sh [VENV]      VENV: folder of the virtual environment, default a temporary one
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
step='' temporary=''
say() {
    step=$1
    printf '\n== %s (%d s)\n' "$1" "$((SECONDS - start))"
}
ended() { # STATUS: of whatever ended this script; the last line names the step, of whose output the last lines are there
    [ -z "$temporary" ] || rm -rf "$temporary"
    [ "$1" = 0 ] || printf '\nci/cpu.sh: FAILED (exit status %d) after %d s in the step: %s\n' "$1" "$((SECONDS - start))" "$step"
}
trap 'ended $?' EXIT

if [ $# -gt 0 ]; then
    venv=$1
else
    temporary=$(mktemp -d)
    venv=$temporary/venv
fi

say "environment: $(python3 --version), $(nproc) cores"
python3 -m venv "$venv"
export PATH="$venv/bin:$PATH"
rm -f "$venv"/lib/python*/site-packages/zz-torch.pth # of an earlier run: the other tests come without PyTorch
python -m pip install --quiet --upgrade pip
python -m pip install --quiet '.[test-full,lint,dask,docs]' -r ci/mpi.txt
# cuDNN and CUDA's Python packages without what they need on a GPU: enough to load, describe and derive. Headers: what
# tests/abi compares with.
python -m pip install --quiet --no-deps -r ci/cudnn-without-gpu.txt -r ci/headers.txt
python -m pip list --format=freeze | grep -iE '^(numpy|cython|onednn|nvidia|cuda|ml_dtypes|pytest|pybnorm)' || true

say "lint"
bash ci/lint.sh

say "documentation: a warning is an error"
bash ci/docs.sh "$venv/site"
required=mpi4py,dask,cuda-core
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    python tests/check/browser.py "$venv"/site/*.html
    required+=,chromium
else
    echo "chromium: not on this machine, no page is seen in a browser"
fi

say "every C file without a warning, under each compiler found; the third is for aarch64"
for compiler in gcc clang aarch64-linux-gnu-gcc; do
    command -v "$compiler" >/dev/null || { echo "$compiler: not on this machine, skipped"; continue; }
    for file in pybnorm/backends/*.c pybnorm/backends/*/adapter.c; do
        "$compiler" -std=c11 -Wall -Wextra -Werror -O2 -fsyntax-only -D_GNU_SOURCE -Iinclude "$file"
    done
done

say "pytest"
# These must be there on this runner: their absence is a failure, not a skip.
PYBNORM_REQUIRE=onednn,cudnn PYBNORM_REQUIRE_PACKAGES=$required pytest --full -n "$(nproc)" --dist loadfile \
    --no-loadscope-reorder # which would put the files of few and long tests at the end, where they leave a core idle

say "oneDNN without OpenMP"
python -m pip install --quiet --ignore-installed --prefix "$venv/tbb" onednn-cpu-tbb intel-cmplr-lib-rt
LD_LIBRARY_PATH="$venv/tbb/lib" PYBNORM_LIB_ONEDNN="$venv/tbb/lib/libdnnl.so.3" PYBNORM_REQUIRE=onednn \
    pytest -n "$(nproc)" -k onednn tests/backends/test_calls.py tests/backends/test_plans.py

say "PyTorch: its arrays, the modules, gradients"
bash ci/pytorch.sh

say "the main job"
pybnorm info
pybnorm check --backend onednn --suite smoke

say "the judge: can it be believed, and what does it say of oneDNN"
pybnorm selftest
pybnorm check --backend onednn --suite standard --suite bugs --allow-known >"$venv/standard.txt" ||
    { cat "$venv/standard.txt"; exit 1; }
tail -n 2 "$venv/standard.txt"
say "done"
