#!/usr/bin/env bash
# The whole test suite, in an environment that this script makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_environment.sh

make_environment "${RABBET_TEST_VENV:-.cache/test-venv}" dev

ruff check core sdk plugins tests scripts
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python -m pytest "$@"
