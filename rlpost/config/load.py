"""Merge files and flags into one ``Config``: defaults < recipe < cluster profile < flags.

A recipe may name another one as its ``base``, whose values it overrides.

Input: paths of TOML files and the values of flags.
Output: a validated tree and the origin of each given value. All errors are reported together, one
line each, with the key, the value, its origin and the constraint.
"""

from __future__ import annotations

import json
import os
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.fleet_name import POLICY
from rlpost.config import extensions, pass_through
from rlpost.config.flags import Values, fields, flag, groups, kinds
from rlpost.config.groups.base import path_keys, variables
from rlpost.config.groups.engines import EngineGroup, EnginesConfig
from rlpost.config.megatron_options import option_names
from rlpost.config.model_arguments import NAMES as MODEL_ARGUMENTS
from rlpost.config.model_arguments import ONLY_ZERO, WITHOUT_EFFECT
from rlpost.config.model_file import model_word
from rlpost.config.other_flags import ABBREVIATIONS, meant
from rlpost.config.path_variables import ASSETS, container_word, expanded, variables_of
from rlpost.config.toml_faults import toml_fault
from rlpost.config.tree import Config
from rlpost.config.value_faults import describe_fault
from rlpost.config.wording import COMMAND_LINE, listed, near_path, value_text
from rlpost.errors import ConfigError, suggestion

NONE = "none"
JOBS = Path(__file__).parents[2] / "jobs"
SITE, BASE, CLUSTER, MODEL = "site", "base", "cluster", "model"
CHOICES = (
    "moe_token_dispatcher_type", "moe_enable_deepep", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype",
    "no_rope_fusion",
)  # fmt: skip
"""Settings of [perf] that earlier versions had in the table [model], beside the architecture."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tree and the origin of each given ``group.key``."""

    config: Config
    origins: dict[str, str]


def load(files: Sequence[Path], flag_values: Values, *, base: Path | None = None) -> Loaded:
    """Merge TOML ``files`` (later ones win) and flags (they win over files) over the defaults.

    "none" unsets a value, for settings whose default is no value. Relative paths are resolved
    against ``base``, by default the working directory. Raises ConfigError.
    """
    merged: Values = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for values, origin in [
        *((with_model_word(read_toml(path)), str(path)) for path in files),
        (flag_values, COMMAND_LINE),
    ]:
        problems += unknown_keys(values, origin)
        for group, entries in values.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                table = merged.setdefault(group, {})
                table[key] = _with_earlier(
                    table.get(key), unset_if_none(group, key, value), group=group, key=key
                )
                origins[f"{group}.{key}"] = origin
    if problems:
        raise ConfigError("\n".join(problems))
    if isinstance(word := merged.get("checkpoint", {}).get(MODEL), str):
        origin = origins[f"checkpoint.{MODEL}"]
        folder = (base or Path.cwd()) if origin == COMMAND_LINE else Path(origin).parent
        merged["checkpoint"][MODEL] = model_word(word, folder)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(describe_fault(fault, origins) for fault in error.errors())
        ) from None
    config = without_idle_groups(config)
    return Loaded(absolute_paths(config, base or Path.cwd()), origins)


def without_idle_groups(config: Config) -> Config:
    """Return the settings without engines whose weights would never be sent.

    Without a trainer (--debug-rollout-only) the policy's engines evaluate, and groups that follow the
    policy have no use.
    """
    if not config.debug.debug_rollout_only:
        return config
    groups = config.engines.groups
    kept = {name: group for name, group in groups.items() if not group.follows_policy}
    changed: dict[str, object] = {}
    if len(kept) < len(groups):
        changed["engines"] = EnginesConfig.model_validate(kept)
    if config.eval.eval_engines in {POLICY, *groups} - kept.keys():
        changed["eval"] = config.eval.model_copy(update={"eval_engines": None})
    return config.model_copy(update=changed)


def _with_earlier(earlier: object, value: object, *, group: str, key: str) -> object:
    """Return the later value.

    ``cluster.environment`` and overrides of config.json are merged by name instead, a group of
    engines and MODEL_ARGS by key.
    """
    is_merged = group == "engines" or key == "model_args"
    if is_merged and isinstance(earlier, dict) and isinstance(value, dict):
        return {**earlier, **value}
    # Variables of a recipe, a site and a command line serve different purposes.
    by_name = {("cluster", "environment"), ("checkpoint", "override_hf_config")}
    if (group, key) not in by_name or not earlier:
        return value
    try:
        return {**variables(earlier), **variables(value)}
    except (TypeError, ValueError):
        return value  # validation reports it


