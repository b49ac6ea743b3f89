"""The rollout side of a run: prompts, generation, grading, batches, evaluation.

Input: settings, the engines, the state to resume from. Output: a source of batches for the
loop, and metrics on held-out prompts. With --load-debug-rollout-data batches come from files, and
engines serve the evaluation alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from common.bounded import together
from rlpost.algorithm.plugin import foreign_adapters
from rlpost.config.engine_groups import teacher_group
from rlpost.config.eval_sets import ROLLOUT_KEYS, EvalSet, eval_sets, set_settings
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.driver.loop import Rollouts
from rlpost.driver.preemption import StopRequest
from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.journal import Journal
from rlpost.durable.recorded import write_groups
from rlpost.durable.run_files import RunFile
from rlpost.durable.state import RunState
from rlpost.engines.connection import Connection, Halted, RunEngines
from rlpost.engines.group_client import EngineClients
from rlpost.engines.image_requests import ImageRequests
from rlpost.engines.routes import RouteFormat
from rlpost.errors import Preempted
from rlpost.images.store import ImageStore
from rlpost.images.tokens import ImageMarks, ImageTokens
from rlpost.models.config_file import read_config
from rlpost.observe.samples import FIXED_PROMPTS
from rlpost.rollout.answer_source import AnswerParts, answer_source
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector, Replay, Supervised, Watched, unwatched
from rlpost.rollout.evaluate import evaluate
from rlpost.rollout.filters import buffer_filter, generate_function, group_filter
from rlpost.rollout.generate import COUNTED, GroupWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.rollout.response_builder import GenerateFunction, write_answer
from rlpost.rollout.sampling import eval_sampling, rollout_sampling
from rlpost.rollout.teacher import TeacherServer
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.examples import ExampleTokenizer, tokenizer_class
from rlpost.tasks.prompt_images import digest_of, image_frame
from rlpost.tasks.prompt_settings import image_processor, prompt_set
from rlpost.tasks.prompts import PromptSet
from rlpost.tasks.reward.given import GivenRewards
from rlpost.tasks.reward.grader import Grader, Rewards, make_grader
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.tasks.vocabulary import vocabulary_size
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample

T = TypeVar("T")


class MakeConnection(Protocol):
    """Makes a session of requests to engines."""

    def __call__(
        self,
        engines: RunEngines,
        *,
        routes: RouteFormat | None = None,
        images: ImageRequests | None = None,
    ) -> Connection:
        """See ``Connection``."""


MAX_UNRECORDED = 8
AHEAD = 2  # times the prompts of a step: filters drop some, and some groups begin early
OWN_ANSWERS = {"rm_type", "custom_rm_path", "custom_generate_function_path"}
"""Keys of an evaluation set whose presence means that its answers are not episodes."""


@dataclass(frozen=True)
class Evaluation:
    """A set of held-out prompts, with the settings to generate and grade answers."""

    name: str
    prompts: Sequence[Prompt]
    writer: Callable[[Connection], GroupWriter]
    show: Callable[[str, Sequence[SampleGroup]], None]

    async def run(
        self, connection: Connection, stop_requested: Callable[[], bool]
    ) -> dict[str, float]:
        """Evaluate the set; return its metrics as ``eval/NAME/...``. Raises Preempted."""
        found = await evaluate(
            self.writer(connection), self.prompts, stop_requested, partial(self.show, self.name)
        )
        return {f"eval/{self.name}/{key}": value for key, value in found.items()}


class Generation:
    """Prompts, graders and batches of a run.

    Create it before starting workers, so that invalid settings fail early; call ``connect`` once
    the engines answer.
    """

    def __init__(
        self,
        config: Config,
        stop: StopRequest,
        *,
        check: Callable[[], None] = lambda: None,
        episodes: Path | None = None,
        run_folder: Path = Path(),
        connection: MakeConnection | None = None,
        grader: Grader | None = None,
    ) -> None:
        """
        Args:
            connection: makes what sends requests to engines; a ``Connection`` by default.
            grader: replaces the reward of the settings.
            check: called before each recording; raises Fenced when another attempt owns the run.
            run_folder: where services of the run register, such as servers of sandboxes.
            episodes: the file for records of episodes; None for none.

        Raises:
            ConfigError, DataError: a function, a prompt file or a tokenizer is unusable.
        """
        self._config, self._stop, self._check = config, stop, check
        self._closing = AsyncExitStack()
        folder, rollout = config.checkpoint.hf_checkpoint, config.rollout
        kind = tokenizer_class(config)
        self.tokenizer = kind(
            folder,
            apply_chat_template=config.applies_chat_template,
            template_kwargs=rollout.apply_chat_template_kwargs,
        )
        self._images = image_requests(config, run_folder, self.tokenizer)
        image_tokens = () if self._images is None else self._images.tokens.all
        self._eos = (*self.tokenizer.end_ids, *image_tokens)
        self.engines = EngineClients.of(config)
        """The clients of the groups of engines; rewards and environments use them by name."""
        self._closing.push_async_callback(self.engines.close)
        self._make_connection = connection or Connection
        grader = grader or make_grader(config, self.engines)
        self._grader = self._close_at_end(StoppableGrader(grader, stop))
        self._teacher = self._teacher_server()
        self._args = foreign_adapters().arguments(settings_of(config))
        self._wanted = group_filter(rollout.dynamic_sampling_filter_path, self._args)
        self._first = buffer_filter(rollout.buffer_filter_path, self._args)
        parts = AnswerParts(run_folder, self.engines, episodes, check)
        self._answers = answer_source(config, parts)
        if self._answers is not None:
            self._closing.push_async_callback(self._answers.close)
            self._function: GenerateFunction | None = self._answers.function()
        else:
            path = rollout.custom_generate_function_path
            self._function = generate_function(path, self._args)
        self._prompts: PromptSet | None = None
        self._answered: dict[int | None, dict[str, list[SampleGroup]]] = {}
        """By step, or None for the evaluation between two steps; then by set."""
        self._evaluating: int | None = None
        self._evaluations = [self._evaluation(one) for one in eval_sets(config.eval)]

    def read_prompts(self) -> None:
        """Read all training prompts; may be called from any thread, as large files take minutes.

        Raises DataError for an unreadable file.
        """
        rollout = self._config.rollout
        self._prompts = self._prompt_set(rollout.prompt_data, rollout, self.tokenizer)

    def _prompt_set(
        self, sources: Sequence[str], rollout: RolloutConfig, tokenizer: PromptTokenizer
    ) -> PromptSet:
        """Return the prompts of files, whose images are kept in the run folder."""
        keep = digest_of if self._images is None else self._images.store.add
        return prompt_set(sources, self._config, rollout, tokenizer, keep=keep)

    def _tokenizer_for(self, rollout: RolloutConfig) -> PromptTokenizer:
        """Return the run's tokenizer, or one with the chat template of an evaluation set."""
        run, applies = self._config.rollout, rollout.apply_chat_template
        kwargs = rollout.apply_chat_template_kwargs
        is_same = (applies, kwargs) == (run.apply_chat_template, run.apply_chat_template_kwargs)
        if is_same and not isinstance(self.tokenizer, ExampleTokenizer):
            return self.tokenizer
        folder = self._config.checkpoint.hf_checkpoint
        return PromptTokenizer(folder, apply_chat_template=applies, template_kwargs=kwargs)

    async def connect(self, engines: RunEngines) -> None:
        """Send requests to these engines from now on.

        Raises:
            ConfigError: the teacher on a server has another tokenizer.
            RolloutError: that server does not answer.
        """
        if self._teacher is not None:
            await self._teacher.check_tokenizer(
                self.tokenizer.encode_whole, special=self.tokenizer.template_tokens
            )
        self._engines = engines
        if places := engines.places.all():
            foreign_adapters().connected(self._args, places[0].url, places[0].api_key)
        connection = self._make_connection(
            engines, routes=route_format(self._config), images=self._images
        )
        self._connection = await self._closing.enter_async_context(connection)
        if self._answers is not None:
            await self._closing.enter_async_context(self._answers)

    def note_version(self, version: int) -> None:
        """Record that engines may have the weights of ``version`` from now on."""
        self._connection.newest_version = max(version, self._connection.newest_version or 0)

    def rollouts(
        self,
        state: RunState,
        journal: Journal,
        versions: PolicyVersions,
        watched: Watched = unwatched,
    ) -> Rollouts:
        """Return the source of batches, resumed from ``state`` and the journal records after it.

        ``versions`` are those of the engines. ``watched`` health-checks them while a batch is
        awaited. Call ``read_prompts`` first. Raises CheckpointError if an image of ``state`` is missing.
        """
        config, rollout, prompts = self._config, self._config.rollout, self._prompts
        assert prompts is not None, "read_prompts comes first"
        buffer = RolloutBuffer(rules(config, versions), state.backlog, step=state.step)
        if self._images is not None:
            load = config.checkpoint.load
            others = [] if load is None else [Path(load), Path(load).parent]
            self._images.store.remove_unfinished()
            self._images.store.complete(state.backlog.images, others)
        cursor = self._cursor(prompts, state)

        def counters() -> dict[str, float]:
            # A replay has no writer; its metrics have the same names.
            writer_counters = dict.fromkeys(COUNTED, 0.0) if writer is None else writer.counters()
            episode_counters = {} if self._answers is None else self._answers.counters()
            engine_counters = self.engines.counters()
            grader_counters = self._grader.counters()
            return {
                **grader_counters,
                **engine_counters,
                **prompts.counters(),
                **writer_counters,
                **episode_counters,
            }

        writer: GroupWriter | None = None
        stop, recording = self._stop.requested, config.debug.load_debug_rollout_data
        if isinstance(self.tokenizer, ExampleTokenizer):
            return Supervised(buffer, cursor, self.tokenizer.group, stop_requested=stop)
        if recording is not None:
            return Replay(buffer, cursor, recording, counters=counters, stop_requested=stop)
        sampling = rollout_sampling(rollout, self._eos)
        writer = GroupWriter(
            self._connection,
            replace(sampling, returns_mask=config.grpo.use_rollout_sampling_mask),
            n=rollout.n_samples_per_prompt,
            grader=foreign_adapters().grader(GivenRewards(self._grader, rollout), self._wanted),
            function=self._function or write_answer,
            codec=self.tokenizer,
            vocab_size=vocabulary_size(config.checkpoint.hf_checkpoint),
            finish=None if self._teacher is None else StoppableTeacher(self._teacher, self._stop),
            journal=journal,
            every_s=rollout.partial_rollout_record_s if config.records_tokens else None,
        )
        template = config.debug.save_debug_rollout_data
        choices = Choices(
            wanted=self._wanted,
            first=self._first,
            mask_older=rollout.mask_offpolicy_in_partial_rollout,
            ahead=rollout.rollout_mode == "one_step_off",
            record=None if template is None else self._recorder(template),
            counters=counters,
            watched=watched,
            read_ahead=None
            if self._images is None
            else partial(cursor.read_ahead, AHEAD * buffer.rules.start_size),
        )
        return Collector(
            buffer, cursor, writer, choices=choices, stop_requested=stop, journal=journal
        )

    def _recorder(self, template: str) -> Callable[[int, Sequence[SampleGroup]], object]:
        """Return a function that writes a step's groups to a file; it never blocks or fails."""
        path = Path(template)
        files = RunFile(
            path, lost="groups are not recorded", check=self._check, max_waiting=MAX_UNRECORDED
        )
        self._closing.push_async_callback(in_daemon, files.close)
        return lambda step, groups: files.soon(partial(write_groups, template, step, list(groups)))

    def _cursor(self, prompts: PromptSet, state: RunState) -> PromptCursor:
        """Return the prompt cursor of a state; at the first prompt for a new run."""
        rollout = self._config.rollout
        return PromptCursor.from_state(
            prompts,
            state.cursor,
            shuffle=rollout.rollout_shuffle,
            seed=rollout.rollout_seed,
            weights=rollout.prompt_data_weights,
        )

    async def evaluate(
        self, *, step: int | None = None, engines: RunEngines | None = None
    ) -> Mapping[str, float]:
        """Evaluate all held-out sets concurrently; return metrics as ``eval/SET/name``.

        One evaluation runs at a time.

        Args:
            step: which the engines' weights belong to; None for the one that was just trained.
            engines: those that answer; None for the policy's.

        Raises Preempted.
        """
        self._evaluating = step
        making = self._make_connection(engines or self._engines, images=self._images)
        async with making as connection:
            by_set = await together(
                [one.run(connection, self._stop.requested) for one in self._evaluations]
            )
        return {key: value for metrics in by_set for key, value in metrics.items()}

    @property
    def answered(self) -> Mapping[str, list[SampleGroup]]:
        """The groups of the newest evaluation by set, until ``take_answered``."""
        return self._answered.get(None, {})

    def take_answered(self, step: int) -> dict[str, list[SampleGroup]]:
        """Return the groups of the first prompts of each set in the evaluation of a step, once.

        ``step``: also the one that was just trained, if its evaluation did not name it.
        """
        taken = self._answered.pop(step, None) or self._answered.pop(None, {})
        return {name: groups[:FIXED_PROMPTS] for name, groups in taken.items()}

    def _keep_answered(self, name: str, groups: Sequence[SampleGroup]) -> None:
        self._answered.setdefault(self._evaluating, {})[name] = list(groups)

    def _evaluation(self, one: EvalSet) -> Evaluation:
        config = self._config
        sampling = {key: value for key in ROLLOUT_KEYS if (value := getattr(one, key)) is not None}
        rollout = set_settings(one, config.eval, config.rollout)
        rollout = evaluation_rollout(config, rollout)
        same_reward = not sampling.keys() & {"rm_type", "custom_rm_path"}
        same_reward = same_reward and config.eval.eval_reward_key is None
        own_config = config.model_copy(update={"rollout": rollout})
        function: GenerateFunction | None = None
        if self._answers is not None and not sampling.keys() & OWN_ANSWERS:
            function = self._answers.function(one.name)
        function = function or generate_function(
            rollout.custom_generate_function_path, self._args, evaluation=True
        )
        grader = (
            self._grader
            if same_reward
            else self._close_at_end(make_grader(own_config, self.engines))
        )
        return Evaluation(
            name=one.name,
            prompts=self._prompt_set([one.path], rollout, self._tokenizer_for(rollout)).all(),
            show=self._keep_answered,
            writer=partial(
                GroupWriter,
                sampling=eval_sampling(one, config.eval, rollout, self._eos),
                n=one.n_samples_per_eval_prompt or config.eval.n_samples_per_eval_prompt,
                grader=GivenRewards(grader, rollout),
                function=function or write_answer,
                codec=self.tokenizer,
                vocab_size=vocabulary_size(config.checkpoint.hf_checkpoint),
            ),
        )

    def _teacher_server(self) -> TeacherServer | None:
        """Return the teacher of --opd-type sglang; None if there is none."""
        name = teacher_group(self._config)
        if name is None or name not in self.engines:
            return None
        return TeacherServer(self.engines[name], top_k=self._config.distillation.opd_top_k)

    async def close(self) -> None:
        """Close graders and connections."""
        await self._closing.aclose()

    def _close_at_end(self, grader: Grader) -> Grader:
        self._closing.push_async_callback(grader.close)
        return grader


