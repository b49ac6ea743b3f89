"""The process of an engine job: ``python -m rlpost.engines.engine_job --run-folder RUN --engine NAME
--stop-file FILE [--num-gpus N] [--group GROUP]``, started by ``slurm/batch/engine.py``.

An extension has the agent (``Extension.engine_agent``); ``slurm/batch/engine.py`` knows this module
alone. Output: an exit code; ``slurm.batch.engine`` says what follows each.
"""

from __future__ import annotations

import sys

from common.exit_codes import EXIT_CONFIG
from rlpost.config.extensions import engine_agent
from rlpost.errors import ConfigError


def main() -> int:
    """Run the agent; return its exit code."""
    try:
        serve = engine_agent()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return serve(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
