#!/usr/bin/env bash
# Tests under AddressSanitizer and UndefinedBehaviorSanitizer, or ThreadSanitizer, child processes included; instrumented
# are the extension and the doubles of vendor libraries, not Python, NumPy or a vendor's library.
#   ci/sanitize.sh SANITIZERS [DIR [PYTEST-ARGUMENT...]]
#     SANITIZERS   address,undefined (or one of them), or thread: the build's PBN_SANITIZE
#     DIR          what the sanitizers say goes there, a file per process; default a temporary folder
#     PYTEST-...   default: tests/unit tests/backends tests/fuzz
# Needs GCC with its sanitizers' libraries, Linux and Python's headers; VENV as in ci/venv.sh, with the extra test.
# Exit status: 1 if a test failed or a sanitizer said anything that ci/sanitize-suppressions.txt does not list.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/venv.sh
sanitizers=${1:?usage: ci/sanitize.sh SANITIZERS [DIR [PYTEST-ARGUMENT...]]}
work=$(mktemp -d "${TMPDIR:-/tmp}/sanitize.XXXXXX")
trap 'rm -rf "$work" ${temporary_venv:+"$temporary_venv"}' EXIT
reports=${2:-$work/reports}
shift $(($# > 2 ? 2 : $#))
[ $# -gt 0 ] || set -- tests/unit tests/backends tests/fuzz
mkdir -p "$reports"
reports=$(cd "$reports" && pwd)
[ -z "$(ls -A "$reports")" ] || { echo "ci/sanitize.sh: $reports is not empty: its files would be taken for reports"; exit 2; }
[ "${VENV:-}" = none ] || PBN_OPTIMIZE=0 environment test # for its packages: what is tested is built below

echo "== build: PBN_SANITIZE=$sanitizers, $(gcc --version | head -n 1), $(python3 --version)"
# In a copy: no extension of this build stays in the checkout, and none of the checkout's is taken for it.
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for f; do [ ! -e "$f" ] || printf "%s\0" "$f"; done' sh |
    tar -c --null --verbatim-files-from -T - | tar -x -C "$work/tree"
cd "$work/tree"
PBN_SANITIZE=$sanitizers CC=gcc python3 setup.py -q build_ext --inplace >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# CC: the doubles'
export PBN_SANITIZE=$sanitizers CC="gcc -g -fno-omit-frame-pointer -fsanitize=$sanitizers -fno-sanitize-recover=undefined"

runtime=() run=()
case $sanitizers in
    *address*) runtime=(libasan.so libstdc++.so.6) ;; # the second first, or no exception of a C++ library can be thrown
    thread) runtime=(libtsan.so libstdc++.so.6) ;;
esac
preload=''
for name in ${runtime[@]+"${runtime[@]}"}; do
    file=$(gcc -print-file-name="$name")
    [ -e "$file" ] || { echo "ci/sanitize.sh: GCC has no $name here (on Debian and Ubuntu it comes with gcc)"; exit 1; }
    preload+="${preload:+ }$(readlink -f "$file")"
done
# Not looked for: leaks (CPython itself keeps memory until the end of the process, all of which would be reported).
common="log_path=$reports/report:allocator_may_return_null=1"
export ASAN_OPTIONS="$common:detect_leaks=0" UBSAN_OPTIONS="$common:print_stacktrace=1"
# Threads of a child of fork() go on, as they do without the sanitizer.
export TSAN_OPTIONS="$common:die_after_fork=0:history_size=4:suppressions=$PWD/ci/sanitize-suppressions.txt"
# Every block of Python's own is the sanitizer's, so that what lies beyond an object is seen.
case $sanitizers in *address*) export PYTHONMALLOC=malloc ;; esac
# Addresses at random as Linux gives them by now leave ThreadSanitizer of GCC 12 no room.
[ "$sanitizers" != thread ] || run=(setarch -R)

status=0
${run[@]+"${run[@]}"} env LD_PRELOAD="$preload" python3 -c 'import sys, pybnorm._core as core
sys.exit(0 if core.__file__.startswith(sys.argv[1]) else "not the one built here: " + core.__file__)' "$PWD" || exit 1
${run[@]+"${run[@]}"} env LD_PRELOAD="$preload" PYBNORM_REQUIRE=onednn python3 -m pytest -q -p no:cacheprovider \
    -n "${JOBS:-$(nproc)}" --dist loadfile "$@" || status=1
count=$(find "$reports" -type f | wc -l)
if [ "$count" -gt 0 ]; then
    find "$reports" -type f -exec cat {} + | grep -E 'ERROR|WARNING|runtime error|SUMMARY' | sort | uniq -c | sort -rn | head -n 30
    status=1
fi
echo "== $sanitizers: $count processes with findings, exit status $status"
exit "$status"
