"""What an extension adds to the core: the fields of a row of the registry.

A row is data: functions and classes are named as ``module:name`` and imported at their first use.
Rows take these names from ``rlpost.config.extensions``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from common.run_folder import RunFolder

if TYPE_CHECKING:
    from rlpost.config.plan.shape import Shape
    from rlpost.config.tree import Config


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


@dataclass(frozen=True, slots=True)
class TextReward:
    """A reward that is a function of an answer's text, chosen by --rm-type.

    ``score`` is ``(str, str | None, Mapping[str, object]) -> float`` for the answer, and the label and
    the metadata of its prompt; ``in_box`` the same for the content of a box (--rm-type boxed_NAME),
    None: ``score``. ``isolated``: it may not terminate on adversarial text, or needs large libraries,
    and is loaded and called only in a process with a time limit. ``label_keys``: keys of the metadata
    that may take the label's place; None if no text is compared with the label. ``parts``: functions
    that it consists of, for other extensions, by name.
    """

    score: str
    in_box: str | None = None
    isolated: bool = False
    label_keys: tuple[str, ...] | None = ()
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Estimated bytes on the GPU of the fullest rank of a pipeline stage while it trains.

    ``parts`` are weights, gradients, optimizer, critic (if there is one), and "activations,
    logits"; ``context`` is what CUDA and NCCL take.
    """

    parts: Mapping[str, int]
    context: int

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.context


RankMemory = Callable[["Config", "Shape", int, bool], list[RankEstimate]]


