"""What a recipe wants from the hub, and which files of a repository it needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from rlpost.config.tree import Config
from rlpost.errors import AssetError, ConfigError

Kind = Literal["model", "dataset"]
# The same weights in formats that rlpost does not read; skipped where there are safetensors.
OTHER_FORMS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
OTHER_FOLDERS = ("original", "onnx", "coreml", "openvino")


@dataclass(frozen=True, slots=True)
class Asset:
    """A repository of the hub and the name of its folder here."""

    repository: str
    kind: Kind
    revision: str | None = None

    @property
    def folder(self) -> str:
        return self.repository.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: bytes, and the digest that the hub keeps of it.

    ``digest`` is ``sha256:HEX`` of the content for large files, or ``git:HEX``, the id of git's blob, for others.
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
    """The repositories of a recipe, each once. Raises ConfigError when two would share a folder."""
    named: list[tuple[Kind, str]] = [("model", name) for name in config.assets.hub_models]
    named += [("dataset", name) for name in config.assets.hub_datasets]
    found: dict[str, Asset] = {}
    for kind, name in named:
        repository, _, revision = name.partition("@")
        asset = Asset(repository, kind, revision or None)
        other = found.setdefault(asset.folder, asset)
        if other != asset:
            raise ConfigError(
                f"[assets]: {_word(other)} and {_word(asset)} would both be kept as {asset.folder}; name one of them"
            )
    return tuple(found.values())


def from_elsewhere(config: Config, assets_dir: str, assets: Iterable[Asset]) -> tuple[str, ...]:
    """``key = path`` of what the recipe wants below ``assets_dir`` and no repository brings: converted checkpoints."""
    brought = {asset.folder for asset in assets}
    pairs = [(key, getattr(config.checkpoint, key)) for key in ("hf_checkpoint", "ref_load", "load")]
    data = config.rollout.prompt_data
    pairs += [("prompt_data", path) for path in ((data,) if isinstance(data, str) else data or ())]
    pairs += [("eval_prompt_data", path) for _, path in config.eval_sets]
    return tuple(
        f"{key} = {path}"
        for key, path in dict.fromkeys(pairs)
        if isinstance(path, str) and (name := _first_below(path, assets_dir)) and name not in brought
    )


def chosen(files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """The files to fetch: all, without weights in other formats where there are safetensors.

    Raises:
        AssetError: a path leads out of the folder.
    """
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or not file.path.isprintable():
            raise AssetError(f"the hub names a file {file.path!r}, which leads out of its folder; not fetched")
    if not any(file.path.endswith(".safetensors") for file in files):
        return tuple(files)
    return tuple(
        file
        for file in files
        if not file.path.endswith(OTHER_FORMS) and PurePosixPath(file.path).parts[0] not in OTHER_FOLDERS
    )


def _first_below(path: str, folder: str) -> str | None:
    below = PurePosixPath(path)
    return below.relative_to(folder).parts[0] if below.is_relative_to(folder) and str(below) != folder else None


def _word(asset: Asset) -> str:
    return f"{asset.kind} {asset.repository}" + (f"@{asset.revision}" if asset.revision else "")
