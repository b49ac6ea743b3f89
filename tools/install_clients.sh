#!/bin/bash
# Create or update the environment of the gateway's clients, for the tests: tools/install_clients.sh [FOLDER], by default
# .venv-clients. It holds the extra "clients" of setup.cfg alone, because these packages exclude versions of the training
# stack.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-clients}
mapfile -t packages < <(sed -n '/^clients =$/,/^[^ ]/s/^    //p' setup.cfg)
wanted=$(printf '%s\n' "${packages[@]}")
if [ -f "$venv/.installed" ] && [ "$(cat "$venv/.installed")" = "$wanted" ]; then
    exit 0
fi
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "install: clients of the gateway, $venv"
"$venv/bin/python" -m pip --disable-pip-version-check install -qq "${packages[@]}"
echo "$wanted" > "$venv/.installed"