def evaluation_rollout(config: Config, rollout: RolloutConfig) -> RolloutConfig:
    """Return the settings with --eval-reward-key as the reward key, if given."""
    key = config.eval.eval_reward_key
    if key is None:
        return rollout
    return rollout.model_copy(update={"reward_key": key, "reward_weights": {}})


def image_requests(
    config: Config, run_folder: Path, tokenizer: PromptTokenizer
) -> ImageRequests | None:
    """Return how the images of a run reach its engines; None without --multimodal-keys.

    Engines outside of the run may not have its folder. Raises ConfigError as ``image_processor``.
    """
    processor = image_processor(config)
    if processor is None:
        return None
    tokens = ImageTokens.of(config.checkpoint.hf_checkpoint)
    return ImageRequests(
        ImageStore(run_folder),
        processor,
        tokens,
        ImageMarks.of(tokens, tokenizer.decode_with_special),
        is_inline=bool(config.sglang.rollout_external_engine_addrs),
        frame=image_frame(tokenizer, tokenizer.encode, tokens),
    )


def route_format(config: Config) -> RouteFormat | None:
    """Return the format of the engines' routes; None without --use-rollout-routing-replay."""
    if not config.grpo.use_rollout_routing_replay:
        return None
    shape = hf_shape(read_config(config.checkpoint.hf_checkpoint))
    layers = tuple(number for number, is_sparse in enumerate(shape.sparse) if is_sparse)
    return RouteFormat(
        layers, num_layers=len(shape.sparse), num_experts=shape.num_experts, topk=shape.topk
    )


