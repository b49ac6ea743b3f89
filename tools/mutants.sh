#!/bin/bash
# Mutation testing, as the section mutmut of setup.cfg says: tools/mutants.sh [VENV] [MUTANT...]. mutmut is in the
# environment .venv-mutants, which imports the stack from VENV, by default .venv; nothing is installed there.
set -euo pipefail
cd "$(dirname "$0")/.."
stack=${1:-.venv} venv=.venv-mutants
package=$(sed -n '/^mutants =$/,/^[^ ]/s/^    //p' setup.cfg)
if [ ! -x "$venv/bin/mutmut" ]; then
    "$stack/bin/python" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install -qq "$package"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$stack/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/stack.pth"
fi
"$venv/bin/mutmut" run "${@:2}"
"$venv/bin/mutmut" results
