"""Check that the image, the model folder and the prompt files of a run exist.

Input: a ``Config``; only the existence of paths is checked. Output: one line for all missing assets
that `rlpost fetch` downloads or makes, with the command, and one line for each other path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from rlpost.config.checks.functions import SETTINGS
from rlpost.config.eval_sets import eval_sets
from rlpost.config.extensions import command
from rlpost.config.tree import Config
from rlpost.config.wording import listed, near_path
from rlpost.errors import ConfigError, suggestion
from rlpost.models.fp8 import FOLDER

MADE = (("assets", "tiny"), ("assets", "tiny-images"))
"""Folders that `rlpost fetch` makes, by their last names."""


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
    """Missing paths; those that `rlpost fetch` downloads share one line, and those it makes."""
    fetched: list[str] = []
    generated: list[str] = []
    others: list[str] = []
    folders = _of_the_hub(config)
    for name, path, kind in _needed(config):
        if has_folder(path) if kind == "folder" else os.path.exists(_file(path)):
            continue  # both are False without permission
        if "," in path and all(os.path.exists(_file(one)) for one in path.split(",")):
            others.append(f"{name} {path}: no such {kind}; write {name} {path.replace(',', ' ')}")
        elif is_made(path):
            generated.append(f"{name} {near_path(path)}")
        elif folders & set(Path(path).parts):
            fetched.append(f"{name} {path}")
        elif name == "--hf-checkpoint" and Path(path).name.removesuffix(FOLDER) in folders:
            verb = f"convert {near_path(recipe) if recipe else 'RECIPE'} --to fp8"
            others.append(f"{name} {path}: no such {kind}; make it with {command(verb)}")
        else:
            others.append(f"{name} {path}: {_why(_file(path), kind)}{_of_a_hub(name, path)}")
    verb = f"fetch {near_path(recipe) if recipe else 'RECIPE'}"
    if generated:
        others = [f"{listed(generated, 'and')}: not made yet; run: {command(verb)}", *others]
    if not fetched:
        return others
    if config.cluster.assets_dir is not None:
        verb += f" --assets-dir {config.cluster.assets_dir}"
    return [f"{listed(fetched, 'and')}: not downloaded yet; run: {command(verb)}", *others]


def has_folder(path: str) -> bool:
    """Whether a folder exists; a folder that `rlpost fetch` makes must have its last files."""
    return os.path.isdir(path) and (
        not is_made(path) or os.path.isfile(os.path.join(path, "config.json"))
    )


def is_made(path: str) -> bool:
    """Whether a path lies in a folder that `rlpost fetch` makes."""
    return any(names in MADE for names in pairwise(Path(path).parts))


def read_paths(config: Config) -> list[str]:
    """Return each absolute path that the run reads, once: those that exist on this host."""
    checkpoint = config.checkpoint
    functions = (str(getattr(getattr(config, table), key) or "") for table, key, _ in SETTINGS)
    # Those of engines are in ``_needed``, if the run starts them.
    others = (table for table in config.tables if table is not config.engines)
    paths_of_extensions = [path for table in others for _, path in table.paths]
    optional = (
        checkpoint.ref_load,
        checkpoint.load,
        checkpoint.save,  # a resume reads it
        config.critic.critic_load,
        config.rollout.judge,
        *paths_of_extensions,
        *(name.rpartition(":")[0] for name in functions),  # FILE.py:function
    )
    paths = [_file(path) for _, path, _ in _needed(config)] + [path for path in optional if path]
    return [path for path in dict.fromkeys(paths) if path.startswith("/") and os.path.exists(path)]


def _needed(config: Config) -> list[tuple[str, str, str]]:
    """(flag, path, "file" or "folder") of every path that is read."""
    found = []
    if config.checkpoint.hf_checkpoint:
        found.append(("--hf-checkpoint", config.checkpoint.hf_checkpoint, "folder"))
    for name, group in config.engines.started.items():
        if group.model is not None:
            found.append((f"model of [engines.{name}]", group.model, "folder"))
    found += [("--prompt-data", path, "file") for path in config.rollout.prompt_data]
    try:
        sets = eval_sets(config.eval)
    except ConfigError:  # ``eval_problems`` reports it
        return found
    return [*found, *((f"--eval-prompt-data {one.name}", one.path, "file") for one in sets)]


def _of_the_hub(config: Config) -> set[str]:
    """Names of the folders that `rlpost fetch` creates: the last part of each repository name."""
    repositories = (*config.assets.hub_models, *config.assets.hub_datasets)
    folders = {repository.partition("@")[0].rpartition("/")[2] for repository in repositories}
    return folders | set(config.assets.made_datasets)


def _why(path: str, kind: str) -> str:
    """Why a path is unusable, and the remedy."""
    if "://" in path:
        return (
            f"is a URL, and the run reads a {kind}; download it to a file system that all nodes share, and "
            "give the path"
        )
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    first = next((parent for parent in parents if not os.path.exists(parent)), None)
    if first is not None:
        return f"no such {kind}: {first} does not exist, or its parent is not readable; give another path"
    if os.path.exists(path):
        return f"is not a {kind}; give a {kind}"
    near = suggestion(Path(path).name, os.listdir(Path(path).parent))
    return f"no such {kind}{near or '; give an existing one'}"


def _of_a_hub(name: str, path: str) -> str:
    """Remedy for ORGANISATION/NAME, a hub repository given instead of a folder."""
    here = os.path.relpath(path)
    if name != "--hf-checkpoint" or here.count("/") != 1 or here.startswith("."):
        return ""
    return (
        f" (for the repository {here} on the hub: {command(f'fetch RECIPE --hub-models {here}')})"
    )


def _file(source: str) -> str:
    return source.partition("@[")[0]
