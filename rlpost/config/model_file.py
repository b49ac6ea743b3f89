"""The file that describes a run's model: config.json of its folder, or the published one.

``jobs/models/NAME.json`` is the published config.json of a model: the keys that decide its size and
what it computes. It describes the model while the folder of the weights is not here, for planning
and rehearsal. A run takes the folder's own file, which alone decides.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlpost.config.extensions import command
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.config.wording import listed, near_path
from rlpost.errors import ConfigError, suggestion
from rlpost.models.config_file import language_model, parse_object, read_config
from rlpost.models.model_types import HfConfig

MODELS = Path(__file__).parents[2] / "jobs" / "models"
DESCRIPTION = "_description"
"""The key of a file in ``jobs/models`` that says in words which model it is."""
_DECISIVE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "num_experts",
    "n_routed_experts",
)
"""Keys of config.json that differ where a file is of another model."""


def model_word(word: str, base: Path) -> str:
    """Return a NAME of ``jobs/models`` as it is, and a path as an absolute one below ``base``.

    Raises:
        ConfigError: the name is unknown, or the file is a recipe's table of another version.
    """
    if word.endswith(".toml"):
        raise ConfigError(
            f"--model {word}: a model is described by its config.json; give that file, or a name "
            f"that rlpost recipes models lists"
        )
    if word.endswith(".json") or "/" in word:
        return str((base / Path(word).expanduser()).absolute())
    names = {path.stem.replace("_", "-"): path.stem for path in sorted(MODELS.glob("*.json"))}
    if word not in names.values():
        near = suggestion(word.replace("_", "-").replace(".", "").lower(), names)
        for plain, published in names.items():
            near = near.replace(f"'{plain}'", published)
        raise ConfigError(
            f"{word}: no such model{near or ';'} jobs/models has {listed(names.values(), 'and')}; or "
            "give the path of a config.json"
        )
    return word


def model_path(checkpoint: CheckpointConfig) -> Path:
    """Return the file that describes the model.

    Raises:
        ConfigError: the folder is not here, and no published file is named.
    """
    path = Path(checkpoint.hf_checkpoint) / "config.json"
    if path.is_file():
        return path
    if checkpoint.model is None:
        raise ConfigError(
            f"--hf-checkpoint {checkpoint.hf_checkpoint or 'is not given'}: the model's config.json is "
            f"not there; bring it with {command('fetch RECIPE')}, or name a file of jobs/models with --model "
            "or in the recipe"
        )
    return published_path(checkpoint.model)


def published_path(word: str) -> Path:
    """Return the file of ``--model``."""
    return Path(word) if "/" in word else MODELS / f"{word}.json"


def read_model(path: Path) -> HfConfig:
    """Return the keys of the language model in a file.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        content = parse_object(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{near_path(str(path))}: cannot be read ({error.strerror}); give a config.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{near_path(str(path))}: {error}") from None
    return language_model(content)


def named_in(path: Path) -> str:
    """Return the words that describe a file of ``jobs/models``."""
    return str(json.loads(path.read_text()).get(DESCRIPTION, ""))


def other_model_problem(checkpoint: CheckpointConfig) -> str | None:
    """Return why the folder's model is not the one that ``--model`` names; None if it may be.

    A further training or another context length changes no compared key.
    """
    if checkpoint.model is None:
        return None
    path = published_path(checkpoint.model)
    try:
        here, published = read_config(checkpoint.hf_checkpoint), read_model(path)
    except (OSError, ValueError, ConfigError):
        return None  # reported elsewhere, or not needed
    common = [key for key in _DECISIVE if key in here and key in published]
    differing = [key for key in common if here[key] != published[key]]
    if not differing:
        return None
    remedy, taken = "--model none", "the model"
    if checkpoint.ref_load is not None:
        remedy, taken = "--model none --ref-load none", "the model and its reference"
    return (
        f"--hf-checkpoint {checkpoint.hf_checkpoint} is another model than {near_path(str(path))} "
        f"describes: its config.json has another {listed(differing, 'and')}; use {remedy} to take "
        f"{taken} from --hf-checkpoint, or --model with the name of this model"
    )
