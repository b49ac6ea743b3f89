"""The shared part of every command line: recipe, model, cluster profile and a flag per setting."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpost.arguments import add_switch
from rlpost.cli.epochs import with_epochs
from rlpost.cli.scaled import scaled, table
from rlpost.cli.secret_flags import KEY_FLAGS, take_keys
from rlpost.config import flags
from rlpost.config.load import Loaded, files_of, load, site_profile
from rlpost.config.show import resolved
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError

RUNS_DIR_VARIABLE = "RLPOST_RUNS_DIR"


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with a flag for every setting, --model and --cluster."""
    made = flags.parser(prog, description)
    made.add_argument(
        "--model",
        metavar="MODEL",
        help="FILE.toml or a name (rlpost recipes models); the recipe overrides it",
    )
    made.add_argument(
        "--cluster",
        metavar="PROFILE",
        help="FILE.toml or a name (rlpost recipes clusters); overrides the recipe",
    )
    for flag, variable in KEY_FLAGS.items():
        made.add_argument(
            flag,
            metavar="KEY",
            help=f"same as the environment variable {variable}; stored only in RUN/secrets.env",
        )
    add_switch(made, "--print-config", "print every setting with its origin, as TOML, and exit")
    return made


def settings(
    made: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Loaded]:
    """Parse and merge: defaults < model < recipe < cluster profile < flags. Raises ConfigError.

    Without --cluster, a cluster recipe uses the profile of its batch file (``site_profile``).

    With --print-config this prints the result and ends the command (SystemExit 0).
    """
    namespace, values = flags.parse(made, take_keys(arguments, os.environ))
    recipe = None if namespace.recipe is None else Path(namespace.recipe)
    cluster = namespace.cluster or site_profile(recipe)
    files = files_of(recipe, {"model": namespace.model, "cluster": cluster})
    loaded = with_epochs(with_runs_dir(load(files, values), os.environ))
    if (ranks := getattr(namespace, "scale_down", None)) is not None:
        loaded, changes = scaled(loaded, ranks)
        if not namespace.print_config:
            # then standard output holds only the object
            is_for_programs = getattr(namespace, "json", False)
            print(table(changes) + "\n", file=sys.stderr if is_for_programs else sys.stdout)
    if namespace.print_config:
        keys = [
            f"# {flag.removeprefix('--').replace('-', '_')} = ***"
            for flag, name in KEY_FLAGS.items()
            if name in os.environ
        ]
        print(resolved(loaded, {"wandb": keys}), end="")
        raise SystemExit(0)
    return namespace, loaded


def no_recipe(example: str) -> ConfigError:
    """Return the error for a command line without a recipe; ``example`` is one with it."""
    return ConfigError(
        f"which recipe? the first word is a name in jobs/recipes or a TOML file: {example}"
    )


def with_runs_dir(loaded: Loaded, environ: Mapping[str, str]) -> Loaded:
    """Return the settings with ``$RLPOST_RUNS_DIR``, where no file and no flag gives --runs-dir."""
    folder = environ.get(RUNS_DIR_VARIABLE)
    if not folder or "cluster.runs_dir" in loaded.origins:
        return loaded
    config = with_values(loaded.config, runs_dir=str(Path(folder).absolute()))
    return Loaded(config, {**loaded.origins, "cluster.runs_dir": f"${RUNS_DIR_VARIABLE}"})
