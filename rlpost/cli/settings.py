"""The part of a command line that all commands share: a recipe, a cluster profile, flags for every setting."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlpost.config import flags
from rlpost.config.load import Loaded, load
from rlpost.errors import ConfigError, DataError

EXIT_BAD_INPUT = 2


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with a flag for every setting, and --cluster."""
    made = flags.parser(prog, description)
    made.add_argument("--cluster", type=Path, metavar="FILE.toml", help="cluster profile; wins over the recipe")
    return made


def settings(made: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Loaded]:
    """Parse and merge: defaults < recipe < cluster profile < flags. Raises ConfigError."""
    namespace, values = flags.parse(made, arguments)
    files = [Path(path) for path in (namespace.recipe, namespace.cluster) if path is not None]
    return namespace, load(files, values)


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """Run a command for a person: bad input is a message on standard error and exit code 2, never a traceback."""
    try:
        return command(sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, DataError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130
