#!/bin/bash
# Create or update the virtual environment: tools/install.sh [FOLDER], by default .venv.
#
# With a GPU driver: install the gpu extra with all dependencies, and TransformerEngine if a CUDA toolkit can compile it.
# Without a driver: install the CPU stack in three steps, so that no package pulls CUDA wheels; see bootstrap/image/no_deps.txt.
# Versions and hashes are those of tools/locks, except torch's without a driver, whose wheel depends on the package index.
# FOLDER/.installed says which stack is there, and with which compiler TransformerEngine was tried: on a machine with
# GPUs the GPU stack replaces that for CPUs, and TransformerEngine is tried again with another compiler. The GPU stack
# stays where there is no driver.
# RLPOST_TORCH overrides the torch requirement (for instance a local CPU wheel). RLPOST_SGLANG overrides the version of
# SGLang on a machine without a GPU; use a separate FOLDER to try another version.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp="$venv/.installed"
wanted=$(cat setup.cfg bootstrap/image/no_deps.txt tools/locks/*.txt tools/install.sh - <<< "${RLPOST_SGLANG:-}" | sha256sum)
glibc=$(getconf GNU_LIBC_VERSION 2> /dev/null | grep -oE '[0-9.]+$') || glibc=
if [ -n "$glibc" ] && [ "$(printf '%s\n' 2.34 "$glibc" | sort -V | head -n 1)" != 2.34 ]; then
    echo "install: glibc $glibc here, SGLang's wheels need 2.34 or newer: use the container image (docs/containers.md)" >&2
    exit 1
fi
stack=cpu
compiler=
if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    stack=gpu
    nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
    [ ! -x "$nvcc" ] || compiler="$nvcc $("$nvcc" --version | tail -n 1)"
fi
if [ -f "$stamp" ]; then
    { IFS= read -r had && IFS= read -r installed && IFS= read -r tried || true; } < "$stamp"
    if [ "$stack" = cpu ]; then
        [ "$had" != "$wanted" ] || exit 0
        [ "${installed:-}" != gpu ] || {
            echo "install: $venv has the GPU stack of another version: run make install on a node with a GPU" >&2
            exit 1
        }
    elif [ "${installed:-}" != gpu ]; then
        echo "install: $venv has the stack for CPUs; the GPU stack replaces it"
    elif [ "$had" = "$wanted" ]; then
        [ "${tried:-}" != compiled ] && [ "${tried:-}" != "tried $compiler" ] || exit 0
    fi
fi
if [ ! -x "$venv/bin/pip" ]; then # also if a Python without ensurepip created the folder
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "install: $python is $("$python" -V 2>&1), needed is 3.11 or newer: PYTHON=python3.12 make install" >&2
        exit 1
    }
    "$python" -m venv "$venv"
fi
report_progress() { # pip is quiet for minutes; the sleep must not hold the output open
    while sleep "${RLPOST_PROGRESS_S:-10}" > /dev/null 2>&1; do
        echo "install: ${SECONDS} s so far (usually 2 to 5 minutes, longer on a slow network)"
    done
}
report_progress &
trap "kill $! 2> /dev/null || :" EXIT
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -qq)
if [ "$stack" = gpu ]; then
    echo "install: GPU stack (takes minutes)"
    # A requirement begins in the first column. cuda-tile downloads its wheel from another index while it is installed.
    awk '/^[a-z]/ { tile = /^cuda-tile==/ } !tile' tools/locks/gpu.txt > "$venv/gpu.txt"
    awk '/^[a-z]/ { tile = /^cuda-tile==/ } tile' tools/locks/gpu.txt > "$venv/tile.txt"
    "${pip[@]}" --require-hashes --no-deps -r "$venv/gpu.txt"
    "${pip[@]}" --require-hashes --no-deps -r "$venv/tile.txt" ||
        echo "install: without cuda-tile, an optional kernel compiler of FlashInfer: NVIDIA's package index does not answer" >&2
    "${pip[@]}" --no-deps -e .
    tried="tried $compiler"
    if [ -n "$compiler" ]; then
        echo "install: TransformerEngine, compiled against torch (minutes)"
        # torch's wheels bring the headers of CUDA and cuDNN; a compiler process takes up to 2 GB
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        export CPATH=$site/nvidia/cu13/include:$site/nvidia/cudnn/include:$site/nvidia/nccl/include${CPATH:+:$CPATH}
        export MAX_JOBS=${MAX_JOBS:-$(awk -v cores="$(nproc)" '/MemAvailable/ {
            jobs = int($2 / 2000000); print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo)}
        "${pip[@]}" setuptools wheel
        "$venv/bin/python" -m bootstrap.image.doctor --compiled > "$venv/compiled.txt"
        "${pip[@]}" --no-build-isolation -r "$venv/compiled.txt" && tried=compiled || without_te="its compilation failed, see above"
    else
        without_te="there is no nvcc to compile it"
        echo "install: no nvcc: engines compile kernels when they start and fail without the CUDA toolkit of torch;" \
            "install it on the compute nodes, or set CUDA_HOME" >&2
    fi
    if [ -n "${without_te:-}" ]; then
        echo "install: without TransformerEngine ($without_te): recipes with --optimizer-cpu-offload or experts need it;" \
            "with a CUDA toolkit, run make install again" >&2
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
printf '%s\n' "$wanted" "$stack" "${tried:-}" > "$stamp"
echo "install: done, $venv"
