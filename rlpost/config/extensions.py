"""The registry of extensions: parts of rlpost that a run can do without.

An extension is a folder ``rlpost/extensions/NAME`` whose ``extension.py`` has one value, EXTENSION:
a row of this registry (``rlpost.config.extension_row``). The folder that is beside the running code is
listed, because the snapshot of a run has no metadata of an installed package. Extensions of other
packages are entry points of the group ``rlpost.extensions``.

The core reaches extensions through this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.run_folder import RunFolder
from rlpost.config.extension_row import Extension as Extension
from rlpost.config.extension_row import Follow as Follow
from rlpost.config.extension_row import FollowEngines as FollowEngines
from rlpost.config.extension_row import JobPart as JobPart
from rlpost.config.extension_row import Mirror as Mirror
from rlpost.config.extension_row import NamedReward as NamedReward
from rlpost.config.extension_row import RankEstimate as RankEstimate
from rlpost.config.extension_row import RankMemory as RankMemory
from rlpost.config.extension_row import TextReward as TextReward
from rlpost.config.extension_row import Verb as Verb
from rlpost.config.moved import MOVED
from rlpost.errors import ConfigError

if TYPE_CHECKING:
    from rlpost.config.groups.base import Group
    from rlpost.config.groups.rollout import RolloutConfig
    from rlpost.config.tree import Config
    from rlpost.models.model_types import HfConfig

_Row = TypeVar("_Row")
ENTRY_POINTS = "rlpost.extensions"
FOLDER = Path(__file__).parents[1] / "extensions"
BOXED = "boxed_"
"""Before the name of a reward of a text: it scores the content of a box."""
EXACT_MATCH, REMOTE = "exact_match", "remote_rm"
"""The rewards of the core, by --rm-type: the default, and that of a server."""
NO_JOINING = "this installation has no extension for engines in other jobs; leave it out"
_NO_CPU = "this installation has no extension for machines without GPUs; install it, or use nodes with GPUs"


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of this installation, ours first.

    Raises ConfigError for one of another package that cannot be loaded, or whose name is taken.
    """
    names = sorted(path.parent.name for path in FOLDER.glob("*/extension.py"))
    rows = [import_module(f"rlpost.extensions.{name}.extension").EXTENSION for name in names]
    for point in entry_points(group=ENTRY_POINTS):
        row = _of_package(point)
        if row.name in {each.name for each in rows}:
            raise ConfigError(
                f"{_where(point)}: there is another extension {row.name}; give it another name"
            )
        rows.append(row)
    return tuple(rows)


def of_packages() -> list[Extension]:
    """Return the extensions of other packages."""
    return [each for each in extensions() if not (FOLDER / each.name).is_dir()]


def _where(point: Any) -> str:
    return f"{ENTRY_POINTS} {point.name} = {point.value}"


def _of_package(point: Any) -> Extension:
    try:
        extension = point.load()
    except (Exception, SystemExit) as error:  # importing a package may raise anything
        raise ConfigError(
            f"{_where(point)}: cannot load it: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"{_where(point)}: got a {type(extension).__name__}; provide an "
            "rlpost.config.extensions.Extension"
        )
    return extension


def load(path: str) -> Any:
    """Return the value that ``module:name`` names.

    Raises:
        ConfigError: there is no such module or name.
        ImportError: the module needs a library that is not installed.
    """
    module, _, name = path.partition(":")
    problem = f"an extension names {path}, which does not exist; install versions of both that fit"
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(problem) from error
    if not hasattr(loaded, name):
        raise ConfigError(problem)
    return getattr(loaded, name)


def tables(core: Mapping[str, type[Group]] | None = None) -> dict[str, type[Group]]:
    """Return the tables of a recipe that extensions add, by name; ``core``: those that there are.

    Raises ConfigError for a table, or a setting in one, of a name that is taken.
    """
    core = core or {}
    paths = _new("table", core, lambda one: one.tables)
    added: dict[str, type[Group]] = {name: load(path) for name, path in paths.items()}
    settings = {key for group in core.values() for key in group.model_fields}
    for name, group in added.items():
        if taken := settings & group.model_fields.keys():
            raise ConfigError(
                f"table [{name}] of an extension: the setting {min(taken)} exists; give it another name"
            )
        settings |= group.model_fields.keys()
    return added