def rules(config: Config, versions: PolicyVersions) -> Rules:
    """Return the batch sizes and staleness limits of the rollout buffer."""
    rollout = config.rollout
    return Rules(
        batch_size=rollout.rollout_batch_size,
        start_size=max(rollout.rollout_batch_size, rollout.over_sampling_batch_size or 0),
        num_steps=rollout.num_rollout,
        max_staleness=(rollout.max_staleness or 1)
        if rollout.rollout_mode == "fully_async"
        else None,
        keep_partial=rollout.partial_rollout,
        versions=versions,
    )


class StoppableGrader:
    """A grader that a stop request interrupts.

    A remote reward model may take minutes, more than a preempted run has left: ungraded answers are
    kept and graded after the resume.
    """

    def __init__(self, grader: Grader, stop: StopRequest) -> None:
        self._grader, self._stop = grader, stop

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> Rewards:
        """See ``Grader``. Raises Halted when a stop is requested first."""
        return await _unless_stopped(self._stop, self._grader.grade(prompt, samples))

    def grades_singly(self, prompt: Prompt) -> bool:
        return self._grader.grades_singly(prompt)

    def counters(self) -> Mapping[str, float]:
        return self._grader.counters()

    async def close(self) -> None:
        await self._grader.close()


class StoppableTeacher:
    """A teacher on a server; scoring raises Halted on a stop request."""

    def __init__(self, teacher: TeacherServer, stop: StopRequest) -> None:
        self._teacher, self._stop = teacher, stop

    async def __call__(self, graded: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        """See ``TeacherServer.scored``. Raises Halted when a stop is requested first."""
        return await _unless_stopped(self._stop, self._teacher.scored(graded))


async def _unless_stopped(stop: StopRequest, work: Awaitable[T]) -> T:
    try:
        return await stop.unless_requested(work)
    except Preempted:
        raise Halted from None
