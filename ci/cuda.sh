#!/usr/bin/env bash
# Tests and the check on a machine with an NVIDIA GPU; writes the reports into DIR.
#   ci/cuda.sh DIR             builds the extension in place and runs the parts up to examples
#   ci/cuda.sh DIR PART...     those parts only, in this order: info, plans, tests, smoke, full, examples; and what is not
#                              run by itself: compare (against oneDNN), bench, soak (a million calls), sanitize
# Needs Python 3.10 or newer with its headers and venv, a C compiler, and NVIDIA's driver. VENV as in ci/venv.sh; EXTRAS:
# those of pybnorm to install, default test, report and cuda12 or cuda13 as the driver is. Tests with PyTorch or CuPy run
# where those are installed (VENV=DIR or none); bench needs PyTorch, sanitize NVIDIA's compute-sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/venv.sh
out=${1:?usage: ci/cuda.sh DIR [PART...]}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(info plans tests smoke full examples)
mkdir -p "$out"
out=$(cd "$out" && pwd)
# Only what an earlier run made, which is listed beside it, or an empty file is replaced or removed.
made=$out/.cuda.sh todo=()
for part in "${parts[@]}"; do
    names=("cuda-$part.txt")
    case $part in
    full) names+=(full.json full.txt cuda-full.json) ;;
    compare) names+=(runs.tar.gz) ;;
    bench) names+=(bench.json bench.svg cuda-bench.json cuda-bench.svg) ;;
    esac
    for name in "${names[@]}"; do
        file=$out/$name
        if [ -L "$file" ] || { [ -e "$file" ] && [ ! -f "$file" ]; } ||
            { [ -s "$file" ] && ! grep -qxF -e "$name" "$made" 2>/dev/null; }; then
            echo "ci/cuda.sh: $file is there and not of an earlier run: take it away, or name another DIR"
            exit 2
        fi
        todo+=("$name")
    done
done
printf '%s\n' "${todo[@]}" >>"$made"
trap '[ -z "$temporary_venv" ] || rm -rf "$temporary_venv"' EXIT
if [ "${VENV:-}" != none ] && [ -z "${EXTRAS:-}" ]; then
    cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p') || true
    [ -n "$cuda" ] || lacks "nvidia-smi finds no driver of NVIDIA"
    EXTRAS=test,report,cuda$((cuda >= 13 ? 13 : 12))
fi
environment "${EXTRAS:-}"
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Reports say which library, not where this machine keeps it.
public() { sed -e "s#$site#<site-packages>#g" -e "s#$PWD#<checkout>#g" -e "s#${PYBNORM_LIB_ONEDNN:-\$none}#<libdnnl>#g"; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYBNORM_REQUIRE=cudnn PYBNORM_REQUIRE_DEVICE=cudnn
device cudnn
failed=()

part() { # NAME COMMAND...: its output to cuda-NAME.txt too
    local name=$1
    shift
    printf '\n== %s (%d s)\n' "$name" "$SECONDS"
    "$@" 2>&1 | { grep -vE '^[.sxX]+ +\[' || true; } | public | tee "$out/cuda-$name.txt" || failed+=("$name")
}

check() { env COLUMNS=150 python3 -m pybnorm check "$@"; }

# The other libraries' cases of the same tests are the CPU's and ROCm's to run.
tests() { python3 -m pytest -p no:cacheprovider -q -k 'not onednn and not [miopen and not -miopen' "$@"; }

# Where cuDNN compiles kernels all the time, processes beside one another are faster; elsewhere slower.
plan_tests=(tests/backends/test_plans.py tests/backends/test_alignment.py tests/backends/test_fused.py)

plans() {
    local workers=()
    if python3 -c 'import xdist' 2>/dev/null; then workers=(-n 6 -p no:benchmark); fi
    tests "${workers[@]}" "${plan_tests[@]}"
}

others() {
    tests "${plan_tests[@]/#/--ignore=}" tests/unit/test_devices.py tests/devices/test_two_devices.py tests/backends \
        tests/operations tests/layer tests/graph tests/functional tests/pytorch tests/bench
}

full() {
    local jobs=$(($(nproc) > 2 ? $(nproc) - 2 : 2)) status=0 # the data are made and judged on the host
    python3 -m pybnorm check --backend cudnn --suite full --jobs "$jobs" --json "$out/full.json" >"$out/full.txt" || status=$?
    tail -n 2 "$out/full.txt"
    public <"$out/full.json" | python3 ci/summarize.py >"$out/cuda-full.json" || status=1
    rm -f "$out/full.json" "$out/full.txt"
    return "$status"
}

compare() {
    local folder status=0
    folder=$(mktemp -d)
    for backend in cudnn onednn; do
        PYBNORM_REQUIRE=$backend PYBNORM_REQUIRE_DEVICE=$backend check --backend "$backend" --suite smoke \
            --save "$folder/run-$backend" >"$folder/text" || status=$?
        tail -n 2 "$folder/text"
    done
    (cd "$folder" && python3 -m pybnorm compare run-cudnn run-onednn) || status=$?
    tar -C "$folder" -czf "$out/runs.tar.gz" run-cudnn run-onednn
    rm -rf "$folder"
    return "$status"
}

bench() {
    python3 -m pybnorm bench device --json "$out/bench.json" --plot "$out/bench.svg" || return
    public <"$out/bench.json" >"$out/cuda-bench.json"
    rm "$out/bench.json"
    mv "$out/bench.svg" "$out/cuda-bench.svg"
}

# The entry points, then every algorithm.
sanitize() {
    local status=0
    for suite in smoke algorithms; do
        for tool in memcheck initcheck racecheck; do
            echo "-- $tool, suite $suite"
            compute-sanitizer --tool "$tool" --target-processes all --print-limit 5 --error-exitcode 9 \
                python3 -m pybnorm check --backend cudnn --suite "$suite" --jobs 4 --timeout 600 | tail -n 4 || status=$?
        done
    done
    return "$status"
}

examples() {
    local bad=0 dtypes
    for example in examples/*.py; do
        [ "$example" = examples/example.py ] && continue
        dtypes=$(python3 "$example" --help | sed -n 's/.*--dtype {\([a-z0-9,]*\)}.*/\1/p' | head -n 1)
        [ -n "$dtypes" ] || { echo "$example does not say which dtypes it takes"; bad=1; }
        for dtype in ${dtypes//,/ }; do
            python3 "$example" --backend cudnn --dtype "$dtype" || { echo "exit status $?"; bad=1; }
        done
    done
    return "$bad"
}

for name in "${parts[@]}"; do
    case $name in
    info) part info python3 -m pybnorm info ;;
    tests) part tests others ;;
    smoke) part smoke check ;;
    soak) part soak python3 ci/cuda-soak.py ;;
    plans | full | examples | compare | bench | sanitize) part "$name" "$name" ;;
    *) echo "no part is called $name"; exit 2 ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'ci/cuda.sh: FAILED: %s\n' "${failed[@]}"
    exit 1
fi
