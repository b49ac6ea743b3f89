"""The shared part of every command line: recipe, cluster profile and a flag per setting."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpost.cli.secret_file import KEY_FLAGS, take_keys
from rlpost.config import flags
from rlpost.config.arguments import add_switch
from rlpost.config.load import Loaded, files_of, load, site_profile
from rlpost.config.show import resolved
from rlpost.config.wording import spelled, with_values
from rlpost.errors import ConfigError, DataError
from rlpost.tasks.rows import num_rows

RUNS_DIR_VARIABLE = "RLPOST_RUNS_DIR"
NUM_ROLLOUT = "rollout.num_rollout"


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with a flag for every setting, and --cluster."""
    parser = flags.make_parser(prog, description)
    parser.add_argument(
        "--cluster",
        metavar="PROFILE",
        help="FILE.toml or a name (rlpost recipes clusters); overrides the recipe",
    )
    for flag, variable in KEY_FLAGS.items():
        parser.add_argument(
            flag,
            metavar="KEY",
            help=f"same as the environment variable {variable}; stored only in RUN/secrets.env",
        )
    add_switch(parser, "--print-config", "print every setting with its origin, as TOML, and exit")
    return parser


def settings(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Loaded]:
    """Parse and merge: defaults < recipe < cluster profile < flags. Raises ConfigError.

    Without --cluster, a cluster recipe uses the profile of its batch file (``site_profile``).

    With --print-config this prints the result and ends the command (SystemExit 0).
    """
    namespace, values = flags.parse(parser, take_keys(arguments, os.environ))
    for note in namespace.flag_notes:
        print(f"note: {note}", file=sys.stderr)
    recipe = None if namespace.recipe is None else Path(namespace.recipe)
    cluster = namespace.cluster or site_profile(recipe)
    files = files_of(recipe, cluster)
    loaded = load_run(files, values)
    if namespace.print_config:
        keys = [
            f"# {flag.removeprefix('--').replace('-', '_')} = ***"
            for flag, name in KEY_FLAGS.items()
            if name in os.environ
        ]
        print(resolved(loaded, {"wandb": keys}), end="")
        raise SystemExit(0)
    return namespace, loaded


def load_run(files: Sequence[Path], values: flags.Values) -> Loaded:
    """Merge files and flags as every verb does: ``load``, with runs folder and steps of epochs."""
    return with_epochs(with_runs_dir(load(files, values), os.environ))


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


def with_epochs(loaded: Loaded) -> Loaded:
    """Return the settings with the steps of ``--num-epoch``, if it is given.

    A run keeps that number in run.json, so that a requeued job trains as many steps as the first.
    An epoch has as many steps as ``rollout_batch_size`` divides its rows into, rounded down, as in
    slime (``get_num_rollout_per_epoch``).

    Raises:
        ConfigError: the rows cannot be counted, have no epochs or fill no step; or --num-rollout is
            given and differs.
    """
    rollout = loaded.config.rollout
    if rollout.num_epoch is None:
        return loaded
    epochs = spelled(loaded.config, "num_epoch")
    if rollout.prompt_data_weights:
        raise ConfigError(
            f"{epochs}: with --prompt-data-weights the files have different epochs; use --num-rollout"
        )
    try:
        rows = sum(num_rows(source) for source in rollout.prompt_data)
    except DataError as error:
        raise ConfigError(
            f"{epochs} needs the number of prompts, but {error} (or give --num-rollout instead)"
        ) from error
    size = rollout.rollout_batch_size
    steps = rows // size * rollout.num_epoch
    if not steps:
        raise ConfigError(
            f"{epochs}: --prompt-data has {rows} rows, fewer than {spelled(loaded.config, 'rollout_batch_size')}; "
            "use a smaller --rollout-batch-size, or --num-rollout"
        )
    if NUM_ROLLOUT in loaded.origins and rollout.num_rollout != steps:
        raise ConfigError(
            f"{epochs} is {steps} steps ({rows} rows, {size} a step), but {spelled(loaded.config, 'num_rollout')} is "
            "given as well; leave one of them out"
        )
    config = with_values(loaded.config, num_rollout=steps)
    return Loaded(config, {**loaded.origins, NUM_ROLLOUT: "--num-epoch"})
