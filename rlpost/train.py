"""``python -m rlpost.train``: the driver of a run. The agent starts it on the head node.

Input: a recipe and flags, or a run folder whose ``run.json`` holds the resolved settings; the
cluster as one line on standard input. Settings are checked before large packages are imported.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.cluster import Cluster
from common.exit_codes import EXIT_CONFIG, EXIT_CRASHED, EXIT_FAILED
from common.garbage import collect_between_steps_only, paused_for_imports
from common.log_format import configure_logging
from common.run_folder import RunFolder, create_run_folder
from rlpost.cli.check_installed import check_installed
from rlpost.cli.check_settings import check
from rlpost.cli.command_line import make_parser, settings
from rlpost.cli.entry import EXIT_BAD_INPUT, run_command
from rlpost.cli.secret_file import hide_keys, load_keys
from rlpost.cli.stack_check import model_problems
from rlpost.config import extensions
from rlpost.config.arguments import add_switch
from rlpost.config.load import dump, parse_dump
from rlpost.config.masking import masked_words
from rlpost.config.tree import Config
from rlpost.errors import ConfigError

FROM_AGENT = "--cluster-from-stdin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.train``."""
    if arguments is None:
        hide_keys()
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        sys.argv[1:] = masked_words(words)  # which W&B records
    code = run_command(partial(_train, owns_process=arguments is None), words)
    return EXIT_CONFIG if code == EXIT_BAD_INPUT and FROM_AGENT in words else code


def _train(arguments: Sequence[str], *, owns_process: bool) -> int:
    parser = make_parser(
        "python -m rlpost.train",
        "Train. The agent starts this on the head node; users run rlpost.submit.",
    )
    parser.add_argument("--run-folder", type=Path, metavar="FOLDER", help="the folder of the run")
    add_switch(parser, FROM_AGENT, "read the cluster from standard input")
    options, loaded = settings(parser, arguments)
    if not options.cluster_from_stdin or options.run_folder is None:
        raise ConfigError(
            "rlpost.train runs inside a cluster that is up; "
            "use 'python -m rlpost.submit RECIPE' or 'sbatch jobs/tiny.sbatch'"
        )
    configure_logging(log_format=loaded.config.observe.log_format)
    run = RunFolder(options.run_folder)
    config = _settle_config(run, loaded.config)
    check_installed(config)
    extensions.check_node(config)
    load_keys(run, os.environ)
    with paused_for_imports():
        from rlpost.driver.driver import drive  # a slow import, while Ray starts

        _load_tokenizer(config)
    problems, _ = model_problems(config)
    if problems:
        raise ConfigError("\n".join(problems))
    if owns_process:
        collect_between_steps_only()
    line = sys.stdin.readline()
    if not line:
        logging.error("the agents started no cluster; see their logs beside this one")
        return EXIT_FAILED
    try:
        return drive(config, run, Cluster.from_json(line))
    except Exception:
        logging.exception("the driver failed with an error that it does not expect")
        return EXIT_CRASHED


def _load_tokenizer(config: Config) -> None:
    """Load the tokenizer early, before a standby driver waits; errors are reported at first use."""
    from rlpost.tasks.tokenizer import hf_tokenizer  # heavy

    try:
        hf_tokenizer(str(config.checkpoint.hf_checkpoint))
    except Exception as error:
        logging.debug("the tokenizer could not be loaded ahead: %s", error)


def _settle_config(run: RunFolder, given: Config) -> Config:
    """Return the settings of run.json; a first start without rlpost.submit writes it."""
    if run.run_json.exists():
        return parse_dump(run.run_json.read_text())
    home = os.environ.get("RLPOST_HOME")  # set by the batch script, which mounts it
    check(given, run=run.root, mounted=(home,) if home else ())
    create_run_folder(run.root, dump(given), resume=True)
    return given


if __name__ == "__main__":
    sys.exit(main())
