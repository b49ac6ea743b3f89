"""The part of a command line that all commands share: a recipe, a cluster profile, flags for every setting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlpost.config import flags
from rlpost.config.load import Loaded, load
from rlpost.config.show import resolved


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with a flag for every setting, and --cluster."""
    made = flags.parser(prog, description)
    made.add_argument("--cluster", type=Path, metavar="FILE.toml", help="cluster profile; wins over the recipe")
    made.add_argument(
        "--print-config", action="store_true", help="print every setting with its origin, as TOML, and do nothing else"
    )
    return made


def settings(made: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Loaded]:
    """Parse and merge: defaults < recipe < cluster profile < flags. Raises ConfigError.

    With --print-config this prints the result and ends the command (SystemExit 0).
    """
    namespace, values = flags.parse(made, arguments)
    files = [Path(path) for path in (namespace.recipe, namespace.cluster) if path is not None]
    loaded = load(files, values)
    if namespace.print_config:
        print(resolved(loaded), end="")
        raise SystemExit(0)
    return namespace, loaded