def unset_if_none(group: str, key: str, value: object) -> object:
    """The value, or None for the word "none" where that unsets it and is no choice."""
    table = groups().get(group)
    field = None if table is None else table.model_fields.get(key)
    if value not in (NONE, [NONE]) or field is None or field.default is not None:
        return value
    return value if any(NONE in typing.get_args(kind) for kind in kinds(field.annotation)) else None


def files_of(recipe: Path | None, cluster: str | None = None) -> list[Path]:
    """The files of a run in the order of ``load``: base, recipe, cluster profile.

    Args:
        recipe: the recipe, a file or the NAME of one in ``jobs/recipes``; ``cluster = "FILE.toml"``
            in it, instead of the table, names the profile, and ``base = "NAME"`` a recipe whose
            values it overrides.
        cluster: the profile that the command line names; it wins over the recipe.

    ``none`` is no file. A NAME is a file in ``jobs/clusters``. A path is relative to the recipe, or
    to the working directory if it is from the command line. Raises ConfigError for an unreadable
    recipe.
    """
    recipes = with_base(recipe_file(recipe))
    files = [path for path, _ in recipes]
    word, base = cluster, Path()
    for path, named in recipes:
        if cluster is None and isinstance(named.get(CLUSTER), str):
            word, base = str(named[CLUSTER]), path.parent
    if word is None or word == NONE:
        return files
    if word.endswith(".toml") or "/" in word:
        return [*files, base / Path(word).expanduser()]
    return [*files, _named_file(Path(word), "cluster profile", JOBS / "clusters")]


def with_model_word(values: Values) -> Values:
    """Return the tables of a file with the line ``model = "NAME"`` as the setting that it is."""
    if not isinstance(values.get(MODEL), str) or not isinstance(values.get("checkpoint", {}), dict):
        return values
    others = {name: table for name, table in values.items() if name != MODEL}
    return others | {"checkpoint": {MODEL: values[MODEL], **values.get("checkpoint", {})}}


def with_base(recipe: Path | None) -> list[tuple[Path, Values]]:
    """The files of a recipe with their tables, its base first. Raises ConfigError."""
    if recipe is None:
        return []
    values = read_toml(recipe)
    word: object = values.get(BASE)
    if not isinstance(word, str):
        return [(recipe, values)]
    is_path = word.endswith(".toml") or "/" in word
    base = recipe.parent / word if is_path else _named_file(Path(word), "base", JOBS / "recipes")
    named = read_toml(base)
    if BASE in named:
        raise ConfigError(
            f"{near_path(str(recipe))}: base = {word!r} has a base itself; name {named[BASE]!r} instead"
        )
    return [(base, named), (recipe, values)]


def _named_file(given: Path, what: str, folder: Path) -> Path:
    """The file of a NAME in ``folder``, or the path itself. Raises ConfigError."""
    if given.name != str(given) or given.suffix == ".toml" or given.is_file():
        return given
    path = folder / f"{given}.toml"
    if not path.is_file():
        raise ConfigError(f"{given}: no such {what}{_near(str(given), folder)}")
    return path


def _near(name: str, folder: Path) -> str:
    """The known name closest to an unknown one, and all names in its folder."""
    names = {
        path.stem.replace("_", "-").lower(): path.stem for path in sorted(folder.glob("*.toml"))
    }
    near = suggestion(name.replace("_", "-").replace(".", "").lower(), names)
    for plain, own in names.items():
        near = near.replace(f"'{plain}'", own)
    there = f"{near_path(str(folder))} has {listed(names.values(), 'and')}; or " if names else ""
    return f"{near or ';'} {there}give the path of a TOML file"


def site_profile(recipe: Path | None) -> str | None:
    """The default profile of a recipe: "site", the one its batch file is rendered with.

    Only cluster recipes have it: those with a path below $RLPOST_ASSETS. Raises ConfigError for an
    unreadable recipe.
    """
    named = [values for _, values in with_base(recipe_file(recipe))]
    if (
        any(isinstance(one.get("cluster"), str) for one in named)
        or not (JOBS / "clusters" / f"{SITE}.toml").exists()
    ):
        return None
    return SITE if any(text.startswith(f"${ASSETS}") for text in _texts(named)) else None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def recipe_file(recipe: Path | None) -> Path | None:
    """The file of a recipe given by path or NAME. Raises ConfigError for an unknown name."""
    return None if recipe is None else _named_file(recipe, "recipe", JOBS / "recipes")