def public_names(core: Mapping[str, str]) -> dict[str, str]:
    """Return what extensions add to the package's names; ``core``: those that there are.

    Raises ConfigError for a name that is taken.
    """
    return _new("public name", core, lambda one: one.public_names)


def moved() -> dict[str, str]:
    """Return where modules and names of earlier versions are, in the core and in extensions."""
    return MOVED | {old: new for each in extensions() for old, new in each.moved.items()}


def verbs(core: Mapping[str, Verb]) -> dict[str, Verb]:
    """Return the verbs that extensions add; ``core``: those that there are.

    Raises ConfigError for a name that is taken.
    """
    return _new("verb", core, lambda one: one.verbs)


def command(words: str) -> str:
    """Return ``rlpost WORDS`` for a message; it says so if no extension here has the verb.

    ``words``: a verb that an extension adds, and its arguments.
    """
    verb = words.partition(" ")[0]
    has_verb = any(verb in each.verbs for each in extensions())
    absent = f" (this installation lacks the extension with {verb})"
    return f"rlpost {words}{'' if has_verb else absent}"


def _new(
    what: str, core: Mapping[str, object], rows_of: Callable[[Extension], Mapping[str, _Row]]
) -> dict[str, _Row]:
    added: dict[str, _Row] = {}
    for each in extensions():
        for name, row in rows_of(each).items():
            if name in core or name in added:
                raise ConfigError(
                    f"extension {each.name}: the {what} {name} exists; give it another name"
                )
            added[name] = row
    return added


def _only(hook: str) -> str | None:
    """Return what the one extension with a hook names; None without one.

    Raises ConfigError for two: which of them a run would use is unknown.
    """
    rows = [each for each in extensions() if getattr(each, hook) is not None]
    if len(rows) > 1:
        names = " and ".join(each.name for each in rows)
        raise ConfigError(f"extensions {names}: both have {hook}; install one of them")
    return getattr(rows[0], hook) if rows else None


def problems(config: Config) -> list[str]:
    """Return the problems that extensions see in the settings."""
    return [line for each in extensions() for path in each.checks for line in load(path)(config)]


def model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Return the problems that extensions see in the settings with the model of --hf-checkpoint."""
    paths = [path for each in extensions() for path in each.model_checks]
    return [line for path in paths for line in load(path)(config, hf)]


def notes(config: Config, hf: HfConfig) -> list[str]:
    """Return the notes of extensions on valid settings."""
    paths = [each.notes for each in extensions() if each.notes is not None]
    return [line for path in paths for line in load(path)(config, hf)]


def has_arithmetic() -> bool:
    """Whether an extension has lines of ``rlpost check`` about the model."""
    return any(each.arithmetic is not None for each in extensions())


def arithmetic(config: Config, hf: HfConfig) -> list[tuple[str, str]]:
    """Return the lines of extensions about the model of a run, whose shape is known."""
    paths = [each.arithmetic for each in extensions() if each.arithmetic is not None]
    return [line for path in paths for line in load(path)(config, hf)]


def rank_memory() -> RankMemory:
    """Return the estimate of ranks. Raises ConfigError without the extension that has it."""
    path = _only("rank_memory")
    if path is None:
        raise ConfigError(
            "a rehearsal compares its memory with an estimate, and this installation has no extension "
            "for that; install one"
        )
    estimate: RankMemory = load(path)
    return estimate


def check_node(config: Config) -> None:
    """Raise ConfigError if this node lacks what an extension needs for the run."""
    for path in (path for each in extensions() for path in each.on_node):
        load(path)(config)


def register_adapters() -> None:
    """Register the adapters of functions with a foreign interface in this process."""
    for each in extensions():
        if each.adapters is not None:
            load(each.adapters)()


def why_not_importable(module: str, name: str | None) -> str | None:
    """Return why a plug-in cannot import a name of a foreign package; None if nothing is known."""
    for each in extensions():
        if (path := each.foreign_names.get(module.partition(".")[0])) is not None:
            reason: str | None = load(path)(module, name)
            return reason
    return None


def answer_to(word: str) -> str | None:
    """Return an error for a word of another program's command line; None if none knows it."""
    return _first_answer("foreign_words", word)


def without_effect(name: str) -> str | None:
    """Return why a flag of another program, without dashes, changes nothing here; None for others."""
    return _first_answer("idle_flags", name)


def _first_answer(hook: str, word: str) -> str | None:
    for each in extensions():
        path = getattr(each, hook)
        if path is not None:
            answer: str | None = load(path)(word)
            if answer is not None:
                return answer
    return None


