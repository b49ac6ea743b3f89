"""``--scale-down [RANKS]`` of submit, check and plan: the recipe at a size that this machine runs.

Input: loaded settings.
Output: the scaled ones, with ``--scale-down`` as the origin of each value that changed, and a
table of those values. The model is described by config.json where it is here, else by the table
[model].
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpost.actor.architecture import architecture
from rlpost.config.load import Loaded
from rlpost.config.scale_down import FOLDER, RANKS, Change, scale_down
from rlpost.config.tree import Config
from rlpost.config.wording import COMMAND_LINE
from rlpost.errors import ConfigError, WeightError
from rlpost.hf_shape import weight_bytes
from rlpost.weights.families import family

FLAG = "--scale-down"
_WIDEST = 48


def add_scale_down(made: argparse.ArgumentParser) -> None:
    """The option, for ``settings`` to find."""
    made.add_argument(
        FLAG,
        type=int,
        nargs="?",
        const=RANKS,
        metavar="RANKS",
        help=f"the recipe in small, for RANKS ranks that train ({RANKS} unless given) on this machine: model, layout, "
        "batch and lengths shrink, algorithm and rollout stay; flags win over it (docs/recipes.md)",
    )


def scaled(loaded: Loaded, ranks: int) -> tuple[Loaded, tuple[Change, ...]]:
    """The settings in small; what the command line gave stays. Raises ConfigError."""
    config = loaded.config
    given = {name for name, origin in loaded.origins.items() if origin == COMMAND_LINE}
    words, fp8 = model_words(config)
    made = scale_down(config, words, ranks=ranks, fp8=fp8, kept=given)
    origins = loaded.origins | {change.name: FLAG for change in made.changes}
    return Loaded(made.config, origins), made.changes


def model_words(config: Config) -> tuple[dict[str, Any], bool]:
    """The architecture in the words of [model], and whether its folder is in FP8. Raises ConfigError."""
    folder = Path(config.checkpoint.hf_checkpoint)
    said = {name: value for name, value in config.model.model_dump().items() if value is not None}
    path = folder / "config.json"
    if not path.is_file():
        return said, folder.name.endswith("FP8")
    try:
        hf = json.loads(path.read_text())
        known = architecture(family((hf.get("architectures") or ["none given"])[0]), hf)
    except (ValueError, KeyError, WeightError) as error:
        raise ConfigError(f"{path}: {error!r}") from None
    return {name: value for name, value in known.items() if value is not None} | said, weight_bytes(hf) == 1


def table(changes: Sequence[Change]) -> str:
    """What is another value than in the recipe: setting, recipe, scaled."""
    rows = [("setting", "recipe", "scaled"), *((one.name, _text(one.recipe), _text(one.scaled)) for one in changes)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    text = text.replace(f"{Path.cwd()}/", "")
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2 - 2]} .. {text[-_WIDEST // 2 + 2 :]}"


def require_model(recipe: str | None, config: Config) -> None:
    """Raise ConfigError with the command that makes the scaled model where it is not here yet."""
    folder = Path(config.checkpoint.hf_checkpoint)
    if FOLDER.absolute() in folder.parents and not (folder / "config.json").is_file():
        command = f"python tools/make_tiny_model.py --recipe {recipe} {FLAG} {config.actor_world_size}"
        raise ConfigError(f"{FLAG}: the model in small is not here yet; make it with: {command}")