def read_toml(path: Path) -> Values:
    """The tables of a TOML file. Raises ConfigError when it is missing or broken."""
    shown = near_path(str(path))
    try:
        text = path.read_text()
        return tomllib.loads(text)
    except FileNotFoundError:
        # glob finds nothing in a folder that does not exist
        toml_files = sorted(file.name for file in path.parent.glob("*.toml"))
        known = "; give a name in jobs/recipes or a TOML file"
        if toml_files:
            known = f"; there is {listed(toml_files, 'and')}"
        raise ConfigError(
            f"{shown}: no such file{suggestion(path.name, toml_files) or known}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read ({error.strerror}); give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not valid TOML: {toml_fault(str(error), text)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not text in UTF-8: {error}; save it as UTF-8") from None


def unknown_keys(values: Values, origin: str) -> list[str]:
    """One line for each unknown table or key of ``values``."""
    problems = []
    tables, owner = groups(), fields()
    origin = near_path(origin)
    for group, entries in values.items():
        if group in (CLUSTER, BASE) and isinstance(entries, str):
            continue  # another file: ``files_of``
        if group == MODEL and isinstance(entries, dict):
            problems.append(_model_table(entries, origin))
            continue
        if group not in tables:
            where = suggestion(group, tables)
            if group in owner:
                where = f"; {group} belongs in [{owner[group]}]"
            problems.append(f"{origin}: unknown table [{group}]{where}; known: {', '.join(tables)}")
            continue
        if not isinstance(entries, dict):
            problems.append(
                f"{origin}: {group} = {entries!r}: must be a table; write its keys below a line [{group}]"
            )
            continue
        if group == "engines":
            problems += _unknown_group_keys(entries, origin)
            continue
        for key in entries:
            if key in tables[group].model_fields or _is_passed_through(group, key, owner):
                continue
            known_keys = tables[group].model_fields or option_names() or ()
            hint = f"; it belongs in [{owner[key]}]" if key in owner else _hint(key, known_keys)
            problems.append(f"{origin}: unknown key '{key}' in [{group}]{hint}")
    return problems


def _model_table(entries: Mapping[str, object], origin: str) -> str:
    """The line for a table [model], which recipes of earlier versions have."""
    line = f"{origin}: [model]: config.json of --hf-checkpoint states the architecture; delete the table"
    if moved := [key for key in CHOICES if key in entries]:
        line += f", and move {listed(moved, 'and')} to [perf]"
    if "override_hf_config" in entries:
        line += ", and give overrides as [checkpoint] override_hf_config = {rotary_base = 10000}"
    return line


def _unknown_group_keys(tables: Values, origin: str) -> Iterator[str]:
    """Yield a line for each unknown key of a group of engines."""
    known = EngineGroup.model_fields
    for name, entries in tables.items():
        where = f"[engines.{name}]"
        if not isinstance(entries, dict):
            yield (
                f"{origin}: engines.{name} = {entries!r}: must be a table; write its keys below a line "
                f"{where}"
            )
            continue
        for key in entries:
            if key not in known and not key.startswith("sglang_"):
                hint = suggestion(key, known) or f"; known: {listed(known, 'and')}, and sglang_X"
                yield f"{origin}: unknown key '{key}' in {where}{hint}"


def _is_passed_through(group: str, key: str, owner: Mapping[str, str]) -> bool:
    """Whether a key is a pass-through option of SGLang or Megatron-core, in its table."""
    return (
        group in ("sglang", "megatron")
        and key not in owner
        and key not in MODEL_ARGUMENTS
        and pass_through.owner(key, ()) == group
    )


def _hint(key: str, there: Iterable[str]) -> str:
    """Suggest the key behind an abbreviation, another program's name or a close spelling."""
    if key in MODEL_ARGUMENTS:
        if key in ONLY_ZERO | WITHOUT_EFFECT:
            return "; it is 0 or has no effect here: leave it out"
        return "; the model's config.json states it: leave it out"
    words = ABBREVIATIONS.get(key.replace("_", "-"))
    if words is not None:
        return f"; use {listed(word.removeprefix('--').replace('-', '_') for word in words)}"
    reason = _reason_of(key)
    return suggestion(key, there) if reason is None else f"; {reason}"


def _reason_of(key: str) -> str | None:
    """Return why there is no setting of a name that another program or an earlier version has."""
    line = meant(key)
    if line is not None:
        return line.partition("; ")[2]
    return extensions.without_effect(key.replace("_", "-"))