def examples() -> Any:
    """Return the class that makes examples of rows. Raises ConfigError without the extension."""
    path = _only("examples")
    if path is None:
        raise ConfigError(
            "--loss-type sft_loss: this installation has no extension for it; use another --loss-type"
        )
    return load(path)


def rewards() -> dict[str, NamedReward]:
    """Return the rewards that models give, by --rm-type. Raises ConfigError for a name that is taken."""
    return _new_rewards((EXACT_MATCH, REMOTE), lambda one: one.rewards)


def text_rewards() -> dict[str, TextReward]:
    """Return the rewards that are functions of a text, by --rm-type.

    Raises ConfigError for a name that is taken.
    """
    return _new_rewards((EXACT_MATCH, REMOTE, *rewards()), lambda one: one.text_rewards)


def _new_rewards(
    taken: Iterable[str], rows_of: Callable[[Extension], Mapping[str, _Row]]
) -> dict[str, _Row]:
    added = _new("reward", dict.fromkeys(taken), rows_of)
    for each in extensions():
        for name in rows_of(each):
            if name.startswith(BOXED):
                raise ConfigError(
                    f"extension {each.name}: the reward {name} begins with {BOXED}: --rm-type {name} is the reward "
                    f"{name.removeprefix(BOXED)!r} of the content of a box; give it another name"
                )
    return added


def check_rewards(settings: RolloutConfig) -> None:
    """Raise ConfigError for wrong settings of a reward that a model gives."""
    for row in rewards().values():
        load(row.check)(settings)


def job_parts() -> list[JobPart]:
    """Return what extensions add to the job of a run."""
    return [load(each.job) for each in extensions() if each.job is not None]


def joining_engines() -> str | None:
    """Return what makes the engines of a group that are in other jobs; None without one."""
    return _only("joining_engines")


def engine_agent() -> Callable[[Sequence[str]], int]:
    """Return what serves an engine in its own job. Raises ConfigError without an extension for it."""
    path = _only("engine_agent")
    if path is None:
        raise ConfigError(f"engines in other jobs: {NO_JOINING}")
    serve: Callable[[Sequence[str]], int] = load(path)
    return serve


def prepare_trainer() -> None:
    """Prepare this process for the import of Megatron-core without a GPU, if an extension can."""
    if (path := _only("trainer_without_gpus")) is not None:
        load(path)()


def check_trainer_without_gpus() -> None:
    """Raise ConfigError without an extension for training without a GPU."""
    if _only("trainer_without_gpus") is None:
        raise ConfigError(f"a trainer rank without a GPU: {_NO_CPU}")


def engine_without_gpus() -> Callable[[Mapping[str, Any], int | None], dict[str, object]]:
    """Return what prepares an engine without a GPU. Raises ConfigError without an extension for it."""
    path = _only("engine_without_gpus")
    if path is None:
        raise ConfigError(f"an engine without a GPU: {_NO_CPU}")
    prepare: Callable[[Mapping[str, Any], int | None], dict[str, object]] = load(path)
    return prepare


def rehearsal() -> Callable[[Config, str], None]:
    """Return the rehearsal of a run. Raises ConfigError without the extension that has it."""
    path = _only("rehearsal")
    if path is None:
        raise ConfigError("--rehearse: this installation has no extension for it; leave it out")
    rehearse: Callable[[Config, str], None] = load(path)
    return rehearse


def follow() -> Follow | None:
    """Return what follows a submitted run; None without an extension for it."""
    path = _only("follow")
    return None if path is None else load(path)


def mirrors() -> dict[str, Mirror]:
    """Return the mirrors of metrics, by the setting that switches each on.

    Raises ConfigError for a setting of two.
    """
    return _new("mirror", {}, lambda one: one.mirrors)


def check_mirrors(config: Config, run: RunFolder) -> None:
    """Raise ConfigError if a mirror lacks what it needs for the run."""
    for row in mirrors().values():
        if row.check is not None:
            load(row.check)(config, run)


def engine_followers() -> list[FollowEngines]:
    """Return what follows the engines of a run."""
    return [load(each.follow_engines) for each in extensions() if each.follow_engines is not None]


def reports() -> dict[str, str]:
    """Return what writes the report of each extension that has one, by its name."""
    return {each.name: each.report for each in extensions() if each.report is not None}
