#!/usr/bin/env bash
# The documentation's pages; a warning is an error, and nothing is fetched.
#   ci/docs.sh DIR [-t online]      online: with links to Python's, NumPy's and PyTorch's pages, whose lists it fetches
# Needs pybnorm with its extra docs installed.
set -euo pipefail
cd "$(dirname "$0")/.."
sphinx-build --fail-on-warning --keep-going --quiet -b html "${@:2}" docs "${1:?usage: ci/docs.sh DIR [-t online]}"
echo "$1/index.html"