def absolute_paths(config: Config, base: Path) -> Config:
    """Return the settings with all paths absolute, relative to ``base``.

    Jobs run in another folder. A leading environment variable is expanded. If it is unset the path
    stays, and a check reports it.
    """
    update: dict[str, object] = {}
    variables = variables_of(config.cluster, os.environ)
    if (assets := variables.get(ASSETS)) and not assets.startswith("$"):
        variables[ASSETS] = str(base / Path(assets).expanduser())  # a mount must be absolute too

    def absolute(path: str) -> str:
        known = expanded(path, variables)
        is_other = known.startswith("$") or "://" in known  # a check reports a URL
        return known if is_other else str(base / Path(known).expanduser())

    for name, group in groups().items():
        node = getattr(config, name)
        changed = {
            key: absolute(value) if isinstance(value, str) else tuple(map(absolute, value))
            for key in path_keys(group)
            if (value := getattr(node, key))
        }
        passed_on = (
            node.model_extra or {}
        ).items()  # a path for SGLang may begin with a variable too
        changed |= {
            key: expanded(value, variables) for key, value in passed_on if isinstance(value, str)
        }
        if name == "engines":
            changed |= {
                key: value.model_copy(
                    update={
                        path: absolute(raw_path)
                        for path in path_keys(EngineGroup)
                        if (raw_path := getattr(value, path))
                    }
                )
                for key, value in node.groups.items()
            }
        if name == "eval":
            pairs = list(node.eval_prompt_data)
            paths = slice(1, None, 2) if len(pairs) > 1 else slice(None)
            pairs[paths] = [absolute(path) for path in pairs[paths]]
            changed["eval_prompt_data"] = tuple(pairs)
        if name == "cluster":
            image, mounts = node.container_image, node.container_mounts
            changed["container_image"] = image and expanded(image, variables)
            changed["container_mounts"] = tuple(expanded(mount, variables) for mount in mounts)
            changed["container"] = container_word(node, os.environ)
        update[name] = node.model_copy(update=changed)
    return config.model_copy(update=update)


def dump(config: Config) -> str:
    """Return the tree as JSON text for ``run.json``; ``parse_dump`` is the inverse.

    A table of an extension is left out where all its settings are the defaults, so that the text
    can be read without the extension.
    """
    tables = config.model_dump(mode="json")
    for name in extensions.tables():
        if not getattr(config, name).changed_keys:
            del tables[name]
    return json.dumps(tables, indent=2) + "\n"


GONE = {"loss_unit": ("sample", "answer"), "critic_own_gpus": (False,)}
"""Settings of earlier versions, and values of them on which nothing depends, beside no value."""


def parse_dump(text: str) -> Config:
    """The inverse of ``dump``.

    Raises ConfigError for settings that this version does not have, or refuses; see ``read_dump``.
    """
    config, problems = read_dump(text)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def read_dump(text: str) -> tuple[Config, list[str]]:
    """Return the settings of any version's ``dump``, without those that this one lacks or refuses.

    Also returns a line for each of these, but for unset ones and values of GONE.
    """
    tables = json.loads(text)
    _move_model_table(tables)
    for name, group in groups().items():
        if group.model_config["extra"] == "forbid":
            known = group.model_fields
            tables[name] = {
                key: value
                for key, value in tables.get(name, {}).items()
                if key in known or not (value is None or value in GONE.get(key, ()))
            }
    try:
        return Config.model_validate_json(json.dumps(tables)), []
    except ValidationError as error:
        faults = error.errors()
    for fault in faults:
        table, *key = (str(part) for part in fault["loc"][:2])
        (tables[table] if key else tables).pop(key[0] if key else table, None)
    return Config.model_validate_json(json.dumps(tables)), [_describe_gone(one) for one in faults]


def _move_model_table(tables: Values) -> None:
    """Move the table [model] of an earlier version's settings to the settings that it has become.

    config.json states the architecture now, so its values become MODEL_ARGS, which are compared
    with it.
    """
    given = {key: value for key, value in tables.pop(MODEL, {}).items() if value is not None}
    if not given:
        return
    names = given.pop("override_hf_config", ())
    perf, checkpoint = tables.setdefault("perf", {}), tables.setdefault("checkpoint", {})
    perf |= {key: given.pop(key) for key in CHOICES if key in given}
    checkpoint["override_hf_config"] = {name: given[name] for name in names if name in given}
    checkpoint["model_args"] = given


def _describe_gone(fault: ErrorDetails) -> str:
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        return (
            f"run.json of an earlier version: this version of rlpost, or an extension here, has no "
            f"table [{fault['loc'][0]}]"
        )
    if fault["type"] != "extra_forbidden":
        return f"run.json of an earlier version: {describe_fault(fault, {})}"
    key = str(fault["loc"][1])
    reason = _reason_of(key) or "this version has no such setting"
    return f"run.json of an earlier version: {flag(key)} {value_text(fault['input'])}: {reason}"
