"""GPUs to plan a recipe for: the flags of the verbs that do so, and the recipe on these GPUs.

Input: words of a command line. Output: the settings on that number of GPUs; bytes of a GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from rlpost.cli.command_line import no_recipe, settings
from rlpost.config.plan.cards import CARDS
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError

EXIT_NO_FIT = 2
GPU_MEMORY = "H100"
UNITS = {"GB": 10**9, "GiB": 2**30, "G": 10**9}
NAMED_CARDS = [name for name, card in CARDS.items() if card.gib is not None]
"""Values of --gpu-memory that name a GPU."""


def add_gpus(made: argparse.ArgumentParser) -> None:
    """Add the flags that describe the GPUs to plan for."""
    made.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of the trainer, instead of the recipe's"
    )
    made.add_argument(
        "--gpu-memory",
        default=GPU_MEMORY,
        metavar="SIZE",
        help=f"of one GPU: a size such as 80GB, or {', '.join(NAMED_CARDS)} (default: {GPU_MEMORY})",
    )


def read_planned_recipe(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Config]:
    """Read the options and the recipe on the GPUs of ``--gpus``. Raises ConfigError."""
    options, loaded = settings(parser, arguments)
    if options.recipe is None and not loaded.origins:
        raise no_recipe(f"{parser.prog} qwen3_4b")
    config = loaded.config if options.gpus is None else on_gpus(loaded.config, options.gpus)
    return options, config


def on_gpus(config: Config, gpus: int) -> Config:
    """The recipe on ``gpus`` trainer GPUs. Raises ConfigError when they are no whole nodes."""
    a_node = min(gpus, config.cluster.num_gpus_per_node)
    if gpus < 1 or gpus % a_node:
        size = config.cluster.num_gpus_per_node
        lower = max(1, gpus // size) * size
        raise ConfigError(
            f"--gpus {gpus} is no multiple of --num-gpus-per-node {size}; use {lower} or {lower + size}"
        )
    num_nodes = gpus // a_node
    return with_values(
        config, actor_num_nodes=num_nodes, actor_num_gpus_per_node=a_node, nodes=None
    )


def parse_size(text: str) -> int:
    """Bytes of ``H100``, ``80GB`` or ``79.6GiB``. Raises ConfigError."""
    if (card := CARDS.get(text.upper())) is not None and card.gib is not None:
        return int(card.gib * UNITS["GiB"])
    found = re.fullmatch(r"([0-9.]+)\s*(GB|GiB|G)", text)
    try:
        size = int(float(found[1]) * UNITS[found[2]])  # type: ignore[index]
    except (TypeError, ValueError):
        size = 0
    if size < 1:
        raise ConfigError(
            f"--gpu-memory {text}: name a GPU ({', '.join(NAMED_CARDS)}) or write a size with its "
            "unit, such as 80GB or 141GB"
        )
    return size
