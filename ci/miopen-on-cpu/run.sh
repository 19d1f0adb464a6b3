#!/usr/bin/env bash
# Runs a command where the real libMIOpen computes on the CPU; README.md says how that works and what it shows.
#
#   ci/miopen-on-cpu/run.sh [OPTION...] -- COMMAND [ARGUMENT...]
#
#   --root DIR     keep the root here, in a folder of its own, and go on where an earlier run ended; else a temporary one
#   --cache DIR    keep the root with its packages here as a tarball, and the build of pybnorm; use what is there (or
#                  variable CACHE)
#   --mirror URL   Debian mirror, for example a dated snapshot (or variable MIRROR; else Debian's own, which has none)
#   --suite NAME   Debian suite, default sid (or variable SUITE)
#   --version X.Y  MIOpen: the suite's (3.4, the default), or 3.5, of Debian experimental (or variable VERSION)
#   --out DIR      this folder is /out for the command
#   --bare         do not build pybnorm in the root
#   --self-test    also test the stand-ins themselves, plain and under the sanitizers, before the command
#
# The command runs as root in /srv/pybnorm, a copy of this working tree (what git tracks or does not ignore) with
# pybnorm installed from it, and sees the variables PYBNORM_*, HIPCPU_*, MIOPEN_*, POCL_*, CLSTUB_*, PYTEST_*.
# Needs root and Linux's unshare; installs debootstrap (and Debian's keys) with apt-get where they are absent.
#
# Exit status: the command's own; 64 wrong usage; 70 the rig cannot run: packages that do not install, a MIOpen that it
# does not know, a stand-in or pybnorm that does not build, a self-test that fails; 75 Debian's archive cannot be had, and
# the root's file "unavailable" says what of it (a command's own 75 is turned into 1); 77 not permitted here.
# Every mount is in a mount namespace of its own: whatever ends this script, none is left.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
readonly USAGE=64 FAULT=70 UNAVAILABLE=75 NOT_PERMITTED=77
# libmiopen-dev, g++: the checks of our prototypes against the real header (tests/abi) run here, too.
readonly PACKAGES=(
    libmiopen1 libmiopen-dev pocl-opencl-icd
    python3 python3-dev python3-setuptools python3-pip python3-wheel cython3 g++
    python3-numpy python3-ml-dtypes python3-click python3-rich python3-array-api-compat python3-pytest python3-pytest-xdist python3-hypothesis
)
# Versions of libmiopen1, without Debian's revision, that the stand-ins have been seen to run. Debian sid moves, and its
# archive keeps no older state: with another version the rig is a failure, which says what to do.
readonly KNOWN_MIOPEN=(6.4.3+dfsg)
# The same of MIOpen 3.5, of ROCm 7, in Debian experimental. It lies beside the suite's, in /opt/miopen-3.5.
readonly KNOWN_NEWER=(7.2.4+dfsg)
readonly NEWER=/opt/miopen-3.5 NEWER_HIP=70253211
readonly REVISION=2 # of the stages "base" and "packages": change it when a cached root must not be used any more

say() { printf 'miopen-on-cpu: %s (%d s)\n' "$*" "$SECONDS" >&2; }
die() { # STATUS TEXT
    printf 'miopen-on-cpu: %s\n' "$2" >&2
    exit "$1"
}
unavailable() {
    {
        printf '\n'
        tail -n 15 "$log" | sed 's/^/    /'
        printf '\n%s\n' "miopen-on-cpu: ******** DEBIAN'S ARCHIVE UNAVAILABLE: $1"
        printf '%s\n\n' "miopen-on-cpu: ******** nothing was tested; exit status $UNAVAILABLE"
    } >&2
    printf '%s\n' "Debian's archive cannot be had: $1" >"$root/unavailable"
    exit "$UNAVAILABLE"
}
# not_had TEXT: a command that takes from the archive has failed. What cannot be reached is nobody's fault here; that
# what was reached does not install is one.
not_had() {
    # what apt-get and debootstrap say of it in the locale C, at the end
    ! tail -n 50 "$log" | grep -qE '^[EW]: (Failed to fetch|Failed getting release|Unable to fetch|Couldn.t download)' ||
        unavailable "$1"
    fault "$1, though the archive answers"
}
fault() {
    tail -n 40 "$log" | sed 's/^/    /' >&2
    die "$FAULT" "FAULT: $1"
}

