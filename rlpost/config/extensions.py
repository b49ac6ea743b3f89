"""The registry of extensions: parts of rlpost that a run can do without.

An extension is a folder ``rlpost/extensions/NAME`` whose ``extension.py`` has one value, EXTENSION:
a row of this registry. The folder that is beside the running code is listed, because the snapshot
of a run has no metadata of an installed package. Extensions of other packages are entry points of
the group ``rlpost.extensions``.

A row is data: functions and classes are named as ``module:name`` and imported at their first use.
The core reaches extensions through this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from common.run_folder import RunFolder
from rlpost.errors import ConfigError

if TYPE_CHECKING:
    from rlpost.config.groups.base import Group
    from rlpost.config.groups.rollout import RolloutConfig
    from rlpost.config.tree import Config

_Row = TypeVar("_Row")
ENTRY_POINTS = "rlpost.extensions"
FOLDER = Path(__file__).parents[1] / "extensions"
MOVED = {
    "rlpost.agents": "rlpost.extensions.agents",
    "rlpost.compat.slime": "rlpost.extensions.slime",
    "rlpost.compat": "rlpost.extensions.slime",
    "rlpost.rehearsal": "rlpost.extensions.rehearsal.all_ranks",
    "rlpost.tasks.judge": "rlpost.extensions.judge",
}
"""Modules of 0.2, and where they are."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command line.

    ``main`` takes the words after the verb and returns the exit code. ``takes_settings``: these
    may hold keys, which are hidden from the list of processes. ``after`` is the verb behind which
    the help lists it.
    """

    main: str
    text: str
    takes_settings: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward that a model gives, chosen by --rm-type.

    ``make`` is ``(Config, EngineClients) -> ModelReward | None``, None where the settings name no
    model; ``needs`` then says what is missing. ``check`` is ``(RolloutConfig) -> None`` and raises
    ConfigError.
    """

    make: str
    check: str
    needs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A row of the registry. All fields but ``name`` are optional.

    Attributes:
        tables: tables of a recipe, subclasses of ``Group``, by name.
        checks: ``(Config) -> list[str]``, a line for each problem; on the login node, without
            torch.
        on_node: ``(Config) -> None`` in the driver before large imports; raises ConfigError.
        verbs: verbs of the command line by name.
        adapters: ``() -> None``; registers functions with a foreign interface
            (``rlpost.algorithm.plugin.register``).
        foreign_names: foreign top-level package -> ``(module, name) -> str | None``, why a plug-in
            cannot import the name, on the login node.
        foreign_words: ``(str) -> str | None``: an error for a word that another program's command line
            has, with the flag here; None for a word that it does not know.
        answers: ``(Config, AnswerParts) -> AnswerSource | None`` (``rlpost.rollout.answer_source``).
        rewards: rewards by a model, by --rm-type.
        job: a ``JobPart``.
        rehearsal: ``(Config, str) -> None``, the size of a GPU's memory; raises ConfigError with
            the first fault.
    """

    name: str
    tables: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    on_node: tuple[str, ...] = ()
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    adapters: str | None = None
    foreign_names: Mapping[str, str] = field(default_factory=dict)
    foreign_words: str | None = None
    answers: str | None = None
    rewards: Mapping[str, NamedReward] = field(default_factory=dict)
    job: str | None = None
    rehearsal: str | None = None


class JobPart(Protocol):
    """What an extension adds to the job of a run."""

    def agent_args(self, config: Config) -> list[str]:
        """Return further arguments of the agents."""

    def problems(self, config: Config, why: str) -> list[str]:
        """Return what a run on this machine cannot have; ``why`` says why it is on this one."""

    def check(self, config: Config, run: RunFolder) -> None:
        """Raise SpecError for a value that Slurm cannot take."""

    def submit(self, config: Config, run: RunFolder, job_id: str) -> str | None:
        """Submit jobs that belong to a submitted run; return a line about them."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of this installation, ours first.

    Raises ConfigError for one of another package that cannot be loaded.
    """
    names = sorted(path.parent.name for path in FOLDER.glob("*/extension.py"))
    ours = [import_module(f"rlpost.extensions.{name}.extension").EXTENSION for name in names]
    return (*ours, *map(_of_package, entry_points(group=ENTRY_POINTS)))


def _of_package(point: Any) -> Extension:
    where = f"{ENTRY_POINTS} {point.name} = {point.value}"
    try:
        extension = point.load()
    except Exception as error:  # importing a package may raise anything
        raise ConfigError(f"{where}: cannot load it: {type(error).__name__}: {error}") from error
    if not isinstance(extension, Extension):
        raise ConfigError(
            f"{where}: got a {type(extension).__name__}; provide an "
            "rlpost.config.extensions.Extension"
        )
    return extension


def load(path: str) -> Any:
    """Return the value that ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


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


def verbs(core: Mapping[str, Verb]) -> dict[str, Verb]:
    """Return the verbs that extensions add; ``core``: those that there are.

    Raises ConfigError for a name that is taken.
    """
    return _new("verb", core, lambda one: one.verbs)


def _new(
    what: str, core: Mapping[str, Any], rows_of: Callable[[Extension], Mapping[str, _Row]]
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


def problems(config: Config) -> list[str]:
    """Return the problems that extensions see in the settings."""
    return [line for each in extensions() for path in each.checks for line in load(path)(config)]


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
    for each in extensions():
        if each.foreign_words is not None:
            line: str | None = load(each.foreign_words)(word)
            if line is not None:
                return line
    return None


def rewards() -> dict[str, NamedReward]:
    """Return the rewards that models give, by --rm-type."""
    return {name: row for each in extensions() for name, row in each.rewards.items()}


def check_rewards(settings: RolloutConfig) -> None:
    """Raise ConfigError for wrong settings of a reward that a model gives."""
    for row in rewards().values():
        load(row.check)(settings)


def job_parts() -> list[JobPart]:
    """Return what extensions add to the job of a run."""
    return [load(each.job) for each in extensions() if each.job is not None]


def rehearsal() -> Callable[[Config, str], None]:
    """Return the rehearsal of a run. Raises ConfigError without the extension that has it."""
    for each in extensions():
        if each.rehearsal is not None:
            rehearse: Callable[[Config, str], None] = load(each.rehearsal)
            return rehearse
    raise ConfigError("--rehearse: this installation has no extension for it; leave it out")
