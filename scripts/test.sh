#!/usr/bin/env bash
# The test suite, in an environment that this script makes. Arguments go to pytest; without any, tests marked slow are left out:
# the tutorials, an attention suite of which a shorter one runs, and compositions of every pair take minutes on two cores. All: bash scripts/test.sh -m ""
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_environment.sh

make_environment "${RABBET_TEST_VENV:-.cache/test-venv}" dev

ruff check core sdk libs plugins tests scripts
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ $# -eq 0 ]; then set -- -m "not slow"; fi
python -m pytest "$@"