# ---------------------------------------------------------------- arguments

inside_of=''
if [ "${1:-}" = --inside ] && [ "$$" = 1 ]; then # this script called itself, see below
    inside_of=$2
    shift 2
fi
root='' cache=${CACHE:-} mirror=${MIRROR:-} suite=${SUITE:-sid} version=${VERSION:-3.4} out='' bare='' self_test=''
arguments=("$@")
while [ $# -gt 0 ]; do
    case $1 in
        --root | --cache | --mirror | --suite | --version | --out)
            [ $# -ge 2 ] && [ -n "$2" ] || die "$USAGE" "$1 needs a value"
            name=${1#--}
            printf -v "$name" '%s' "$2"
            shift
            ;;
        --bare) bare=1 ;;
        --self-test) self_test=1 ;;
        --help)
            sed -n '2,/^set -e/{/^set -e/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --)
            shift
            break
            ;;
        *) die "$USAGE" "option $1 is not known; --help lists them" ;;
    esac
    shift
done
[ $# -gt 0 ] || [ -n "$self_test" ] || die "$USAGE" "no command given; --help says how"
[ "$version" = 3.4 ] || [ "$version" = 3.5 ] || die "$USAGE" "--version $version: 3.4 or 3.5"

# ---------------------------------------------------------------- outside: namespaces, signals, the temporary root

if [ -z "$inside_of" ]; then
    [ "$(uname -s)" = Linux ] || die "$NOT_PERMITTED" "this needs Linux"
    [ "$(id -u)" = 0 ] || die "$NOT_PERMITTED" "this needs root (chroot and mounts): sudo $0 ..."
    unshare --mount --pid --fork true 2>/dev/null ||
        die "$NOT_PERMITTED" "mount and pid namespaces are not permitted here"
    temporary='' child=''
    clean() {
        trap '' INT TERM HUP
        # With the namespace's first process go all its others and every mount.
        if [ -n "$child" ]; then kill -KILL "$child" 2>/dev/null || true; wait "$child" 2>/dev/null || true; fi
        if [ -n "$temporary" ]; then rm -rf --one-file-system "$temporary"; fi
    }
    trap clean EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if [ -z "$root" ]; then
        temporary=$(mktemp -d "${TMPDIR:-/tmp}/miopen-on-cpu.XXXXXX")
        root=$temporary
    fi
    mkdir -p "$root" ${cache:+"$cache"} ${out:+"$out"}
    setpriv --pdeathsig KILL \
        unshare --mount --propagation private --pid --fork --kill-child=KILL \
        bash "$here/run.sh" --inside "$root" "${arguments[@]}" <&0 &
    child=$!
    status=0
    wait "$child" || status=$?
    child=''
    exit "$status"
fi

# ---------------------------------------------------------------- inside

[ -z "$cache" ] || cache=$(cd "$cache" && pwd)
[ -z "$out" ] || out=$(cd "$out" && pwd)
root=$(cd "$inside_of" && pwd)
fs=$root/fs stamps=$root/stamps log=$root/log
# Only what this script made is removed or written over: a root that has its mark, or nothing of its names.
readonly MARK='root of miopen-on-cpu'
if [ -L "$root/mark" ] || [ "$(cat "$root/mark" 2>/dev/null)" != "$MARK" ]; then
    for name in mark fs fs.partial stamps log lock list files needed unavailable; do
        [ ! -e "$root/$name" ] && [ ! -L "$root/$name" ] ||
            die "$USAGE" "$root/$name was not made by this script, which would remove it: name another folder"
    done
    printf '%s\n' "$MARK" >"$root/mark"
fi
mkdir -p "$stamps"
exec 9>"$root/lock"
flock --nonblock 9 || die "$USAGE" "another run uses $root"
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

inside() { chroot "$fs" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@" 9>&-; }
apt() { inside apt-get -q -y -o Acquire::Retries=3 -o Acquire::Check-Valid-Until=false \
    -o APT::Install-Recommends=false -o Dpkg::Use-Pty=0 "$@" >>"$log" 2>&1 </dev/null; }
digest() { cat -- "$@" | sha256sum | cut -c1-16; }
# done_with STAGE KEY: whether a stage was completed with the same input; if not, it begins, and is not done till finish
done_with() {
    [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ] || { rm -f "$stamps/$1"; return 1; }
}
finish() {
    printf '%s\n' "$2" >"$stamps/$1.new"
    mv "$stamps/$1.new" "$stamps/$1"
}

root_key=$(printf '%s\n' "$REVISION" "$suite" "$mirror" "$(uname -m)" "${PACKAGES[@]}" "${KNOWN_MIOPEN[@]}" | sha256sum | cut -c1-16)
tarball=${cache:+$cache/miopen-on-cpu-$root_key.tar.zst}

tools() { # what this machine must have to make a root
    local missing=()
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
    [ -z "$tarball" ] || command -v zstd >/dev/null || missing+=(zstd)
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null ||
        die "$NOT_PERMITTED" "this machine lacks ${missing[*]}, and apt-get to install them"
    say "installing ${missing[*]} on this machine with apt-get"
    { apt-get -q update && apt-get -q -y install --no-install-recommends "${missing[@]}"; } >>"$log" 2>&1 </dev/null ||
        not_had "${missing[*]} for this machine"
}

readonly OLDER="name a state of Debian with an older one (--mirror with the address of a dated snapshot)"
known_miopen() { # VERSION
    local known
    for known in "${KNOWN_MIOPEN[@]}"; do [ "${1%-*}" != "$known" ] || return 0; done
    fault "libmiopen1 of Debian $suite is of version '${1:-none}', and the rig is known to run ${KNOWN_MIOPEN[*]}. Add it \
to KNOWN_MIOPEN in ci/miopen-on-cpu/run.sh and run ci/rocm-rig.sh: if all is green with it, it stays there; else $OLDER"
}

tarball_mark() { printf 'P*M\030\020\0\0\0pybnorm rig root'; } # a frame that zstd skips, in front of the others

base() {
    if done_with base "$root_key" && [ -d "$fs" ]; then return; fi
    rm -rf --one-file-system "$fs" "$fs.partial"
    rm -f "$stamps"/*
    mkdir "$fs.partial"
    if [ -n "$tarball" ] && { [ -e "$tarball" ] || [ -L "$tarball" ]; }; then
        { [ -f "$tarball" ] && [ ! -L "$tarball" ] && tarball_mark | cmp -s -n 24 - "$tarball"; } ||
            die "$USAGE" "$tarball was not made by this script, which would remove it: name another folder"
        say "unpacking $tarball"
        if zstd -dcq "$tarball" | tar -x --numeric-owner -C "$fs.partial" >>"$log" 2>&1; then
            mv "$fs.partial" "$fs"
            finish packages "$root_key"
            finish base "$root_key"
            return
        fi
        say "$tarball is damaged: removed, the root is made anew"
        rm -rf --one-file-system "$fs.partial" "$tarball"
        mkdir "$fs.partial"
    fi
    say "debootstrap of Debian $suite"
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$fs.partial" ${mirror:+"$mirror"} \
        >>"$log" 2>&1 </dev/null || not_had "debootstrap of $suite${mirror:+ from $mirror} failed"
    mv "$fs.partial" "$fs"
    finish base "$root_key"
}

mounts() { # PoCL asks /proc and /sys about the processor and the memory
    mount -t proc proc "$fs/proc"
    mount --bind /sys "$fs/sys"
    mkdir -p "$fs/dev/shm"
    mount -t tmpfs tmpfs "$fs/dev/shm"
    if [ -n "$out" ]; then
        mkdir -p "$fs/out"
        mount --bind "$out" "$fs/out"
    fi
}

packages() {
    if done_with packages "$root_key"; then return; fi
    say "packages: ${PACKAGES[*]}"
    printf 'path-exclude=%s\n' '/usr/share/doc/*' '/usr/share/man/*' '/usr/share/locale/*' \
        >"$fs/etc/dpkg/dpkg.cfg.d/small"
    apt -o APT::Update::Error-Mode=any update || not_had "the lists of packages"
    known_miopen "$(inside apt-cache show --no-all-versions libmiopen1 2>>"$log" | sed -n 's/^Version: //p')"
    # Empty packages stand for AMD's runtime and for rocBLAS (4 GB); the stage "stand_ins" brings the files.
    local needed=$root/needed package version made=()
    inside apt-cache depends libmiopen1 >"$needed" 2>>"$log" || fault "Debian $suite has no libmiopen1"
    for package in libamdhip64-6 librocblas4; do
        grep -qw -- "$package" "$needed" || fault "libmiopen1 of Debian $suite does not depend on $package, \
which hipcpu stands for: it is of another ROCm; $OLDER"
        version=$(inside apt-cache show --no-all-versions "$package" 2>>"$log" | sed -n 's/^Version: //p')
        [ -n "$version" ] || fault "Debian $suite has no $package"
        mkdir -p "$fs/tmp/$package/DEBIAN"
        printf '%s\n' "Package: $package" "Version: $version" "Architecture: $(inside dpkg --print-architecture)" \
            'Maintainer: nobody <nobody@example.org>' 'Description: stand-in for tests without a GPU' \
            >"$fs/tmp/$package/DEBIAN/control"
        inside dpkg-deb --root-owner-group -b "/tmp/$package" "/tmp/$package.deb" >>"$log" 2>&1 ||
            fault "the empty package $package"
        made+=("/tmp/$package.deb")
    done
    inside dpkg -i "${made[@]}" >>"$log" 2>&1 || fault "installing the empty packages"
    inside apt-mark hold libamdhip64-6 librocblas4 >>"$log" 2>&1
    apt install gcc libc6-dev ocl-icd-opencl-dev opencl-c-headers "${PACKAGES[@]}" ||
        not_had "installing the packages (where two states of Debian mix, a later day or --mirror with another helps)"
    # HIP's headers alone: their package wants the real runtime.
    inside sh -c 'mkdir -p /tmp/headers && chmod 777 /tmp/headers'
    inside sh -c 'cd /tmp/headers && apt-get -q -o Acquire::Retries=3 download libamdhip64-dev' \
        >>"$log" 2>&1 </dev/null || not_had "libamdhip64-dev (its headers)"
    inside sh -c 'dpkg-deb --fsys-tarfile /tmp/headers/libamdhip64-dev_*.deb | tar -x -C / ./usr/include/hip' \
        >>"$log" 2>&1 || fault "the headers of libamdhip64-dev"
    inside apt-get clean >>"$log" 2>&1
    rm -rf --one-file-system "$fs"/tmp/* "$fs"/var/lib/apt/lists/*
    finish packages "$root_key"
    if [ -n "$tarball" ]; then
        say "keeping the root as $tarball"
        { tarball_mark && tar -c --one-file-system --numeric-owner -C "$fs" . | zstd -q -T0 -3; } >"$tarball.$$" ||
            { rm -f "$tarball.$$"; fault "writing $tarball"; }
        mv "$tarball.$$" "$tarball"
    fi
}

newer() { # MIOpen 3.5 beside the suite's: its library and its header, without its packages' dependencies
    local key found
    key=$(printf '%s\n' "$root_key" "${KNOWN_NEWER[@]}" | sha256sum | cut -c1-16)
    if done_with newer "$key"; then return; fi
    say "packages of Debian experimental: libmiopen1 libmiopen-dev"
    rm -rf --one-file-system "$fs$NEWER" "$fs/tmp/newer"
    mkdir -p "$fs$NEWER/lib" "$fs/tmp/newer/lists/partial"
    chmod 777 "$fs/tmp/newer"
    printf 'deb %s experimental main\n' "${mirror:-http://deb.debian.org/debian}" >"$fs/tmp/newer/sources.list"
    local only=(-o APT::Default-Release=experimental -o Dir::Etc::SourceList=/tmp/newer/sources.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=/tmp/newer/lists)
    apt "${only[@]}" -o APT::Update::Error-Mode=any update || not_had "the list of Debian experimental"
    found=$(inside apt-cache "${only[@]}" show --no-all-versions libmiopen1 2>>"$log" | sed -n 's/^Version: //p')
    # Experimental moves at will: what it has no more, nobody here can bring back.
    case " ${KNOWN_NEWER[*]} " in
        *" ${found%-*} "*) ;;
        *) unavailable "libmiopen1 ${KNOWN_NEWER[*]} for --version $version: experimental has '${found:-none}' (to try that one: \
KNOWN_NEWER in ci/miopen-on-cpu/run.sh, then VERSION=$version ci/rocm-rig.sh)" ;;
    esac
    inside sh -c 'cd /tmp/newer && apt-get -q -o Acquire::Retries=3 "$@" download libmiopen1 libmiopen-dev' sh "${only[@]}" \
        >>"$log" 2>&1 </dev/null || not_had "libmiopen1 and libmiopen-dev of Debian experimental"
    inside sh -exc "cd /tmp/newer
        for f in *.deb; do dpkg-deb -x \$f files; done
        cp -a files/usr/lib/*/libMIOpen.so.* $NEWER/lib
        cp -a files/usr/include $NEWER" >>"$log" 2>&1 || fault "unpacking libmiopen1 and libmiopen-dev of Debian experimental"
    rm -rf --one-file-system "$fs/tmp/newer"
    finish newer "$key"
}

readonly COMPILE='gcc -std=c11 -O2 -g -Wall -Wextra -Werror -fvisibility=hidden'

stand_ins() {
    local sources=("$here"/{hipcpu.c,hipcpu.map,rocblas_stub.c,clstub.sh,hipstub.sh,hip_on_cpu.hpp,ocl_on_cpu.h,lds_end.c,hiprtc_stub.c,compile_stub.h}) key compiler
    key=$(digest "${sources[@]}")
    if done_with stand_ins "$key"; then return; fi
    say "building the stand-ins"
    rm -rf "$fs/opt/stand-ins"
    mkdir -p "$fs/opt/stand-ins"
    cp -- "${sources[@]}" "$fs/opt/stand-ins/"
    inside sh -exc "cd /opt/stand-ins
        lib=/usr/lib/\$(gcc -print-multiarch)
        $COMPILE -fPIC -shared hipcpu.c -o libamdhip64.so.6 -Wl,-soname,libamdhip64.so.6 -Wl,-z,defs \
            -Wl,--version-script=hipcpu.map -lOpenCL -pthread
        $COMPILE -fPIC -shared rocblas_stub.c -o librocblas.so.4 -Wl,-soname,librocblas.so.4 -Wl,-z,defs
        $COMPILE -fPIC -shared hiprtc_stub.c -DMAJOR=6 -DMINOR=4 -o libhiprtc.so.6 -Wl,-soname,libhiprtc.so.6 -Wl,-z,defs
        gcc -O2 -fPIC -c lds_end.c
        install -m 644 libamdhip64.so.6 libhiprtc.so.6 librocblas.so.4 \"\$lib\"
        ldconfig" >>"$log" 2>&1 || fault "the stand-ins do not build"
    # libMIOpen starts an OpenCL compiler at a path that was fixed when Debian built it.
    compiler=$(grep -ao '/build/reproducible-path/miopen-[^/]*/build/clang-[0-9]*' \
        "$fs"/usr/lib/*/libMIOpen.so.1 | sort -u) ||
        fault "libMIOpen names no OpenCL compiler where it used to: Debian builds it in another way now"
    [ "$(wc -l <<<"$compiler")" = 1 ] || fault "libMIOpen names more than one OpenCL compiler: $compiler"
    install -D -m 755 "$here/clstub.sh" "$fs$compiler"
    rm -rf "$fs/var/cache/kernels" # what an older stand-in compiled
    printf '%s\n' "$key" >"$fs/opt/stand-ins/stamp"
    finish stand_ins "$key"
}

newer_stand_ins() {
    local sources=("$here"/{comgr_stub.c,comgr.map}) key
    key=$(digest "$fs"/opt/stand-ins/stamp "${sources[@]}")
    if done_with newer_stand_ins "$key"; then return; fi
    say "building the stand-ins for MIOpen $version"
    cp -- "${sources[@]}" "$fs/opt/stand-ins/"
    inside sh -exc "cd /opt/stand-ins
        make() { library=\$1; shift; $COMPILE -fPIC -shared -o $NEWER/lib/\$library -Wl,-soname,\$library -Wl,-z,defs \"\$@\"; }
        make libamdhip64.so.7 hipcpu.c -DVERSION=$NEWER_HIP -Wl,--version-script=hipcpu.map -lOpenCL -pthread
        make libamd_comgr.so.3 comgr_stub.c -Wl,--version-script=comgr.map
        make libhiprtc.so.7 hiprtc_stub.c -DMAJOR=7 -DMINOR=2
        make librocblas.so.5 rocblas_stub.c
        ! LD_LIBRARY_PATH=$NEWER/lib ldd $NEWER/lib/libMIOpen.so.1 | grep 'not found'" >>"$log" 2>&1 ||
        fault "the stand-ins for MIOpen $version do not build, or it needs a library that is not there"
    finish newer_stand_ins "$key"
}

self_tests() {
    local key kind flags
    key=$(digest "$here"/{hipcpu.c,hipcpu.map,clstub.sh,test_hipcpu.c,test_clstub.sh})
    if done_with self_tests "$key"; then return; fi
    cp -- "$here"/test_hipcpu.c "$here"/test_clstub.sh "$fs/opt/stand-ins/"
    say "testing the stand-in for the compiler"
    inside sh -c 'cd /opt/stand-ins && sh test_clstub.sh' >&2 || die "$FAULT" "FAULT: test_clstub.sh"
    for kind in plain address thread; do
        case $kind in
            plain) flags='' ;;
            address) flags='-fsanitize=address,undefined -fno-sanitize-recover=undefined' ;;
            thread) flags='-fsanitize=thread' ;;
        esac
        say "testing the stand-in for HIP: $kind"
        inside sh -exc "cd /opt/stand-ins && mkdir -p $kind
            $COMPILE $flags -fPIC -shared hipcpu.c -o $kind/libamdhip64.so.6 -Wl,-soname,libamdhip64.so.6 \
                -Wl,--version-script=hipcpu.map -lOpenCL -pthread
            $COMPILE $flags test_hipcpu.c -o $kind/test -L$kind -l:libamdhip64.so.6 \
                -Wl,-rpath,/opt/stand-ins/$kind -pthread" \
            >>"$log" 2>&1 || fault "the test of the stand-in does not build: $kind"
        inside sh -c "cd /opt/stand-ins && exec ./$kind/test" >&2 || die "$FAULT" "FAULT: test_hipcpu.c, $kind"
    done
    finish self_tests "$key"
}

pybnorm() {
    local files=$root/files list=$root/list key
    git -c safe.directory='*' -C "$project" ls-files -z --cached --others --exclude-standard >"$list" 2>>"$log" ||
        fault "the working tree's list of files: git is needed"
    # git also lists what was deleted and not committed yet
    (cd "$project" && xargs -0 sh -c 'for f; do [ -e "$f" ] && printf "%s\0" "$f"; done; true' sh <"$list") >"$files"
    mkdir -p "$fs/srv/pybnorm"
    # Everything but what a build left goes, so that no deleted file stays.
    find "$fs/srv/pybnorm" -type f ! -path '*/build/*' ! -path '*.egg-info/*' ! -name '*.so' ! -name '_core.c' -delete
    tar -c -C "$project" --null --verbatim-files-from -T "$files" | tar -x -C "$fs/srv/pybnorm" --no-same-owner ||
        fault "copying the working tree"
    key=$(cd "$project" &&
        grep -zE '^(setup\.py|pyproject\.toml|include/.*|pybnorm/[^/]*\.p(yx|xd)|pybnorm/_core/[^/]*\.pxi|pybnorm/backends/.*)$' \
        "$files" | xargs -0 sha256sum | sha256sum | cut -c1-16)
    if done_with pybnorm "$key"; then return; fi
    # What a build leaves, of these sources in a root of these packages: kept beside the root's tarball.
    local built=${cache:+$cache/pybnorm-on-cpu-$root_key-$key.tar.zst}
    if [ -n "$built" ] && [ -f "$built" ] && tarball_mark | cmp -s -n 24 - "$built" &&
        zstd -dcq "$built" | tar -x --numeric-owner -C "$fs" >>"$log" 2>&1; then
        say "pybnorm as it was built for $built"
        finish pybnorm "$key"
        return
    fi
    say "building pybnorm"
    # Not optimized, which takes a tenth of the time: the CPU part of CI runs what is shipped. No --no-deps: what pybnorm
    # declares to need and the packages above lack is an error.
    inside PBN_OPTIMIZE=0 sh -c 'cd /srv/pybnorm && python3 -m pip install --quiet --break-system-packages \
        --root-user-action ignore --no-index --no-build-isolation --editable .' \
        >>"$log" 2>&1 </dev/null || fault "pybnorm does not build"
    if [ -n "$built" ]; then
        rm -f "$cache"/pybnorm-on-cpu-*.tar.zst # one is enough: it is small, but each commit may make another
        { { tarball_mark && (cd "$fs" && tar -c --numeric-owner srv/pybnorm/pybnorm/*.so \
            usr/local/lib/python3*/dist-packages) | zstd -q -T0 -3; } >"$built.$$" && mv "$built.$$" "$built"; } ||
            { rm -f "$built.$$"; fault "writing $built"; }
    fi
    finish pybnorm "$key"
}

