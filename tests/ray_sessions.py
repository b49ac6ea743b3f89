"""Sessions of Ray that a test process starts for itself."""

from __future__ import annotations

import os


def disable_authentication() -> None:
    """Let sessions that this process starts from now on have no token. Call it before ``ray.init``.

    By default a new local session has one, and the process keeps this mode in memory when the
    variable is restored after the test: it would refuse the processes of its next session, which
    have no token.
    """
    from ray._raylet import Config

    os.environ["RAY_AUTH_MODE"] = "disabled"
    Config.initialize("")  # reads the variable
