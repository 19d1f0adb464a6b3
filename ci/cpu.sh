#!/usr/bin/env bash
# Checks and tests on a machine with no GPU: real oneDNN computes, real cuDNN loads, describes and derives.
#   ci/cpu.sh [VENV]      VENV: folder of the virtual environment, default a temporary one
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
say() { printf '\n== %s (%d s)\n' "$1" "$((SECONDS - start))"; }

if [ $# -gt 0 ]; then
    venv=$1
else
    venv=$(mktemp -d)/venv
    trap 'rm -rf "$(dirname "$venv")"' EXIT
fi

say "environment: $(python3 --version), $(nproc) cores"
python3 -m venv "$venv"
export PATH="$venv/bin:$PATH"
python -m pip install --quiet --upgrade pip
python -m pip install --quiet '.[test,lint,dask]' -r ci/mpi.txt
# cuDNN without what it needs on a GPU: enough to load, describe and derive. Headers: what tests/abi compares with.
python -m pip install --quiet --no-deps -r ci/cudnn-without-gpu.txt -r ci/headers.txt
python -m pip list --format=freeze | grep -iE '^(numpy|cython|onednn|nvidia|cuda|ml_dtypes|pytest|pybnorm)' || true

say "lint"
ruff check .
ruff format --check .
cython-lint pybnorm/*.pyx pybnorm/*.pxd
mypy

say "every C file without a warning, under both compilers found"
for compiler in gcc clang; do
    command -v "$compiler" >/dev/null || { echo "$compiler: not on this machine, skipped"; continue; }
    for file in pybnorm/backends/*.c; do
        "$compiler" -std=c11 -Wall -Wextra -Werror -O2 -fsyntax-only -D_GNU_SOURCE -Iinclude "$file"
    done
done

say "pytest"
# These must be there on this runner: their absence is a failure, not a skip.
PYBNORM_REQUIRE=onednn,cudnn PYBNORM_REQUIRE_PACKAGES=mpi4py,dask pytest

say "the main job"
pybnorm info
pybnorm check --backend onednn --suite smoke

say "the judge: can it be believed, and what does it say of oneDNN"
pybnorm selftest
pybnorm check --backend onednn --suite standard --suite bugs --allow-known >"$venv/standard.txt" ||
    { cat "$venv/standard.txt"; exit 1; }
tail -n 2 "$venv/standard.txt"
say "done"
