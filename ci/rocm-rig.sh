#!/usr/bin/env bash
# The real MIOpen on a machine without an AMD GPU: builds the rig, tests its stand-ins, runs MIOpen's part of the suite.
#   ci/rocm-rig.sh [DIR]      DIR: where the reports go, default none are kept
# Variables: CACHE, MIRROR, SUITE, VERSION (3.5: all of it on MIOpen 3.5) as in ci/miopen-on-cpu/run.sh; RIG_ROOT keeps the root between runs.
# Needs root. Exit status: 0 all of it ran and is right; 1 something is not, named at the end; 64, 70, 77 the rig cannot run
# and 75 Debian's archive cannot be had, both of ci/miopen-on-cpu/run.sh: nothing was tested.
set -euo pipefail
cd "$(dirname "$0")/.."
rig=ci/miopen-on-cpu/run.sh
temporary='' child=''
clean() {
    trap '' INT TERM HUP
    if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; wait "$child" 2>/dev/null || true; fi
    if [ -n "$temporary" ]; then rm -rf --one-file-system "$temporary"; fi
}
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
root=${RIG_ROOT:-}
[ -n "$root" ] || root=$(mktemp -d "${TMPDIR:-/tmp}/rocm-rig.XXXXXX")
[ -n "${RIG_ROOT:-}" ] || temporary=$root
out=${1:-$root/out}
mkdir -p "$root" "$out"

# Bytecode of all parts: without it each of their many processes compiles what it imports, a second or two.
readonly KEEP=(env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=/var/cache/bytecode)

part() { # NAME VARIABLE=VALUE... -- COMMAND...
    local name=$1 variables=() status=0
    shift
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    printf '\n== MIOpen on the CPU: %s (%d s)\n' "$name" "$SECONDS"
    local shown writer
    exec {shown}> >(exec tee "$root/part")
    writer=$!
    env PYBNORM_REQUIRE=miopen PYBNORM_REQUIRE_DEVICE=miopen "${variables[@]}" \
        "$rig" --root "$root" --out "$out" ${options[@]+"${options[@]}"} -- "${KEEP[@]}" "$@" >&"$shown" 2>&1 &
    child=$! # in the background, so that a signal is handled at once
    exec {shown}>&-
    wait "$child" || status=$?
    child='' options=()
    wait "$writer" || true
    sed -nE 's/^[0-9]+ skipped: (miopen.*)/    \1/p' "$root/part" >>"$root/skipped"
    case $status in
        0) ;;
        75)
            if [ -n "$additional" ]; then
                echo "ci/rocm-rig.sh: $name: NOT TESTED: $(cat "$root/unavailable")"
                return
            fi
            echo "ci/rocm-rig.sh: MIOpen NOT TESTED: $(cat "$root/unavailable")"
            exit "$status"
            ;;
        64 | 70 | 77)
            echo "ci/rocm-rig.sh: FAILED: the rig cannot run (exit status $status of $rig), so that MIOpen was not tested"
            exit "$status"
            ;;
        *)
            failed+=("$name (exit status $status)")
            while IFS= read -r line; do failed+=("    $line"); done < <(grep -E '^(FAILED|ERROR) ' "$root/part" | cut -c 1-300 | head -n 10)
            ;;
    esac
}

cat >"$root/skipped" <<'END'
    left out here: 2x1000000 of the suite bugs (oneDNN's scratch); half of the check's cases, the other half tomorrow
    left out here: names with native_rocm or native-, wrong_call, examples in f16 and nhwc: ci/cpu.sh and ci/rocm.sh
END
failed=() additional='' options=(--self-test) results=/out parallel=(-n "$(nproc)") jobs=(--jobs "$(nproc)")
calls=1000 # random calls: 20,000 take 5 minutes here
# Left out: native and native_rocm under names with "miopen", which ci/cpu.sh and parts of their own have; the examples
# in other dtypes and layouts, or called wrongly, of whose code MIOpen changes nothing: ci/cpu.sh and ci/rocm.sh have them.
# oneDNN's scratch for a million channels: as many groups, which one thread runs for half a minute while others wait.
grep -v 2x1000000 pybnorm/check/language/suites/bugs.txt >"$out/bugs.txt"
bugs=$results/bugs.txt less=' and not native_rocm and not native- and not wrong_call and not (one_command and (f16 or nhwc))'
# Kernels are many and run a few times each: the compiler's optimization takes longer than it saves.
export HIPCPU_BUILD_OPTIONS=${HIPCPU_BUILD_OPTIONS--cl-opt-disable}
# Half of the check's cases, the other half on the next day. Each known defect is shown every day by the tests, and
# ci/rocm.sh runs all cases on a GPU.
half=$(($(date -u +%s) / 86400 % 2 + 1))
shard=(--shard "$half/2")
. ci/rocm-parts.sh
miopen_parts
# What only the rig can show. Nothing runs before it is waited for:
part 'calls and arrays, lazy' HIPCPU_LAZY=1 -- \
    "${PYTEST[@]}" tests/backends tests/devices -k 'miopen and not activation and not same_bits' \
    --junitxml="$results/miopen-lazy.xml"
part 'no device' HIPCPU_NO_DEVICE=1 PYBNORM_REQUIRE_DEVICE= -- \
    "${ALONE[@]}" tests/backends/test_descriptors.py tests/fuzz -k miopen
# Two devices, none of which may take what is the other's:
part 'two devices' HIPCPU_DEVICES=2 PYBNORM_REQUIRE_SECOND_DEVICE=1 -- "${PYTEST[@]}" tests/devices -k miopen
# In an order of chance, and with the unreadable page before each block:
part 'any order, guard pages before' HIPCPU_SEED="${SEED:-1}" HIPCPU_BEFORE=1 -- \
    "${PYTEST[@]}" tests/devices tests/backends/test_calls.py -k 'miopen and not same_bits and not f16'
# The next version, of Debian experimental, which may be without it: then that is said, and all else counts.
additional=1
if [ "${VERSION:-3.4}" = 3.4 ]; then
    part 'MIOpen 3.5, the check' VERSION=3.5 -- bash -c "set -o pipefail
        python3 -m pybnorm check --backend miopen --suite smoke --allow-known --timeout 300 ${jobs[*]-} --shard $((3 - half))/2 |
            tee '$results/miopen-3.5-check.txt' | tail -n 12"
    part 'MIOpen 3.5, fused activations' VERSION=3.5 -- "${PYTEST[@]}" tests/backends/test_activation.py -k miopen
fi

printf '\n== what no part ran, and why\n'
sort -u "$root/skipped"
printf '\n== MIOpen on the CPU: %d s\n' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'ci/rocm-rig.sh: FAILED:\n'
    printf '    %s\n' "${failed[@]}"
    exit 1
fi
