"""What a run cannot begin without and has not got yet: its image, the folder of its model, the files of its prompts.

Input: a ``Config``; the file system is asked whether paths are there. Output: one line for all that is missing of the
folder of models and data, with the command that brings it, and one for each other path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rlpost.config.eval_sets import eval_sets
from rlpost.config.tree import Config
from rlpost.config.wording import listed, near_path
from rlpost.errors import ConfigError, suggestion


def image_problems(config: Config) -> list[str]:
    """A container without an image."""
    cluster = config.cluster
    if cluster.container in ("none", "auto") or cluster.container_image:
        return []
    return [
        f"--container {cluster.container} needs an image; add --container-image with the absolute path of a .sqsh file "
        "or a name in a registry, or use --container none"
    ]


def is_there(sources: Iterable[str]) -> bool:
    """Whether all files of prompts are there; ``PATH@[A:B]`` is a slice of one."""
    return all(os.path.exists(_file(source)) for source in sources)


def missing_problems(config: Config, recipe: str | None) -> list[str]:
    """Paths that are not there. Those that `rlpost fetch` brings are told together."""
    fetched: list[str] = []
    others: list[str] = []
    folders = _of_the_hub(config)
    for name, path, kind in _needed(config):
        if os.path.isdir(path) if kind == "folder" else os.path.exists(_file(path)):
            continue  # neither says yes where one may not look
        if folders & set(Path(path).parts):
            fetched.append(f"{name} {path}")
        else:
            others.append(f"{name} {path}: {_why(_file(path), kind)}{_of_a_hub(name, path)}")
    if not fetched:
        return others
    command = f"rlpost fetch {near_path(recipe) if recipe else 'RECIPE'}"
    if config.cluster.assets_dir is not None:
        command += f" --assets-dir {config.cluster.assets_dir}"
    return [f"{listed(fetched, 'and')}: not there yet; fetch from the hub with: {command}", *others]


def _needed(config: Config) -> list[tuple[str, str, str]]:
    """(flag, path, what it is) of what is read."""
    found = [("--hf-checkpoint", config.checkpoint.hf_checkpoint, "folder")] if config.checkpoint.hf_checkpoint else []
    found += [("--prompt-data", path, "file") for path in config.rollout.prompt_data]
    try:
        sets = eval_sets(config.eval)
    except ConfigError:  # told with the settings of the evaluation
        return found
    return [*found, *((f"--eval-prompt-data {one.name}", one.path, "file") for one in sets)]


def _of_the_hub(config: Config) -> set[str]:
    """Names of the folders that `rlpost fetch` makes: the last part of each repository."""
    repositories = (*config.assets.hub_models, *config.assets.hub_datasets)
    return {repository.partition("@")[0].rpartition("/")[2] for repository in repositories}


def _why(path: str, kind: str) -> str:
    """What there is of a path, and what to do."""
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    first = next((parent for parent in parents if not os.path.exists(parent)), None)
    if first is not None:
        return f"no such {kind}: {first} does not exist, or you may not look into what holds it; give another"
    if os.path.exists(path):
        return f"is not a {kind}; give one"
    near = suggestion(Path(path).name, os.listdir(Path(path).parent))
    return f"no such {kind}{near or '; give one that exists'}"


def _of_a_hub(name: str, path: str) -> str:
    """What to do about ORGANISATION/NAME, a repository on the hub, where a folder is meant."""
    here = os.path.relpath(path)
    if name != "--hf-checkpoint" or here.count("/") != 1 or here.startswith("."):
        return ""
    return f" (for the repository {here} on the hub: rlpost fetch RECIPE --hub-models {here})"


def _file(source: str) -> str:
    return source.partition("@[")[0]
