# shellcheck shell=bash disable=SC2154  # variables of those that source it
# What is run on MIOpen, the same on the CPU (ci/rocm-rig.sh) and on a GPU (ci/rocm.sh), which source this file.
# They define `part NAME VARIABLE=VALUE... -- COMMAND...`, which runs a command and notes its failure; $results, the
# reports' folder as the command sees it; $parallel and $jobs, options of pytest and of the check for several processes;
# $calls, the number of random calls, 20,000 by default; $shard, an option that leaves a share of the check's cases;
# $bugs, a file in place of the suite of this name; and $less, the end of an expression of -k, which leaves out tests.
# HIPCPU_ variables mean nothing on a GPU.
readonly PYTEST=(python3 -m pytest -q -p no:cacheprovider ${parallel[@]+"${parallel[@]}"})
readonly ALONE=(python3 -m pytest -q -p no:cacheprovider) # tests that start processes of their own

miopen_parts() {
    part info -- python3 -m pybnorm info
    # Every block ends at an unreadable page, to the byte.
    part 'prototypes against the real header; calls and arrays, guard pages' HIPCPU_ALIGN=4 -- \
        "${PYTEST[@]}" tests/abi tests/backends tests/devices -k "miopen${less:-}" --junitxml="$results/miopen-guard.xml"
    part 'random calls, guard pages' HIPCPU_ALIGN=4 PYBNORM_FUZZ_CALLS="${calls:-20000}" -- \
        "${ALONE[@]}" tests/fuzz -k miopen --junitxml="$results/miopen-fuzz.xml"
    part 'operations, layers, graphs; known defects, each still there' -- \
        "${PYTEST[@]}" tests/operations tests/layer tests/graph tests/functional tests/pytorch \
        tests/check/test_check_defects.py -k "miopen${less:-}" --junitxml="$results/miopen-operations.xml"
    part 'the check: whatever else is wrong is new' -- bash -c "set -o pipefail
        python3 -m pybnorm check --backend miopen --suite smoke --suite ${bugs:-bugs} --allow-known --timeout 300 ${jobs[*]-} ${shard[*]-} |
            tee '$results/miopen-check.txt' | tail -n 12"
    # Kernels of our own: one minute in the rig, whose compiler takes most of it.
    # PYBNORM_REQUIRE is checked, too: of MIOpen here, which the part before has judged.
    part 'native: the check' PYBNORM_REQUIRE=native_rocm PYBNORM_REQUIRE_DEVICE= -- bash -c "set -o pipefail
        python3 -m pybnorm check --backend native_rocm --suite smoke --timeout 300 ${jobs[*]-} |
            tee '$results/native-rocm-check.txt' | tail -n 4"
    part 'native: calls' -- "${PYTEST[@]}" tests/backends/test_native_rocm.py
    part 'memory, streams, events' -- \
        "${PYTEST[@]}" tests/unit/test_devices.py tests/unit/test_hip.py -k 'hip or time or double'
}
