#!/usr/bin/env bash
# The tests of PyTorch's arrays, modules and gradients, with the Python on PATH, that of a virtual environment which has
# pybnorm and its tests.
#   ci/pytorch.sh [--require]      --require: no PyTorch is a failure
#   ci/pytorch.sh --install        only gets it, into a folder of its own that no other test sees
# PyTorch 2 comes as a wheel from a folder that pip is configured with (find-links), else as Debian's package: what an
# index has for x86-64 is the CUDA build, gigabytes with what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(python -c 'import sys; print(sys.prefix)')
log=$venv/torch.txt folder=$venv/torch
needed() { python -m pip install --quiet --target "$folder" filelock fsspec jinja2 networkx sympy typing-extensions >"$log" 2>&1; }

loads() { python -W ignore -c 'import torch' >"$log" 2>&1; }

wheel() {
    rm -rf "$folder"
    python -m pip install --quiet --no-index --no-deps --target "$folder" torch >"$log" 2>&1 && needed && loads
}

debian() { # prints why not, or nothing
    grep -qs '^ID=debian$' /etc/os-release || { echo "this is not Debian, whose package is small"; return; }
    [ "$(id -u)" = 0 ] || { echo "installing Debian's needs root"; return; }
    local version='import sys; print(*sys.version_info[:2], sep=".")'
    [ "$(/usr/bin/python3 -c "$version" 2>&1)" = "$(python -c "$version")" ] ||
        { echo "Debian's PyTorch is for another Python than $(python --version)"; return; }
    { apt-get update && timeout 300 apt-get install -y --no-install-recommends -o DPkg::Options::=--force-unsafe-io python3-torch; } >"$log" 2>&1 </dev/null ||
        { echo "Debian's package python3-torch cannot be had: $(tail -n 1 "$log")"; return; }
    # Only the package torch and its own parts are taken from there.
    local name packages=/usr/lib/python3/dist-packages
    rm -rf "$folder"
    needed || { echo "what it needs cannot be had: $(tail -n 1 "$log")"; return; }
    for name in torch torchgen functorch astunparse; do
        [ ! -e "$packages/$name" ] || ln -s "$packages/$name" "$folder/"
    done
    loads || echo "Debian's PyTorch does not load: $(tail -n 1 "$log")"
}

export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$folder"
from='the one installed'
reason=
if ! loads; then
    from='a wheel from a folder of pip'
    if ! wheel; then
        no_wheel=$(tail -n 1 "$log")
        from="Debian's (no wheel: $no_wheel)"
        reason=$(debian)
    fi
fi
if [ -n "$reason" ]; then
    echo "PyTorch: skipped: $reason (no wheel: $no_wheel)"
    [ "${1:-}" != --require ] || exit 1
    exit 0
fi
echo "PyTorch $(python -W ignore -c 'import torch; print(torch.__version__)'): $from"
[ "${1:-}" != --install ] || exit 0
# One built for NumPy 1 warns that it cannot convert arrays of NumPy 2, which nothing here asks of it. reduce-overhead is
# graphs of CUDA, so that on a CPU it compiles what the default mode does.
PYBNORM_REQUIRE=onednn PYBNORM_REQUIRE_DEVICE=onednn PYBNORM_REQUIRE_PACKAGES=torch pytest -q -n "$(nproc)" --dist loadfile \
    -W 'ignore:Failed to initialize NumPy:UserWarning' tests/pytorch tests/functional -k 'torch and not reduce-overhead'
