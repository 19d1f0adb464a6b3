#!/usr/bin/env bash
# Builds and tests on free-threaded CPython: the GIL must stay off, and oneDNN's results be the same from many threads.
#   ci/free-threading.sh [DIR]      DIR: what is built is kept there; default a temporary folder
# Takes PYTHON, else python3.14t or python3.13t; where there is none, CPython is built of Debian's source package
# (minutes; needs apt-get, a C compiler and the headers of OpenSSL, libffi and zlib; SUITE names the suite).
# Exit status: pytest's; 75 where no free-threaded CPython can be had.
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=${SUITE:-trixie}

if [ $# -gt 0 ]; then
    mkdir -p "$1"
    dir=$(cd "$1" && pwd)
else
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
fi
unavailable() { # TEXT
    tail -n 15 "$dir/log" 2>/dev/null | sed 's/^/    /' >&2 || true
    echo "free-threading: nothing was tested: $1" >&2
    exit 75
}

build_cpython() { # the mirror is the machine's own; its lists and cache are left alone
    local mirror key=/usr/share/keyrings/debian-archive-keyring.gpg lists=$dir/apt
    command -v apt-get >/dev/null || unavailable "there is no python3.14t or python3.13t, and this is not Debian"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$') || unavailable "apt-get knows no mirror"
    mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial" "$dir/source"
    echo "deb-src [signed-by=$key] $mirror $SUITE main" >"$lists/sources.list"
    local options=(-o "Dir::Etc::sourcelist=$lists/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update >"$dir/log" 2>&1 || unavailable "Debian's lists of $SUITE cannot be had"
    (cd "$lists" && apt-get "${options[@]}" source --download-only python3.13) >>"$dir/log" 2>&1 ||
        unavailable "Debian's source of python3.13 cannot be had"
    tar xf "$lists"/python3.13_*.orig.tar.xz -C "$dir/source" --strip-components 1
    (cd "$dir/source" && ./configure -q --disable-gil --disable-test-modules --prefix="$dir/cpython" &&
        make -s -j "$(nproc)" && make -s install) >"$dir/log" 2>&1 || unavailable "CPython does not build"
}

python=${PYTHON:-$(command -v python3.14t || command -v python3.13t || echo "$dir/cpython/bin/python3.13t")}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || build_cpython
"$python" -c 'import sys; sys.exit(sys._is_gil_enabled())' || unavailable "$python has a GIL"
"$python" -VV
"$python" -m venv "$dir/venv"
export PATH="$dir/venv/bin:$PATH"
python -m pip install --quiet --upgrade pip
# Some need a Rust compiler where their newest release has no wheel for this Python; an older one has.
python -m pip install --quiet --prefer-binary --only-binary hypothesis,ml_dtypes,numpy,rpds-py '.[test-full]'
python -m pip list --format=freeze | grep -iE '^(numpy|cython|onednn|ml_dtypes|pytest|hypothesis|pybnorm)' || true
PYBNORM_REQUIRE=onednn PYBNORM_REQUIRE_DEVICE=onednn pytest -q -n "$(nproc)" --dist loadfile \
    tests/backends tests/functional tests/operations tests/layer tests/graph tests/fuzz tests/unit
