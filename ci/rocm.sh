#!/usr/bin/env bash
# Tests and the check on a machine with an AMD GPU and MIOpen; writes the reports into DIR.
#   ci/rocm.sh DIR
# Needs Python 3.10 or newer with its headers and venv, a C compiler, and MIOpen with a device where `pybnorm info` finds
# them. VENV as in ci/venv.sh, with the extra test.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/venv.sh
results=${1:?usage: ci/rocm.sh DIR}
mkdir -p "$results"
results=$(cd "$results" && pwd)
trap '[ -z "$temporary_venv" ] || rm -rf "$temporary_venv"' EXIT
environment test
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYBNORM_REQUIRE=miopen PYBNORM_REQUIRE_DEVICE=miopen
device miopen
failed=() parallel=() jobs=() # one GPU

part() { # NAME VARIABLE=VALUE... -- COMMAND...
    local name=$1 variables=()
    shift
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    printf '\n== MIOpen: %s (%d s)\n' "$name" "$SECONDS"
    env ${variables[@]+"${variables[@]}"} "$@" 2>&1 | tee -a "$results/rocm-tests.txt" || failed+=("$name")
}

. ci/rocm-parts.sh
miopen_parts
part 'one file for a report' -- python3 -m pybnorm collect --backend miopen -o "$results/pybnorm-report.zip"

printf '\n== MIOpen: %d s\n' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    grep -E '^(FAILED|ERROR) ' "$results/rocm-tests.txt" | cut -c 1-300 | head -n 30 || true
    printf 'ci/rocm.sh: FAILED: %s\n' "${failed[@]}"
    exit 1
fi
