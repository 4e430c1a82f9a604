#!/usr/bin/env bash
# Build a wheel of every distribution into DIRECTORY (default: dist).
#   bash scripts/wheels.sh [DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python=${PYTHON:-python3}
for distribution in . catalog core sdk libs/* plugins/*; do
    # A copy: setuptools leaves build folders beside the sources, and a stale one would end up in the wheel.
    name=$(basename "$(realpath "$distribution")")
    mkdir -p "$work/$name"
    if [ "$distribution" = . ]; then cp pyproject.toml README.md LICENSE "$work/$name/"
    else cp -r "$distribution/." "$work/$name/"; rm -rf "$work/$name"/{build,tests,src/*.egg-info}; find "$work/$name" -name "*.so" -delete; fi
    isolation=""
    if "$python" -c 'import setuptools, wheel; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null; then isolation=--no-build-isolation; fi
    # shellcheck disable=SC2086
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps $isolation --wheel-dir "$out" "$work/$name"
done
ls -1 "$out"/*.whl