: >"$log"
rm -f "$root/unavailable"
[ -z "$tarball" ] || say "tarball: $tarball"
tools
base
mounts
packages
stand_ins
if [ "$version" != 3.4 ]; then
    newer
    newer_stand_ins
fi
[ -z "$self_test" ] || self_tests
[ -n "$bare" ] || pybnorm
[ $# -gt 0 ] || exit 0

# MIOpen 3.5's kernels are compiled to machine code: some end items before a barrier, which OpenCL does not permit.
[ "$version" = 3.4 ] || export HIPCPU_NATIVE=${HIPCPU_NATIVE:-1}
kernels=/var/cache/kernels/miopen-$version-${HIPCPU_NATIVE:-0}
mkdir -p "$fs/srv/pybnorm" "$fs$kernels" "$fs/var/cache/kernels/pocl"
passed=()
# what a program of ROCm 7 has for its own: LD_LIBRARY_PATH, and CPATH for the header
[ "$version" = 3.4 ] || passed=("LD_LIBRARY_PATH=$NEWER/lib" "CPATH=$NEWER/include")
while IFS= read -r name; do
    case $name in
        PYBNORM_* | HIPCPU_* | MIOPEN_* | POCL_* | CLSTUB_* | PYTEST_* | TERM | COLUMNS) passed+=("$name=${!name}") ;;
    esac
done < <(compgen -e)
say "running: $*"
status=0
inside MIOPEN_CUSTOM_CACHE_DIR="$kernels" POCL_CACHE_DIR=/var/cache/kernels/pocl \
    PYTHONDONTWRITEBYTECODE=1 "${passed[@]}" sh -c 'cd /srv/pybnorm && exec "$@"' sh "$@" || status=$?
if [ "$status" = "$UNAVAILABLE" ]; then
    say "the command's own exit status $UNAVAILABLE is reported as 1"
    status=1
fi
exit "$status"
