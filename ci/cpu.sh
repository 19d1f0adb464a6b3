#!/usr/bin/env bash
# Checks and tests on a machine with no GPU: real oneDNN computes, real cuDNN loads, describes and derives.
#   ci/cpu.sh [VENV]      VENV: folder of the virtual environment, default a temporary one
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
step='' temporary=''
declare -A beside=() # process groups that run beside the steps, by what they do
say() {
    step=$1
    printf '\n== %s (%d s)\n' "$1" "$((SECONDS - start))"
}
ended() { # STATUS: of whatever ended this script; the last line names the step, of whose output the last lines are there
    local group
    for group in "${beside[@]}"; do
        kill -TERM -- "-$group" 2>/dev/null || true
        wait "$group" 2>/dev/null || true
    done
    [ -z "$temporary" ] || rm -rf "$temporary"
    [ "$1" = 0 ] || printf '\nci/cpu.sh: FAILED (exit status %d) after %d s in the step: %s\n' "$1" "$((SECONDS - start))" "$step"
}
trap 'ended $?' EXIT
begin() { # STEP COMMAND...: runs it beside what follows, which leaves a core idle or waits for the network
    set -m # a process group of its own
    "${@:2}" >"$venv/$1.txt" 2>&1 </dev/null &
    set +m
    beside[$1]=$!
}
join() { # STEP: waits for what `begin` began
    local status=0
    say "$1"
    wait "${beside[$1]}" || status=$?
    unset "beside[$1]"
    cat "$venv/$1.txt"
    return "$status"
}

if [ $# -gt 0 ]; then
    venv=$1
else
    temporary=$(mktemp -d)
    venv=$temporary/venv
fi

say "environment: $(python3 --version), $(nproc) cores"
python3 -m venv "$venv"
export PATH="$venv/bin:$PATH" VIRTUAL_ENV=$venv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
unset PYTHONDONTWRITEBYTECODE # without bytecode each of the tests' many processes compiles what it imports
# uv finds and unpacks these hundred packages in 10 s, which takes pip two minutes.
python -m pip install --quiet --upgrade pip uv
uv pip install --quiet -r pyproject.toml --extra test-full --extra lint --extra dask --extra docs -r ci/mpi.txt
begin build python -m pip install --quiet --no-deps --no-build-isolation . # the extra test-full has what builds it
# cuDNN and CUDA's Python packages without what they need on a GPU: enough to load, describe and derive. Headers: what
# tests/abi compares with.
begin download uv pip install --quiet --no-deps -r ci/cudnn-without-gpu.txt -r ci/headers.txt

say "lint"
bash ci/lint.sh

say "every C file without a warning, under each compiler found; the third is for aarch64"
for compiler in gcc clang aarch64-linux-gnu-gcc; do
    command -v "$compiler" >/dev/null || { echo "$compiler: not on this machine, skipped"; continue; }
    for file in pybnorm/backends/*/adapter.c pybnorm/backends/native/{cuda,hip}.c; do
        "$compiler" -std=c11 -Wall -Wextra -Werror -O2 -fsyntax-only -D_GNU_SOURCE -Iinclude "$file"
    done
done

join build
join download
uv pip list --format=freeze | grep -iE '^(numpy|cython|onednn|nvidia|cuda|ml_dtypes|pytest|pybnorm)' || true

pages() {
    bash ci/docs.sh "$venv/site"
    if [ -n "$browser" ]; then
        python tests/check/browser.py "$venv"/site/*.html
    else
        echo "chromium: not on this machine, no page is seen in a browser"
    fi
}
libraries() { # of the steps after pytest
    uv pip install --quiet --prefix "$venv/tbb" onednn-cpu-tbb intel-cmplr-lib-rt
    bash ci/pytorch.sh --install
}
required=mpi4py,dask,cuda-core browser=''
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    required+=,chromium
    browser=1
fi
begin documentation pages
begin libraries libraries

say "pytest"
# These must be there on this runner: their absence is a failure, not a skip. One process more than there are cores:
# many tests wait for processes of their own.
PYBNORM_REQUIRE=onednn,cudnn PYBNORM_REQUIRE_PACKAGES=$required pytest --full -n $(($(nproc) + 1)) --dist loadfile \
    --no-loadscope-reorder # which would put the files of few and long tests at the end, where they leave a core idle

join documentation
join libraries

say "oneDNN without OpenMP"
LD_LIBRARY_PATH="$venv/tbb/lib" PYBNORM_LIB_ONEDNN="$venv/tbb/lib/libdnnl.so.3" PYBNORM_REQUIRE=onednn \
    pytest -n "$(nproc)" -k onednn tests/backends/test_calls.py tests/backends/test_plans.py

begin selftest pybnorm selftest # one process, while the longest file of tests leaves a core idle
say "PyTorch: its arrays, the modules, gradients"
bash ci/pytorch.sh

say "the main job"
pybnorm info
pybnorm check --backend onednn --suite smoke

join selftest
say "the judge: what does it say of oneDNN"
pybnorm check --backend onednn --suite standard --suite bugs --allow-known --jobs "$(nproc)" >"$venv/standard.txt" ||
    { cat "$venv/standard.txt"; exit 1; }
tail -n 2 "$venv/standard.txt"
say "done"
