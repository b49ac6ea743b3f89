"""How every command begins and ends for a person: words in, an exit code out, a message instead of a traceback.

Apart from the settings, whose tree of models takes most of a cold start: a verb that needs no settings loads none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rlpost.errors import ConfigError, DataError
from slurm.errors import SlurmError

EXIT_REFUSED = 1  # Slurm, or the state of the run, does not allow it
EXIT_BAD_INPUT = 2


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command for a person: bad input is a message on standard error and exit code 2, never a traceback."""
    try:
        return command(sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, DataError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 130
