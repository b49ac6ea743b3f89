"""``python -m rlpost.train``: the driver of a run. The agent starts it on the head node.

In: a recipe and flags, or a run folder whose ``run.json`` holds the resolved settings; the cluster as one line on
standard input. Settings are checked before anything heavy is imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpost.check import check
from rlpost.cli.settings import parser, run_command, settings
from rlpost.config.load import dump, parse_dump
from rlpost.config.tree import Config
from rlpost.errors import ConfigError

EXIT_NO_CLUSTER = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.train``."""
    return run_command(_train, arguments)


def _train(arguments: Sequence[str]) -> int:
    made = parser("python -m rlpost.train", "Train. Started by the agent on the head node; people use rlpost.submit.")
    made.add_argument("--run-folder", type=Path, metavar="FOLDER", help="where the run lives")
    made.add_argument("--cluster-from-stdin", action="store_true", help="read the cluster from standard input")
    options, loaded = settings(made, arguments)
    if not options.cluster_from_stdin or options.run_folder is None:
        raise ConfigError(
            "rlpost.train runs inside a cluster that is up; "
            "use 'python -m rlpost.submit RECIPE' or 'sbatch jobs/tiny.sbatch'"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    from bootstrap.handoff import EXIT_CONFIG

    try:
        config = _settled(options.run_folder, loaded.config)
    except ConfigError as error:
        logging.error("%s", error)
        return EXIT_CONFIG
    return _drive(config, options.run_folder)


def _settled(run_folder: Path, given: Config) -> Config:
    """The settings of the run: those in run.json, or, at its first start without rlpost.submit, those given."""
    path = run_folder / "run.json"
    if path.exists():
        return parse_dump(path.read_text())
    check(given)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dump(given))
    temporary.rename(path)
    return given


def _drive(config: Config, run_folder: Path) -> int:
    from bootstrap.handoff import Cluster
    from rlpost.orchestration.driver import drive  # heavy, while Ray comes up

    line = sys.stdin.readline()
    if not line:
        logging.error("the agents brought up no cluster; their logs beside this one say why")
        return EXIT_NO_CLUSTER
    return drive(config, run_folder, Cluster.from_json(line))


if __name__ == "__main__":
    sys.exit(main())
