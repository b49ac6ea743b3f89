#!/bin/bash
# Print a Python that can read settings and render batch files: tools/settings_python.sh [FOLDER], by default .venv.
#
# Uses the Python of FOLDER if it has pydantic, else that of .venv-jobs, which is created here with pydantic only.
set -euo pipefail
cd "$(dirname "$0")/.."
small=.venv-jobs
for python in "${1:-.venv}/bin/python" "$small/bin/python"; do
    if "$python" -c 'import pydantic' 2> /dev/null; then
        echo "$python"
        exit 0
    fi
done
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "jobs: $python is $("$python" -V 2>&1), needed is 3.11 or newer: PYTHON=python3.12 make jobs" >&2
    exit 1
}
requirement=$(sed -n 's/^ *\(pydantic[<>=].*\)$/\1/p' setup.cfg)
echo "jobs: $small with $requirement" >&2
"$python" -m venv "$small" >&2
"$small/bin/python" -m pip --disable-pip-version-check install -qq "$requirement" >&2
echo "$small/bin/python"
