#!/usr/bin/env bash
# Tests and the check on a machine with an AMD GPU and MIOpen; writes the reports into DIR.
#   ci/rocm.sh DIR        uses the python3 that is active; builds the extension in place
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:?usage: ci/rocm.sh DIR}
mkdir -p "$results"
results=$(cd "$results" && pwd)
python3 setup.py -q build_ext --inplace >"$results/build.txt" 2>&1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYBNORM_REQUIRE=miopen PYBNORM_REQUIRE_DEVICE=miopen
failed=() parallel=() # one GPU

part() { # NAME VARIABLE=VALUE... -- COMMAND...
    local name=$1 variables=()
    shift
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    printf '\n== MIOpen: %s (%d s)\n' "$name" "$SECONDS"
    env "${variables[@]}" "$@" 2>&1 | tee -a "$results/rocm-tests.txt" || failed+=("$name")
}

. ci/rocm-parts.sh
miopen_parts

printf '\n== MIOpen: %d s\n' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
