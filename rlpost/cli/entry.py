"""Run a command: exit codes, and error messages instead of tracebacks.

Separate from the settings, because importing their models dominates a cold start: a verb without
settings does not load them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from common.files import full_words
from common.run_folder import RunFolderError
from common.terminal import visible_output
from rlpost.errors import ConfigError, DataError
from slurm.errors import SlurmError

EXIT_REFUSED = 1  # rejected by Slurm or by the state of the run
EXIT_BAD_INPUT = 2
MOST_LINES = 12
"""Maximum errors to print: each takes two or three terminal lines, and all should fit on a screen.
"""
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # as for programs that SIGPIPE kills


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command and return its exit code.

    Bad input prints a message on standard error and returns 2. An unusable file or folder, or a
    request that Slurm rejects, prints one and returns 1. On a terminal, control characters are
    shown as text."""
    with visible_output():
        return _run(command, arguments)


def _run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    try:
        code = command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError) as error:
        lines = str(error).splitlines()
        for line in lines[:MOST_LINES]:
            print(f"error: {line}", file=sys.stderr)
        if len(lines) > MOST_LINES:
            print(
                f"error: and {len(lines) - MOST_LINES} more; fix these to see them", file=sys.stderr
            )
        return EXIT_BAD_INPUT
    except RecursionError:  # of the parsers of TOML and JSON, which recurse
        print("error: the input has too many levels of arrays or tables", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (SlurmError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # e.g. ``head`` closed the pipe
        # The interpreter flushes stdout again at its exit, which would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None:  # not about a user's file: a bug
            raise
        remedy = full_words(error)
        # A copy names its source first; what is full is the disk of its target.
        place = error.filename2 if remedy and error.filename2 else error.filename
        words = f"{place}: {error.strerror}{f'; {remedy}' if remedy else ''}"
        print(f"error: {words}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 130
