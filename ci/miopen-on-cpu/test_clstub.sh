#!/bin/sh
# Tests of clstub.sh; run beside it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "test_clstub: $1" >&2; exit 1; }
same() { [ "$1" = "$2" ] || fail "$3: got '$1', expected '$2'"; }
refused() {
    ! sh "$here/clstub.sh" "$@" 2>"$work/error" || fail "accepted: $*"
    grep -q '^clstub:' "$work/error" || fail "no reason: $*"
}

printf 'kernel void f() {}\n\n' >source.cl
sh "$here/clstub.sh" -x cl -target amdgcn-amd-amdhsa -O3 -mcpu=gfx906 -D A=1 -DB -cl-std=CL2.0 -mllvm -x \
    -Wno-everything source.cl -o object
printf 'HIPCPU-OCL 1 24 20\n -DA=1 -DB -cl-std=CL3.0\nkernel void f() {}\n\n' >expected
cmp object expected || fail "the object differs"

CLSTUB_LOG=$work/log sh "$here/clstub.sh" -DA source.cl -o object
same "$(cat log)" 'source.cl -DA' "the log"

mkdir 'a folder'
cp source.cl 'a folder/-source.cl'
sh "$here/clstub.sh" 'a folder/-source.cl' -o 'a folder/object'
same "$(head -n 1 'a folder/object')" 'HIPCPU-OCL 1 0 20' "names with white space"

printf '%s' 'ä' >source.cl
sh "$here/clstub.sh" source.cl -o object
same "$(head -n 1 object)" 'HIPCPU-OCL 1 0 2' "bytes, not characters"

refused source.cl
refused -o object
refused source.cl source.cl -o object
refused --new-option source.cl -o object
refused '-DA=1 2' source.cl -o object
refused -DA source.cl -o
! sh "$here/clstub.sh" absent.cl -o object 2>/dev/null || fail "an absent source was accepted"
echo "test_clstub: passed"
