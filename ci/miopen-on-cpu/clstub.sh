#!/bin/sh
# Stands in for the OpenCL compiler that libMIOpen.so.1 starts: instead of machine code it writes the kernel's source
# and its options, which hipcpu hands to the OpenCL of the CPU. Not known options are errors: a new MIOpen must be seen.
# CLSTUB_LOG: a file that gets a line for every compilation. HIPCPU_NATIVE=1: hipstub.sh makes machine code of this CPU.
set -eu
[ "${HIPCPU_NATIVE:-0}" = 0 ] || exec /opt/stand-ins/hipstub.sh "$@"
export LC_ALL=C  # lengths below are in bytes
out='' src='' opts=''
keep() {
    case $1 in
        *[[:space:]]*) echo "clstub: white space in option: $1" >&2; exit 1 ;;
    esac
    opts="$opts $1"
}
value() { [ $# -ge 2 ] || { echo "clstub: $1 has no value" >&2; exit 1; }; }
while [ $# -gt 0 ]; do
    case $1 in
        -o) value "$@"; out=$2; shift ;;
        -D) value "$@"; keep "-D$2"; shift ;;
        -D*|-cl-denorms-are-zero|-cl-fast-relaxed-math) keep "$1" ;;
        -cl-std=*) keep -cl-std=CL3.0 ;;  # PoCL has no 2.0
        # of the AMD target, of optimization and of warnings: nothing of the kernel's meaning
        -x|-target|-mllvm|-Xclang) value "$@"; shift ;;
        -mcpu=*|-m*wavefrontsize64|-mcode-object-version=*|-mno-code-object-v3|-mcode-object-v3|-m*cumode) ;;
        -cl-kernel-arg-info|-nogpulib|-no-canonical-prefixes|-O[0-3]|-c|-W*|-w|-g) ;;
        -*) echo "clstub: option $1 is not known here" >&2; exit 1 ;;
        *) [ -z "$src" ] || { echo "clstub: two sources: $src and $1" >&2; exit 1; }; src=$1 ;;
    esac
    shift
done
[ -n "$out" ] && [ -n "$src" ] || { echo "clstub: -o OUTPUT and a SOURCE are needed" >&2; exit 1; }
[ -z "${CLSTUB_LOG:-}" ] || printf '%s%s\n' "$src" "$opts" >>"$CLSTUB_LOG"
size=$(wc -c <"$src")
{ printf 'HIPCPU-OCL 1 %d %d\n%s\n' "${#opts}" "$size" "$opts"; cat -- "$src"; } >"$out"
