"""The stages of the loop on a real cluster: actors and engines in Ray workers, a router beside the driver.

In: settings, the cluster that the agents brought up, the run's folder. Out: what ``loop.Stages`` promises. Everything
that takes long at the start (imports of every rank, engine start) runs at the same time under one deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bootstrap.handoff import Cluster
from rlpost.actor.settings import ActorSettings
from rlpost.checkpoint.state import RunState
from rlpost.config.tree import Config
from rlpost.data.cursor import PromptCursor
from rlpost.data.prompts import PromptSet
from rlpost.data.tokenizer import PromptTokenizer, eos_token_ids
from rlpost.errors import DataError, RlpostError
from rlpost.orchestration.batches import make_batches
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.orchestration.placement import Placement, Ports, place, service_ports
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.workers import WorkerGroup, connect
from rlpost.reward.registry import reward_function
from rlpost.rollout.engine import Engine, Router
from rlpost.rollout.evaluate import evaluate
from rlpost.rollout.generate import RouterAddress, generate_groups
from rlpost.rollout.recorded import read_groups, write_groups
from rlpost.rollout.sampling import eval_sampling, rollout_sampling
from rlpost.rollout.weight_update import WeightUpdate
from rlpost.types import Prompt, SampleGroup

logger = logging.getLogger(__name__)

SYNC_GROUP = "rlpost"
T = TypeVar("T")


class ClusterStages:
    """Generate, train, sync, evaluate and save on a cluster. ``start`` first, ``close`` last."""

    def __init__(self, config: Config, cluster: Cluster, *, checkpoints: Checkpoints, stop: StopRequest) -> None:
        self._config = config
        self._cluster = cluster
        self._checkpoints = checkpoints
        self._stop = stop
        self._score = reward_function(config.rollout.rm_type)
        folder = config.checkpoint.hf_checkpoint
        self._eos = eos_token_ids(folder)
        self.tokenizer = PromptTokenizer(folder, apply_chat_template=config.rollout.apply_chat_template)
        self._eval_prompts = {name: _all_prompts(self.prompt_set(path)) for name, path in config.eval_sets}

    def prompt_set(self, path: str) -> PromptSet:
        """The prompts of a file, under the keys of the settings."""
        rollout = self._config.rollout
        return PromptSet(path, tokenize=self.tokenizer, input_key=rollout.input_key, label_key=rollout.label_key)

    async def start(self, checkpoint: Path | None) -> None:
        """Bring up actors, engines and router; load ``checkpoint``, or the Hugging Face weights without one."""
        started = time.monotonic()
        config, cluster = self._config, self._cluster
        placement = place(connect(cluster), config)
        ports = service_ports(cluster.port_base, cluster.port_count, config.num_engines)
        logger.info("starting %d actor ranks and %d engines", len(placement.actors), len(placement.engines))
        await self._within_deadline(
            self._start_actors(placement, ports, checkpoint), self._start_engines(placement, ports)
        )
        await self._connect_weights(placement, ports)
        logger.info("actors and engines ready after %.1f s", time.monotonic() - started)

    async def _within_deadline(self, *starting: Awaitable[Any]) -> None:
        deadline_s = self._config.cluster.bringup_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._unless_stopped(asyncio.gather(*starting))
        except TimeoutError:
            logs = self._cluster.attempt_dir
            raise RlpostError(
                f"actors and engines were not ready after {deadline_s} s (--bringup-deadline-s); "
                f"the last lines of {logs}/actor-*.log and {logs}/engine-*.log say who hangs"
            ) from None

    async def _start_actors(self, placement: Placement, ports: Ports, checkpoint: Path | None) -> None:
        settings = actor_settings(self._config)
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # the order of overlapped TP collectives relies on it
        makes = [partial(_make_actor, settings)] * len(placement.actors)
        self._actors = WorkerGroup(makes, placement.actors, name="actor", log_dir=self._log_dir, env=env)
        world, head = len(placement.actors), placement.actors[0].ip
        await self._actors.call_each("setup", [(rank, world, head, ports.actor_group) for rank in range(world)])
        self._data_ranks: list[int] = await self._actors.call("data_parallel_rank")
        if checkpoint is None:
            await self._actors.call("import_weights")
        else:
            await self._actors.call("load", str(checkpoint))

    async def _start_engines(self, placement: Placement, ports: Ports) -> None:
        config, key = self._config, self._cluster.secret
        deadline_s = config.cluster.bringup_deadline_s
        makes = [
            partial(
                Engine,
                model_path=config.checkpoint.hf_checkpoint,
                api_key=key,
                server_args=config.sglang.server_args | {"nccl_port": ports.engine_groups[index]},
                log_path=self._log_dir / f"engine-{index}-server.log",
                num_gpus=slot.num_gpus,
            )
            for index, slot in enumerate(placement.engines)
        ]
        self._engines = WorkerGroup(makes, placement.engines, name="engine", log_dir=self._log_dir, env={})
        places = [(slot.ip, port) for slot, port in zip(placement.engines, ports.engines, strict=True)]
        self._addresses = await self._engines.call_each("start", places, deadline_s=deadline_s)
        urls = tuple(address.url for address in self._addresses)
        self._router = Router(policy=config.sglang.router_policy, api_key=key, log_path=self._log_dir / "router.log")
        url = await asyncio.to_thread(
            self._router.start, self._cluster.nodes[0].ip, ports.router, deadline_s=deadline_s
        )
        await asyncio.to_thread(self._router.add_engines, urls, deadline_s=deadline_s)
        concurrency = config.sglang.sglang_server_concurrency * len(urls)
        self._address = RouterAddress(url=url, api_key=key, engine_urls=urls, concurrency=concurrency)

    async def _connect_weights(self, placement: Placement, ports: Ports) -> None:
        self._weights = WeightUpdate(
            self._addresses,
            api_key=self._cluster.secret,
            group_name=SYNC_GROUP,
            backend=(await self._actors.call("sync_backend"))[0],
            timeout_s=60.0 * self._config.cluster.distributed_timeout_minutes,
        )
        head, ranks = placement.actors[0].ip, self._weights.num_engine_ranks
        await self._within_deadline(
            self._actors.call("connect_engines", head, ports.sync_group, ranks, SYNC_GROUP),
            self._weights.connect(head, ports.sync_group),
        )
        self._buckets = (await self._actors.call("plan_sync"))[0]

    @property
    def _log_dir(self) -> Path:
        return Path(self._cluster.attempt_dir)

    async def generate(self, prompts: Sequence[Prompt], step: int) -> list[SampleGroup]:
        """Answers from the engines, or recorded ones; both are checked to belong to the prompts."""
        debug = self._config.debug
        if debug.load_debug_rollout_data is not None:
            groups = read_groups(debug.load_debug_rollout_data, step)
            wanted, found = sorted(p.prompt_id for p in prompts), sorted(g.prompt_id for g in groups)
            if wanted != found:
                raise DataError(
                    f"{debug.load_debug_rollout_data}: the recording of step {step} answers prompts "
                    f"{found[0]}..{found[-1]}, this run is at {wanted[0]}..{wanted[-1]}"
                )
        else:
            groups = await generate_groups(
                prompts,
                rollout_sampling(self._config.rollout, self._eos),
                n=self._config.rollout.n_samples_per_prompt,
                router=self._address,
                score=self._score,
                stop_requested=self._stop.requested,
            )
        if debug.save_debug_rollout_data is not None:
            write_groups(debug.save_debug_rollout_data, step, groups)
        return groups

    async def train(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """The optimizer steps of a rollout; with several, the old log-probs are computed before the first."""
        steps = make_batches(groups, self._config)
        old: list[list[Any]] = [[None] * len(self._actors) for _ in steps]
        if len(steps) > 1:
            old = [await self._actors.call_each("compute_logprobs", self._per_rank(ranks)) for ranks in steps]
        metrics: Mapping[str, float] = {}
        for ranks, old_logprobs in zip(steps, old, strict=True):
            batches = [(*batch, logprobs) for batch, logprobs in zip(self._per_rank(ranks), old_logprobs, strict=True)]
            metrics = (await self._actors.call_each("train_step", batches))[0].metrics
        return metrics

    def _per_rank(self, batches: Sequence[T]) -> list[tuple[T]]:
        return [(batches[data_rank],) for data_rank in self._data_ranks]

    async def sync(self, policy_version: int) -> None:
        """Broadcast the weights, bucket by bucket; the version is checked on every engine."""
        await self._weights.update(self._buckets, policy_version, self._send)

    async def _send(self, bucket: int) -> None:
        await self._actors.call("send_bucket", bucket)

    async def evaluate(self) -> Mapping[str, float]:
        """Means on every held-out set, as ``eval/SET/name``."""
        settings = self._config.eval
        metrics = {}
        for name, prompts in self._eval_prompts.items():
            found = await evaluate(
                prompts,
                eval_sampling(settings, self._config.rollout, self._eos),
                n=settings.n_samples_per_eval_prompt,
                router=self._address,
                score=self._score,
                stop_requested=self._stop.requested,
            )
            metrics |= {f"eval/{name}/{key}": value for key, value in found.items()}
        return metrics

    async def save(self, state: RunState) -> None:
        """Commit the actors' tensors and ``state``."""
        await self._checkpoints.commit(state, lambda folder: self._actors.call("save", str(folder), state.step))

    async def weights_hash(self) -> str:
        """A hash of the trainer's weights under their Hugging Face names."""
        return (await self._actors.call("weights_hash"))[0]

    def close(self) -> None:
        """End the router; Ray's workers, and the engines under them, end with the driver."""
        if hasattr(self, "_router"):
            self._router.stop()

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> None:
        """Wait for ``work``; a stop request ends the wait: nothing is trained yet that could be lost."""
        try:
            while not work.done():
                self._stop.check()
                await asyncio.wait([work], timeout=0.5)
            work.result()
        finally:
            work.cancel()


