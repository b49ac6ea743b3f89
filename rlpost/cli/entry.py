"""How every command begins and ends for a person: words in, an exit code out, a message instead of a traceback.

Apart from the settings, whose tree of models takes most of a cold start: a verb that needs no settings loads none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from rlpost.errors import ConfigError, DataError
from slurm.errors import SlurmError

EXIT_REFUSED = 1  # Slurm, or the state of the run, does not allow it
EXIT_BAD_INPUT = 2
MOST_LINES = 12
"""Of one refusal: each takes two or three lines of a terminal, and together they should fit on it."""
EXIT_NOBODY_READS = 128 + signal.SIGPIPE  # as programs end that do not look at it


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command for a person: bad input is a message on standard error and exit code 2, never a traceback;
    a file or folder that cannot be used, or an order that Slurm does not take, is one with exit code 1."""
    try:
        code = command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError) as error:
        lines = str(error).splitlines()
        for line in lines[:MOST_LINES]:
            print(f"error: {line}", file=sys.stderr)
        if len(lines) > MOST_LINES:
            print(f"error: and {len(lines) - MOST_LINES} more; they are told when these are mended", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # ``head`` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return EXIT_NOBODY_READS
    except OSError as error:
        if error.filename is None:  # not about a file of the person's: a fault of ours
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 130
