#!/usr/bin/env bash
# Tests and the check on a machine with an NVIDIA GPU and cuDNN; writes the reports into DIR.
#   ci/cuda.sh DIR        uses the python3 that is active, with its CUDA packages; builds the extension in place
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: ci/cuda.sh DIR}
mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Reports say which library, not where this machine keeps it.
public() { sed -e "s#$site#<site-packages>#g" -e "s#$PWD#<checkout>#g" -e "s#${PYBNORM_LIB_ONEDNN:-\$none}#<libdnnl>#g"; }
python3 setup.py -q build_ext --inplace >"$out/build.txt" 2>&1 || { cat "$out/build.txt"; exit 1; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYBNORM_REQUIRE=cudnn PYBNORM_REQUIRE_DEVICE=cudnn
failed=()

part() { # NAME COMMAND...: its output to cuda-NAME.txt too
    local name=$1
    shift
    printf '\n== %s (%d s)\n' "$name" "$SECONDS"
    "$@" 2>&1 | { grep -vE '^[.sxX]+ +\[' || true; } | public | tee "$out/cuda-$name.txt" || failed+=("$name")
}

tests() { python3 -m pytest -p no:cacheprovider -q "$@"; }

full() {
    local jobs=$(($(nproc) > 2 ? $(nproc) - 2 : 2)) status=0 # the data are made and judged on the host
    python3 -m pybnorm check --backend cudnn --suite full --jobs "$jobs" --json "$out/full.json" >"$out/full.txt" || status=$?
    tail -n 2 "$out/full.txt"
    public <"$out/full.json" | python3 ci/summarize.py >"$out/cuda-full.json" || status=1
    rm -f "$out/full.json" "$out/full.txt"
    return "$status"
}

examples() {
    local failed=0 dtypes
    for example in examples/*.py; do
        [ "$example" = examples/example.py ] && continue
        dtypes=$(python3 "$example" --help | sed -n 's/.*--dtype {\([a-z0-9,]*\)}.*/\1/p' | head -n 1)
        [ -n "$dtypes" ] || { echo "$example does not say which dtypes it takes"; failed=1; }
        for dtype in ${dtypes//,/ }; do
            python3 "$example" --backend cudnn --dtype "$dtype" || { echo "exit status $?"; failed=1; }
        done
    done
    return "$failed"
}

part info python3 -m pybnorm info
part tests tests tests/unit/test_devices.py tests/backends tests/operations tests/layer tests/graph tests/functional \
    tests/pytorch tests/bench
part smoke env COLUMNS=150 python3 -m pybnorm check
part full full
part examples examples
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
