"""NCCL's plug-in for libfabric: loaded in a separate process.

NCCL reaches EFA and Slingshot through libfabric only with aws-ofi-nccl. Without it, NCCL takes TCP
in silence unless NCCL_NET names the plug-in (``bootstrap.network.detect``), and then ends.

Input: the environment of workers. Output: why no plug-in loads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

_LOAD_S = 20.0
_PROGRAM = """
import ctypes, sys
errors = []
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        errors.append(str(error))
    else:
        sys.exit(0)
sys.exit("; ".join(errors))
"""


def plugin_files(environ: Mapping[str, str]) -> list[str]:
    """Return the files that NCCL may load: that of NCCL_NET_PLUGIN, or its own names."""
    name = environ.get("NCCL_NET_PLUGIN", "")
    chosen = [name if name.endswith(".so") else f"libnccl-net-{name}.so"] if name else []
    return [*chosen, "libnccl-net.so", "libnccl-net-ofi.so"]


def net_plugin_problem(environ: Mapping[str, str]) -> str | None:
    """Return why no plug-in loads; "" if one does, None if that is unknown."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *plugin_files(environ)],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_LOAD_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ended.returncode == 0:
        return ""
    return ended.stderr.strip() or f"the process ended with {ended.returncode}"
