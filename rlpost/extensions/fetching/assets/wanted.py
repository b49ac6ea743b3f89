"""Determine the hub repositories that a recipe needs, and the files of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from rlpost.config.tree import Config
from rlpost.errors import AssetError, ConfigError

Kind = Literal["model", "dataset"]
# The same weights in formats that rlpost does not read; skipped if there are safetensors.
OTHER_FORMS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
OTHER_FOLDERS = ("original", "onnx", "coreml", "openvino")


@dataclass(frozen=True, slots=True)
class Asset:
    """A repository of the hub and the name of its local folder."""

    repository: str
    kind: Kind
    revision: str | None = None

    @property
    def folder(self) -> str:
        return self.repository.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository with its size in bytes and the hub's digest.

    ``digest`` is ``sha256:HEX`` of the content for large files, and ``git:HEX`` (the id of git's
    blob) for others.
    """

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    commit: str
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def wanted(config: Config) -> tuple[Asset, ...]:
    """Return the repositories of a recipe, each once.

    Raises ConfigError if two would share a folder.
    """
    named: list[tuple[Kind, str]] = [("model", name) for name in config.assets.hub_models]
    named += [("dataset", name) for name in config.assets.hub_datasets]
    by_folder: dict[str, Asset] = {}
    for kind, name in named:
        repository, _, revision = name.partition("@")
        asset = Asset(repository, kind, revision or None)
        other = by_folder.setdefault(asset.folder, asset)
        if other != asset:
            raise ConfigError(
                f"[assets]: {_label(other)} and {_label(asset)} would share the folder {asset.folder}; keep one of them"
            )
    return tuple(by_folder.values())


def from_elsewhere(config: Config, assets_dir: str, assets: Iterable[Asset]) -> tuple[str, ...]:
    """Return ``key = path`` for paths below ``assets_dir`` that no repository provides."""
    provided = {asset.folder for asset in assets} | set(config.assets.made_datasets)
    pairs = [
        (key, getattr(config.checkpoint, key)) for key in ("hf_checkpoint", "ref_load", "load")
    ]
    pairs.append(("critic_load", config.critic.critic_load))
    pairs += [("prompt_data", path) for path in config.rollout.prompt_data]
    pairs += [("eval_prompt_data", path) for _, path in config.eval_sets]
    lines = []
    for key, path in dict.fromkeys(pairs):
        name = _first_below(path, assets_dir) if isinstance(path, str) else None
        if name is not None and name not in provided:
            lines.append(f"{key} = {path}")
    return tuple(lines)


def chosen(files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """Return the files to fetch: all, or all without other weight formats if there are safetensors.

    Raises:
        AssetError: a path leads out of the folder.
    """
    for file in files:
        path = PurePosixPath(file.path)
        if (
            path.is_absolute()
            or ".." in path.parts
            or not path.parts
            or not file.path.isprintable()
        ):
            raise AssetError(
                f"the hub lists the file {file.path!r}, which leads out of its folder; it is not fetched"
            )
    if not any(file.path.endswith(".safetensors") for file in files):
        return tuple(files)
    return tuple(file for file in files if not _is_other_format(file))


def _is_other_format(file: HubFile) -> bool:
    return file.path.endswith(OTHER_FORMS) or PurePosixPath(file.path).parts[0] in OTHER_FOLDERS


def _first_below(path: str, folder: str) -> str | None:
    """Return the first part of ``path`` below ``folder``, or None if it is not below it."""
    below = PurePosixPath(path)
    if not below.is_relative_to(folder):
        return None
    parts = below.relative_to(folder).parts
    return parts[0] if parts else None


def _label(asset: Asset) -> str:
    revision = f"@{asset.revision}" if asset.revision else ""
    return f"{asset.kind} {asset.repository}{revision}"