def _make_actor(settings: ActorSettings) -> Any:
    from rlpost.actor.actor import Actor  # in the worker: torch and Megatron are not for the driver

    return Actor(settings)


def _all_prompts(prompts: PromptSet) -> list[Prompt]:
    return [prompts.prompt(position, position) for position in range(len(prompts))]


def actor_settings(config: Config) -> ActorSettings:
    """The leaves that an actor needs."""
    optimizer, grpo, perf = config.optimizer, config.grpo, config.perf
    return ActorSettings(
        hf_checkpoint=config.checkpoint.hf_checkpoint,
        tensor_model_parallel_size=perf.tensor_model_parallel_size,
        sequence_parallel=perf.sequence_parallel,
        pipeline_model_parallel_size=perf.pipeline_model_parallel_size,
        num_layers_per_virtual_pipeline_stage=perf.num_layers_per_virtual_pipeline_stage,
        decoder_first_pipeline_num_layers=perf.decoder_first_pipeline_num_layers,
        decoder_last_pipeline_num_layers=perf.decoder_last_pipeline_num_layers,
        context_parallel_size=perf.context_parallel_size,
        expert_model_parallel_size=perf.expert_model_parallel_size,
        expert_tensor_parallel_size=perf.expert_tensor_parallel_size,
        recompute_granularity=perf.recompute_granularity,
        recompute_method=perf.recompute_method,
        recompute_num_layers=perf.recompute_num_layers,
        use_distributed_optimizer=perf.use_distributed_optimizer,
        overlap_grad_reduce=perf.overlap_grad_reduce,
        overlap_param_gather=perf.overlap_param_gather,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        seed=optimizer.seed,
        temperature=config.rollout.rollout_temperature,
        advantage_estimator=grpo.advantage_estimator,
        eps_clip=grpo.eps_clip,
        eps_clip_high=grpo.eps_clip if grpo.eps_clip_high is None else grpo.eps_clip_high,
        eps_clip_c=grpo.eps_clip_c,
        use_kl_loss=grpo.use_kl_loss,
        kl_loss_coef=grpo.kl_loss_coef,
        kl_loss_type=grpo.kl_loss_type,
        calculate_per_token_loss=grpo.calculate_per_token_loss,
        distributed_timeout_minutes=config.cluster.distributed_timeout_minutes,
        update_weight_buffer_size=perf.update_weight_buffer_size,
    )


def initial_cursor(stages: ClusterStages, config: Config, state: RunState) -> PromptCursor:
    """The prompt cursor of a state: where it stood, or the first prompt."""
    rollout = config.rollout
    prompts = stages.prompt_set(rollout.prompt_data)
    if not state.cursor:
        return PromptCursor(prompts, shuffle=rollout.rollout_shuffle, seed=rollout.rollout_seed)
    return PromptCursor.from_state(prompts, state.cursor, shuffle=rollout.rollout_shuffle, seed=rollout.rollout_seed)