@dataclass(frozen=True, slots=True)
class Mirror:
    """What the lines of ``metrics.jsonl`` are written to as well.

    ``open`` is ``(Config, Path, Cluster) -> AbstractContextManager[Write | None]``
    (``rlpost.observe.mirrors``) for the run folder, in the driver; None where the settings switch
    the mirror off. ``check`` is ``(Config, RunFolder) -> None`` before a run is submitted. Both raise
    ConfigError.
    """

    open: str
    check: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A row of the registry. All fields but ``name`` are optional.

    Attributes:
        tables: tables of a recipe, subclasses of ``Group``, by name.
        checks: ``(Config) -> list[str]``, a line for each problem; on the login node, without
            torch.
        model_checks: ``(Config, HfConfig) -> list[str]``, the same with the content of config.json
            of --hf-checkpoint.
        on_node: ``(Config) -> None`` in the driver before large imports; raises ConfigError.
        notes: ``(Config, HfConfig) -> list[str]``, a line for each valid setting that is probably
            unintended; on the login node, without torch, after the checks.
        arithmetic: ``(Config, HfConfig) -> list[tuple[str, str]]``, lines of ``rlpost check`` about
            the model, name and text; for one whose shape is known (``rlpost.config.plan.hf_shape``).
        rank_memory: ``(Config, Shape, int, bool) -> list[RankEstimate]``, one for each pipeline stage,
            for the bytes of a GPU, with or without the layers of TransformerEngine.
        rehearsal: ``(Config, str) -> None``, the size of a GPU's memory; raises ConfigError with
            the first fault.
        public_names: what ``from rlpost import NAME`` gives, by name.
        moved: modules and names of earlier versions of rlpost -> where the extension has them.
        verbs: verbs of the command line by name.
        adapters: ``() -> None``; registers functions with a foreign interface
            (``rlpost.algorithm.plugin.register``).
        foreign_names: foreign top-level package -> ``(module, name) -> str | None``, why a plug-in
            cannot import the name, on the login node.
        foreign_words: ``(str) -> str | None``: an error for a word that another program's command line
            has, with the flag here; None for a word that it does not know.
        idle_flags: ``(str) -> str | None``: why a flag of another program, without dashes, has no
            effect here, so that it is accepted; None for others.
        answers: ``(Config, AnswerParts) -> AnswerSource | None`` (``rlpost.rollout.answer_source``).
        examples: subclass of ``rlpost.tasks.examples.ExampleTokenizer``, for --loss-type sft_loss.
        rewards: rewards by a model, by --rm-type.
        text_rewards: rewards that are functions of a text, by --rm-type.
        job: a ``JobPart``.
        joining_engines: ``(Config, JoinParts) -> JoiningEngines``, the engines of a group that are in
            other jobs (``rlpost.driver.engines.joining``).
        engine_agent: ``(Sequence[str]) -> int``: serve one of these engines, in its job; the words
            and the exit codes are those of ``rlpost.engines.engine_job``.
        trainer_without_gpus: ``() -> None``, called before Megatron-core is imported in a process that
            trains: makes it usable on a machine without a GPU, and does nothing on one with.
        engine_without_gpus: ``(Mapping[str, Any], int | None) -> dict[str, object]``: prepares the
            process of an engine without a GPU before SGLang's import, for the caller's fields of
            ServerArgs and the slots of the node (None: all cores are its own); returns the fields.
        follow: a ``Follow``.
        mirrors: mirrors of metrics by the setting that switches each on.
        follow_engines: a ``FollowEngines``.
        report: ``(RunFolder) -> Any``, writes a report below ``RunFolder.report``; called after each
            checkpoint and at the end of a run. Its exceptions are logged.
    """

    name: str
    # settings and their checks
    tables: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    model_checks: tuple[str, ...] = ()
    on_node: tuple[str, ...] = ()
    # what rlpost check and a rehearsal say besides
    notes: str | None = None
    arithmetic: str | None = None
    rank_memory: str | None = None
    rehearsal: str | None = None
    # names: of Python, of verbs, of other programs
    public_names: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    verbs: Mapping[str, Verb] = field(default_factory=dict)
    adapters: str | None = None
    foreign_names: Mapping[str, str] = field(default_factory=dict)
    foreign_words: str | None = None
    idle_flags: str | None = None
    # the answers of a run and their rewards
    answers: str | None = None
    examples: str | None = None
    rewards: Mapping[str, NamedReward] = field(default_factory=dict)
    text_rewards: Mapping[str, TextReward] = field(default_factory=dict)
    # processes: other jobs, engines in them, machines without GPUs
    job: str | None = None
    joining_engines: str | None = None
    engine_agent: str | None = None
    trainer_without_gpus: str | None = None
    engine_without_gpus: str | None = None
    # what shows a run
    follow: str | None = None
    mirrors: Mapping[str, Mirror] = field(default_factory=dict)
    follow_engines: str | None = None
    report: str | None = None


class Follow(Protocol):
    """Follows a submitted run."""

    def __call__(
        self,
        run: RunFolder,
        job_id: str,
        *,
        started_it: bool = ...,
        resume: str = ...,
        earlier: str = ...,
        explains: bool = ...,
    ) -> int:
        """Print the log until the job is over, then its outcome; return the exit code.

        Args:
            started_it: this process has started the job on this machine, so Ctrl-C stops it.
            resume: the command that resumes the run.
            earlier: the newest attempt before the submission, which is not printed.
            explains: until the first step, say what the run waits for.
        """


class FollowEngines(Protocol):
    """Follows the engines of an attempt, in the driver."""

    async def __call__(
        self,
        config: Config,
        groups: Mapping[str, Any],
        run_folder: Path,
        check: Callable[[], None],
        /,
    ) -> Callable[[], Awaitable[None]] | None:
        """Begin, and return what ends it; None if there is nothing to follow.

        Args:
            groups: ``OwnEngines`` of the driver by the name of their group.
            check: raises Fenced when another attempt owns the run.
        """


class JobPart:
    """What an extension adds to the job of a run. A subclass has the methods that it needs."""

    def agent_args(self, config: Config) -> list[str]:
        """Return further arguments of the agents."""
        return []

    def problems(self, config: Config, why: str) -> list[str]:
        """Return what a run on this machine cannot have; ``why`` says why it is on this one."""
        return []

    def check(self, config: Config, run: RunFolder) -> None:
        """Raise ConfigError or SpecError for a value that Slurm cannot take.

        The folder of ``run`` exists if the run is resumed.
        """

    def planned(self, config: Config, run: RunFolder) -> list[str]:
        """Return a line for each submission that ``submit_optional`` would make."""
        return []

    def submit(self, config: Config, run: RunFolder, job_id: str) -> str | None:
        """Submit jobs that a submitted run needs; return a line about them. Raises SlurmError."""
        return None

    def submit_optional(self, config: Config, run: RunFolder, job_id: str) -> None:
        """Submit jobs that a submitted run may lack; print a line about each, also if it fails."""

    def cancel(self, run: RunFolder) -> None:
        """Prepare the cancellation of engine jobs, whose arrays the ledger names. Raises OSError."""
