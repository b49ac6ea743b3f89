#!/bin/bash
# Create or update the virtual environment: tools/install.sh [FOLDER], by default .venv.
#
# With a GPU driver: install the gpu extra with all dependencies, and TransformerEngine if a CUDA toolkit can compile it.
# Without a driver: install the CPU stack in three steps, so that no package pulls CUDA wheels; see bootstrap/image/no_deps.txt.
# Versions and hashes are those of tools/locks, except torch's without a driver, whose wheel depends on the package index.
# RLPOST_TORCH overrides the torch requirement (for instance a local CPU wheel). RLPOST_SGLANG overrides the version of
# SGLang on a machine without a GPU; use a separate FOLDER to try another version.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp="$venv/.installed"
wanted=$(cat setup.cfg bootstrap/image/no_deps.txt tools/locks/*.txt tools/install.sh - <<< "${RLPOST_SGLANG:-}" | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
if [ ! -x "$venv/bin/pip" ]; then # also if a Python without ensurepip created the folder
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "install: $python is $("$python" -V 2>&1), needed is 3.11 or newer: PYTHON=python3.12 make install" >&2
        exit 1
    }
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -qq)
if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    echo "install: GPU stack (takes minutes)"
    "${pip[@]}" --require-hashes --no-deps -r tools/locks/gpu.txt
    "${pip[@]}" --no-deps -e .
    if command -v nvcc > /dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
        echo "install: TransformerEngine, compiled against torch (minutes)"
        "${pip[@]}" setuptools wheel
        "$venv/bin/python" -m bootstrap.image.doctor --compiled > "$venv/compiled.txt"
        "${pip[@]}" --no-build-isolation -r "$venv/compiled.txt" || without_te="its compilation failed, see above"
    else
        without_te="there is no nvcc to compile it"
    fi
    if [ -n "${without_te:-}" ]; then
        echo "install: without TransformerEngine ($without_te): recipes with --optimizer-cpu-offload or experts need it;" \
            "with a CUDA toolkit and cuDNN's headers: pip install --no-build-isolation -e '.[te]'" >&2
    fi
else
    echo "install 1/3: torch"
    "${pip[@]}" "${RLPOST_TORCH:-torch==2.13.0}" numpy
    echo "install 2/3: libraries"
    "${pip[@]}" --require-hashes --no-deps -r tools/locks/cpu.txt
    "${pip[@]}" --no-deps -e .
    echo "install 3/3: SGLang, router and Megatron-core, without their CUDA dependencies"
    "${pip[@]}" --require-hashes --no-deps -r tools/locks/no_deps.txt
    [ -z "${RLPOST_SGLANG:-}" ] || "${pip[@]}" --no-deps "sglang==$RLPOST_SGLANG"
fi
echo "$wanted" > "$stamp"
echo "install: done, $venv"
