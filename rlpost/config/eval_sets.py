"""Evaluation sets: from --eval-prompt-data, or from the file of --eval-config.

Only sets in the file can have separate settings.

Input: the table [eval]. Output: one ``EvalSet`` per set; unset values are inherited from [eval] and
then from [rollout]. The file is TOML or YAML:

    [defaults]                         # for all sets of the file
    temperature = 0.6
    [[datasets]]
    name = "aime24"
    path = "aime24.jsonl"              # relative to this file
    n_samples_per_eval_prompt = 16
    rm_type = "deepscaler"

In YAML both tables may be below a key ``eval``, as in recipes for slime.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rlpost.config.groups.base import Fraction, FunctionPath, Group, Positive, TopK
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.errors import ConfigError, suggestion


class EvalSet(Group):
    """One set of held-out prompts and the settings that it overrides."""

    name: str
    path: str
    n_samples_per_eval_prompt: Positive | None = None
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    max_response_len: Positive | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    rm_type: str | None = None
    custom_rm_path: FunctionPath | None = None
    input_key: str | None = None
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, object] | None = None
    custom_generate_function_path: FunctionPath | None = None


ROLLOUT_KEYS = (
    "rm_type",
    "custom_rm_path",
    "input_key",
    "label_key",
    "metadata_key",
    "tool_key",
    "apply_chat_template",
    "apply_chat_template_kwargs",
    "custom_generate_function_path",
)
"""Keys of a set that override a setting of [rollout] with the same name."""


def set_settings(one: EvalSet, evaluation: EvalConfig, rollout: RolloutConfig) -> RolloutConfig:
    """Return [rollout] as a set overrides it: by its own keys, and by the limits of [eval].

    A reward by name replaces a function of [rollout], which would take precedence.
    """
    own = {key: value for key in ROLLOUT_KEYS if (value := getattr(one, key)) is not None}
    if one.rm_type is not None and one.custom_rm_path is None:
        own |= {"custom_rm_path": None, "group_rm": False}
    limits = {
        "rollout_max_prompt_len": evaluation.eval_max_prompt_len,
        "rollout_max_context_len": evaluation.eval_max_context_len,
    }
    own |= {key: value for key, value in limits.items() if value is not None}
    return rollout.model_copy(update=own)


MAX_NAME_BYTES = 200
"""Longest name of a set: a file name has at most 255 bytes, temporary ones included."""


def name_problem(names: Sequence[str]) -> str | None:
    """Return why names of sets cannot name metrics and files; None if they can."""
    for name in names:
        if not name.strip() or not name.isprintable():
            return f"a set is named {name!r}; give it a NAME of letters, without line breaks"
        if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
            return (
                f"a set has a NAME of {len(name)} characters, {name[:20]}...; use at most "
                f"{MAX_NAME_BYTES} bytes"
            )
    for first, second in combinations(names, 2):
        if first == second:
            return (
                f"two sets are named {first}, and metrics are named by set; give each its own "
                f"NAME, such as {first} and {first}-2"
            )
    return None


def eval_sets(evaluation: EvalConfig) -> tuple[EvalSet, ...]:
    """Return all sets, with the keys of [eval] where they have none.

    Raises ConfigError with file and key if --eval-config is invalid.
    """
    keys = {
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "tool_key": evaluation.eval_tool_key,
    }
    found = []
    for one in _named_sets(evaluation):
        missing = {key: value for key, value in keys.items() if getattr(one, key) is None}
        found.append(one.model_copy(update=missing))
    return tuple(found)


def _named_sets(evaluation: EvalConfig) -> tuple[EvalSet, ...]:
    if evaluation.eval_config is not None:
        return _from_file(Path(evaluation.eval_config))
    words = evaluation.eval_prompt_data
    pairs = list(zip(words[0::2], words[1::2], strict=False))
    if len(words) == 1:
        pairs = [(Path(words[0]).stem, words[0])]
    return tuple(EvalSet(name=name, path=path) for name, path in pairs)


def _from_file(file: Path) -> tuple[EvalSet, ...]:
    raw = _read(file)
    raw = raw.get("eval", raw)
    datasets = raw.get("datasets") if isinstance(raw, dict) else None
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError(f"{file}: needs a list 'datasets', each with a name and a path")
    if not isinstance(raw.get("defaults") or {}, dict):
        raise ConfigError(
            f"{file}: defaults = {raw['defaults']!r}: a table of settings for all sets is needed"
        )
    if unknown := raw.keys() - {"defaults", "datasets"}:
        raise ConfigError(f"{file}: unknown key '{min(unknown)}'; known: 'defaults' and 'datasets'")
    sets = []
    for number, entry in enumerate(raw["datasets"], 1):
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{file}: dataset {number} is {entry!r}; a table with name and path is needed"
            )
        sets.append(_entry(file, number, {**(raw.get("defaults") or {}), **entry}))
    if problem := name_problem([each.name for each in sets]):
        raise ConfigError(f"{file}: {problem}")
    return tuple(sets)


def _entry(file: Path, number: int, entry: dict[str, object]) -> EvalSet:
    where = f"{file}: dataset {number} ({entry.get('name', 'without a name')})"
    known = EvalSet.model_fields
    if unknown := next((key for key in entry if key not in known), None):
        raise ConfigError(
            f"{where}: unknown key '{unknown}'{suggestion(unknown, known)}; known: {', '.join(known)}"
        )
    try:
        one_set = EvalSet.model_validate(entry)
    except ValidationError as error:
        faults = [
            f"{fault['loc'][0]} = {fault['input']!r}: {fault['msg']}" for fault in error.errors()
        ]
        raise ConfigError(f"{where}: {'; '.join(faults)}") from None
    if "://" in one_set.path:  # a check reports it
        return one_set
    return one_set.model_copy(update={"path": str(file.parent / Path(one_set.path).expanduser())})


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a BOM
        if file.suffix == ".toml":
            return tomllib.loads(text)
        import yaml  # optional: TOML needs no package

        value = yaml.safe_load(text)
    except ImportError:
        raise ConfigError(
            f"{file}: reading YAML needs pyyaml; install it or write the file as TOML"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; give the path of a TOML or YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not text in UTF-8: {error}; save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a table with 'datasets' is needed, got {type(value).__name__}")
    return value
