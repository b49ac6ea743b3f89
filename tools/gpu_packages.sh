#!/bin/bash
# Test the packages of the GPU lock without a GPU: tools/gpu_packages.sh [FOLDER], by default .venv-gpu-packages (9 GB).
# Installs them there, makes a libcuda.so.1 without devices, and runs tests/gpu_packages, which writes
# tools/locks/gpu_tested.json. cuda-tile downloads its wheel from NVIDIA's own package index while it is installed;
# where that does not answer it is left out, and the record says so.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-gpu-packages}
lock=tools/locks/gpu.txt
stamp="$venv/.installed"
wanted=$(sha256sum "$lock" tools/gpu_packages.sh)
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps --require-hashes)
if [ ! -f "$stamp" ] || [ "$(< "$stamp")" != "$wanted" ]; then
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    echo "gpu-packages: installing 9 GB (5 to 10 minutes)"
    # a requirement begins in the first column; its hashes are indented
    awk '/^[a-z]/ { tile = /^cuda-tile==/ } !tile' "$lock" > "$venv/lock.txt"
    awk '/^[a-z]/ { tile = /^cuda-tile==/ } tile' "$lock" > "$venv/tile.txt"
    "${pip[@]}" -r "$venv/lock.txt"
    "${pip[@]}" -r "$venv/tile.txt" 2> "$venv/tile.log" ||
        echo "gpu-packages: without cuda-tile, see $venv/tile.log" >&2
    printf '%s' "$wanted" > "$stamp"
fi
# Every function of the driver that a library needs answers CUDA_ERROR_NO_DEVICE (100).
mkdir -p "$venv/no-device"
{ find -L "$venv/lib" -name '*.so*' -type f -exec nm -D --undefined-only {} + 2> /dev/null || true; } |
    awk '$1 == "U" && $2 ~ /^cu[A-Z]/ { sub(/@.*/, "", $2); print $2 }' | sort -u |
    awk '{ print "int " $1 "(void) { return 100; }" }' > "$venv/no-device/cuda.c"
cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$venv/no-device/libcuda.so.1" "$venv/no-device/cuda.c"
RLPOST_GPU_PACKAGES=$(realpath "$venv/no-device") exec "$venv/bin/python" -m tests.gpu_packages.record
