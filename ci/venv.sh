# shellcheck shell=bash
# For scripts that source this: `environment EXTRAS` makes the virtual environment that they run in, with pybnorm of this
# checkout (built in place) and its extras installed.
#   VENV unset     a temporary one, in $temporary_venv, which the script removes
#   VENV=DIR       this one, made where it is absent, kept
#   VENV=none      none: the python3 that is active, with the extras' packages; nothing is installed but built in place
# Where that cannot be, the last line says what is lacking, and the script ends with 1.
temporary_venv=''
lacks() { # TEXT
    echo "ci/${0##*/}: $1"
    exit 1
}
environment() {
    command -v python3 >/dev/null || lacks "there is no python3"
    command -v "${CC%% *}" >/dev/null || lacks "there is no C compiler (cc, or variable CC)"
    python3 -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
        lacks "there are no headers of $(python3 --version) (on Debian and Ubuntu: python3-dev)"
    local log venv=${VENV:-}
    if [ "$venv" = none ]; then
        log=$(python3 setup.py -q build_ext --inplace 2>&1) || { echo "$log"; lacks "pybnorm does not build"; }
        return
    fi
    if [ -z "$venv" ]; then
        temporary_venv=$(mktemp -d "${TMPDIR:-/tmp}/pybnorm-venv.XXXXXX")
        venv=$temporary_venv/venv
    fi
    python3 -m venv "$venv" || lacks "python3 makes no virtual environment (on Debian and Ubuntu: python3-venv)"
    venv=$(cd "$venv" && pwd)
    export PATH="$venv/bin:$PATH"
    { python3 -m pip install --quiet --upgrade pip && python3 -m pip install --quiet --editable ".[$1]"; } ||
        lacks "pybnorm[$1] does not build or install here; VENV=none takes the python3 that is active as it is"
}
device() { # BACKEND: its library and a device are here
    local reason
    reason=$(python3 -c 'import sys, pybnorm
try:
    pybnorm.Handle(sys.argv[1]).close()
except pybnorm.PybnormError as error:
    sys.exit(" ".join(str(error).split())[:300])' "$1" 2>&1) || lacks "$reason"
}
CC=${CC:-cc}
