#!/bin/bash
# Check that the image's pinned packages exist and are compatible: tools/resolve_image.sh [EXTRA...]
# uv resolves them for the image's Python and platform from metadata; only uv itself is installed, in a temporary
# folder. Prints what pip would install.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m bootstrap.image.doctor --requirements "${@:-wandb}" >"$folder/requirements.txt"
"$python" -m venv "$folder/uv"
"$folder/uv/bin/pip" install -q uv
"$folder/uv/bin/uv" --no-config pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
  --prerelease allow --no-annotate --no-header "$folder/requirements.txt"
