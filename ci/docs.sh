#!/usr/bin/env bash
# The documentation's pages; a warning is an error, and nothing is fetched.
#   ci/docs.sh DIR
# Needs pybnorm with its extra docs installed.
set -euo pipefail
cd "$(dirname "$0")/.."
sphinx-build --fail-on-warning --keep-going --quiet -b html docs "${1:?usage: ci/docs.sh DIR}"
echo "$1/index.html"
