#!/bin/sh
# Stands in for AMD's compilers: a kernel, HIP C++ or OpenCL C (a source *.cl), becomes a shared object for this machine's
# CPU, which hipcpu loads. hip_on_cpu.hpp and ocl_on_cpu.h have the words of the languages. Not known options are errors:
# a new MIOpen must be seen. CLSTUB_LOG: a file that gets a line for every compilation.
set -eu
export LC_ALL=C
here=/opt/stand-ins
out='' src='' opts=''
keep() {
    case $1 in
        *[[:space:]]*) echo "hipstub: white space in option: $1" >&2; exit 1 ;;
    esac
    opts="$opts $1"
}
value() { [ $# -ge 2 ] || { echo "hipstub: $1 has no value" >&2; exit 1; }; }
while [ $# -gt 0 ]; do
    case $1 in
        -o) value "$@"; out=$2; shift ;;
        -D) value "$@"; keep "-D$2"; shift ;;
        -D* | -std=* | --std=* | -cl-std=*) keep "$1" ;;
        # of the AMD target, of optimization and of warnings: nothing of the kernel's meaning
        -x | -mllvm | -Xclang | -target) value "$@"; shift ;;
        --offload-arch=* | --gpu-architecture=* | -mcpu=* | -I* | -m*cumode | -m*wavefrontsize64 | -m*code-object* | -fno-gpu-rdc | -f*offload-uniform-block) ;;
        -cl-kernel-arg-info | -cl-denorms-are-zero | -cl-fast-relaxed-math | -nogpulib | -no-canonical-prefixes | -O[0-3] | -c | -W* | -w | -g) ;;
        -*) echo "hipstub: option $1 is not known here" >&2; exit 1 ;;
        *) [ -z "$src" ] || { echo "hipstub: two sources: $src and $1" >&2; exit 1; }; src=$1 ;;
    esac
    shift
done
[ -n "$out" ] && [ -n "$src" ] || { echo "hipstub: -o OUTPUT and a SOURCE are needed" >&2; exit 1; }
[ -z "${CLSTUB_LOG:-}" ] || printf '%s%s\n' "$src" "$opts" >>"$CLSTUB_LOG"
for compiler in /usr/bin/clang++-[0-9]*; do :; done # PoCL's own
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# half: each operation is rounded, as a GPU does it
common='-O2 -march=native -ffp-contract=off -Xclang -ffloat16-excess-precision=none -fPIC -w'
# Each kernel gets a description that hipcpu finds by its name.
case $src in
    *.cl)
        # shellcheck disable=SC2086  # options without white space
        "$compiler" -x cl -cl-no-stdinc -Xclang -cl-ext=+cl_khr_fp16,+cl_khr_fp64 -include opencl-c-base.h \
            -include "$here/ocl_on_cpu.h" $opts $common -Xclang -disable-llvm-passes -S -emit-llvm "$src" -o "$work/kernel.ll"
        # Local memory lies in a section of its own.
        sed -i -E 's/^(@[^ ]+ = internal (unnamed_addr )?global [^,]+ undef), align/\1, section "hipcpu_lds", align/' "$work/kernel.ll"
        {
            printf '#include "%s/hip_on_cpu.hpp"\n' "$here"
            sed -nE 's/^define [a-z_ ]*spir_kernel void @([A-Za-z0-9_]+)\((.*)\) [^)]*$/\1 \2/p' "$work/kernel.ll" |
                while read -r name arguments; do
                    types=$(printf '%s' "$arguments" | sed -E 's/(^|, )([a-z0-9]+)[^,]*/\1hipcpu::ir_\2/g')
                    # its body, which LLVM gives the plain calling convention
                    printf 'extern "C" void __clang_ocl_kern_imp_%s(%s);\n' "$name" "$types"
                    printf 'extern "C" const hipcpu::kernel hipcpu_kernel_%s = hipcpu::describe<&__clang_ocl_kern_imp_%s>();\n' "$name" "$name"
                done
        } >"$work/glue.cpp"
        # shellcheck disable=SC2086
        "$compiler" -std=c++17 $common -c "$work/glue.cpp" -o "$work/glue.o"
        # shellcheck disable=SC2086
        "$compiler" $common -c "$work/kernel.ll" -o "$work/kernel.o"
        ;;
    *)
        # shellcheck disable=SC2086
        "$compiler" -x c++ -E -P $opts -I "${src%/*}" -include "$here/hip_on_cpu.hpp" "$src" -o "$work/kernel.ii"
        tr '\n' ' ' <"$work/kernel.ii" | grep -oE 'hipcpu_kernel_mark[^(]*\(' | sed -E 's/^.*[^A-Za-z0-9_]([A-Za-z0-9_]+) *\($/\1/' |
            sort -u | sed 's/.*/extern "C" const hipcpu::kernel hipcpu_kernel_& = hipcpu::describe<\&&>();/' >"$work/glue"
        # Local memory whose size the launch gives lies elsewhere.
        sed -i -E 's/hipcpu_kernel_mark//g
            s/extern static __attribute__\(\(section\("hipcpu_lds"\)\)\) ([A-Za-z0-9_]+) ([A-Za-z0-9_]+)\[\]/\1 *const \2 = (\1 *)hipcpu::dynamic/' "$work/kernel.ii"
        cat "$work/glue" >>"$work/kernel.ii"
        # shellcheck disable=SC2086
        "$compiler" -x c++-cpp-output -std=c++17 $common -c "$work/kernel.ii" -o "$work/kernel.o"
        ;;
esac
# The end of the local memory comes last.
set -- "$work"/*.o "$here/lds_end.o"
"$compiler" -shared -nostdlib++ "$@" -o "$work/kernel.so" -lm
{
    printf 'HIPCPU-ELF 1 %d %d\n%s\n' "${#opts}" "$(wc -c <"$work/kernel.so")" "$opts"
    cat -- "$work/kernel.so"
} >"$out"
