"""Report a model file that describes another model than --hf-checkpoint as one problem. Pure.

Input: the problems of a run, among them one for each value of [model] that differs from
config.json, and the origins of the settings. Output: the problems; those of one model file are one
line with a remedy for all of them, which comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import COMMAND_LINE, listed, near_path

FEWEST = 2
"""Differences that make the file that of another model."""


def name_wrong_model_file(
    problems: Sequence[str], config: Config, origins: Mapping[str, str], *, recipe: str
) -> list[str]:
    """Replace the problems whose values come from a model file by one.

    A missing reference of the recipe's model is dropped: the remedy covers it.

    Args:
        problems: one line each; that of a value begins with its flag.
        config: the settings.
        origins: origin of each given ``group.key``.
        recipe: the origin of the recipe's own values, which a model file cannot change.
    """
    by_file: dict[str, list[str]] = {}
    for line in problems:
        key = line.partition(" ")[0].removeprefix("--").replace("-", "_")
        origin = origins.get(f"model.{key}", "")
        if origin not in ("", COMMAND_LINE, recipe):
            by_file.setdefault(origin, []).append(line)
    swapped = {file: lines for file, lines in by_file.items() if len(lines) >= FEWEST}
    file_problems = [
        _another_model(config, file, lines, origins) for file, lines in swapped.items()
    ]
    replaced = {line for lines in swapped.values() for line in lines}
    if file_problems and _reference_of_files(config, origins):
        replaced |= {line for line in problems if line.startswith(f"{flag('ref_load')} ")}
    return [*file_problems, *(line for line in problems if line not in replaced)]


def _another_model(
    config: Config, file: str, lines: Sequence[str], origins: Mapping[str, str]
) -> str:
    flags = listed([line.partition(" ")[0] for line in lines], "and")
    remedy, taken = "--model none", "the model"
    if _reference_of_files(config, origins):
        remedy += f" {flag('ref_load')} none"
        taken += " and its reference"
    return (
        f"--hf-checkpoint {config.checkpoint.hf_checkpoint} is another model than {near_path(file)} "
        f"describes: its config.json has another {flags}; use {remedy} to take {taken} from "
        "--hf-checkpoint, or --model with the file of this model"
    )


def _reference_of_files(config: Config, origins: Mapping[str, str]) -> bool:
    """Whether a file gives --ref-load: then its weights are those of the file's model."""
    given = origins.get("checkpoint.ref_load", COMMAND_LINE)
    return config.checkpoint.ref_load is not None and given != COMMAND_LINE
