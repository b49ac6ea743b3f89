"""Run the actor's ranks as real processes.

What ranks import is imported once, in a fork server, and each rank is forked from it, so a world
starts in a second or two. ``run_ranks`` starts the ranks of one world, calls a function on each and
returns the results.

With a CUDA build of torch each rank is spawned instead: the imports initialise the driver, and CUDA
does not work in a process that is forked after that.
"""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from rlpost.algorithm.schedule import schedule
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.driver.batches import filled_up
from rlpost.errors import CheckpointError, SyncError
from rlpost.types import TrainBatch, TrainSample
from tests.ports import free_port

DEADLINE_S = float(os.environ.get("RLPOST_RANKS_DEADLINE_S", "120"))
"""Of an answer of a rank. The first of a fresh machine reads libraries of gigabytes and compiles."""
# What ranks would import themselves, in seconds of processor time: torch._dynamo at the first step
# of an optimizer, 0.3; transformers' encoder of images, 3; and where a test's module defines what its
# ranks call, that module, 0.7, of which pytest and the settings are nearly all.
PRELOADED = (
    "rlpost.trainer.actor",
    "torch._dynamo",
    "pytest",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "tests.contract.actor_ranks",
    "tests.contract.layouts",
)


class Process(ForkServerProcess):
    """A process with the environment of its creation; that of the fork server is older."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class ForkServer(ForkServerContext):
    """The context of these processes. All contexts of this kind share one server."""

    Process = Process  # type: ignore[assignment]


_fork_server = ForkServer()
_fork_server.set_forkserver_preload(list(PRELOADED))


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    settings: Config,
    *,
    before: Callable[[], None] | None = None,
    make: Callable[[Config], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(actor, **kwargs)`` on every rank of a world.

    ``before`` is called in each process before the actor is created; ``make`` creates it, by
    default an ``Actor``. Returns the results in rank order. Ranks have one thread if the settings do
    not say how many: those of tests share few cores, and threads spin while they wait.
    """
    if settings.perf.actor_num_threads is None:
        settings = with_values(settings, actor_num_threads=1)
    port = free_port()
    places = [(rank, world_size, "127.0.0.1", port) for rank in range(world_size)]
    return in_processes(
        _rank_main, [(before, make, function, place, settings, kwargs) for place in places]
    )


def in_processes(main: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run ``main(pipe, *each)`` in one process for each entry of ``arguments``.

    Each process sends (True, result) or (False, traceback); the latter fails the test. Returns the
    results in the order of ``arguments``.
    """
    context = start_context()
    pipes, processes = [], []
    for each in arguments:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=main, args=(theirs, *each), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            stop(process)


def stop(process: Any) -> None:
    """Kill a process unless it has ended: the fork server has reaped it, and its id may be reused."""
    if process.is_alive():
        process.kill()
        process.join()


def start_context() -> Any:
    """Return the context that starts processes with torch: the fork server, or spawn with CUDA."""
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return _fork_server if torch.version.cuda is None else multiprocessing.get_context("spawn")


def _receive(pipe: Connection, rank: int) -> Any:
    assert wait([pipe], timeout=DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
    succeeded, value = pipe.recv()
    assert succeeded, f"rank {rank} failed:\n{value}"
    return value


def _rank_main(
    pipe: Connection,
    before: Callable[[], None] | None,
    make: Callable[[Config], Any] | None,
    function: Callable[..., Any],
    place: tuple[int, int, str, int],
    settings: Config,
    kwargs: dict[str, Any],
) -> None:
    from rlpost.trainer.actor import Actor

    try:
        if before is not None:
            before()
        actor = (make or Actor)(settings)
        actor.setup(*place)
        pipe.send((True, function(actor, **kwargs)))
        actor.close()
    except Exception:
        pipe.send((False, traceback.format_exc()))


def micro_batch_multiple(settings: Config) -> int:
    """Return the divisor of the number of micro-batches, as ``Config.micro_batch_multiple``."""
    is_interleaved = settings.perf.num_layers_per_virtual_pipeline_stage is not None
    return settings.perf.pipeline_model_parallel_size if is_interleaved else 1


def my_batch(actor: Any, samples: Sequence[TrainSample], max_tokens: int | None) -> TrainBatch:
    """Return this rank's part of a global batch."""
    from rlpost.trainer import parallel

    num_samples, num_ranks = len(samples), parallel.data_parallel_group().size()
    multiple = micro_batch_multiple(actor.config)
    samples = filled_up(samples, num_ranks * multiple)
    plan = schedule(
        [len(sample.token_ids) for sample in samples],
        data_parallel_size=num_ranks,
        max_tokens=max_tokens,
        micro_batch_size=1,
        multiple_of=multiple,
    )
    return TrainBatch(
        micro_batches=tuple(
            tuple(samples[i] for i in micro) for micro in plan[actor.data_parallel_rank]
        ),
        num_samples=num_samples,
        num_tokens=sum(sum(sample.loss_mask) for sample in samples),
    )


def logits(actor: Any, samples: Sequence[TrainSample]) -> Any:
    """Return the full logits [T, vocabulary] of samples packed into one row.

    A NumPy array on the last pipeline stage, None on all others.
    """
    import torch
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from rlpost.trainer import step
    from rlpost.trainer.packing import pack

    packed = [pack(tuple(samples), actor.row_layout)]
    collect = lambda index, micro_batch, sharded: (  # noqa: E731
        sharded.sum(),
        gather_from_tensor_model_parallel_region(sharded)[0],
    )
    with torch.no_grad():
        found = step.run(
            actor.model,
            packed,
            loss_of=collect,
            forward_only=True,
            stop_points=actor.stop_points,
        )
    return found[0].float().cpu().numpy() if found else None


def look(actor: Any, samples: Sequence[TrainSample], export: str) -> dict[str, Any]:
    """Import and export the weights; compute logits, without training."""
    actor.import_weights()
    actor.export(export)
    return {
        "logits": logits(actor, samples),
        "hash": actor.weights_hash(),
        "hashed": actor.inventory.hugging_face,
    }


def step_and_score(
    actor: Any, samples: Sequence[TrainSample], *, export: str, bucket_bytes: int
) -> dict[str, Any]:
    """Train one step on the samples and export.

    Returns:
        ``logprobs``: one list for each sample, in order. ``buckets``: the tensor names in each.
    """
    from rlpost.trainer.weights.exporter import Exporter

    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=None)
    actor.train_step(batch)
    actor.export(export)
    columns = actor.compute_logprobs(batch)
    found = {
        sample.token_ids: list(column)
        for micro, of_micro in zip(batch.micro_batches, columns, strict=True)
        for sample, column in zip(micro, of_micro, strict=True)
    }
    plan = Exporter(actor.inventory).plan(bucket_bytes)
    return {
        "logprobs": [found[sample.token_ids] for sample in samples],
        "buckets": [[name for entry in bucket for name in entry.hugging_face] for bucket in plan],
    }


def logprobs_in_groups(
    actor: Any, samples: Sequence[TrainSample], groups: Sequence[Sequence[int]]
) -> list[Any]:
    """Return log-probs computed in the micro-batches of training, and in other groups."""
    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=64)
    grouped = dataclasses.replace(batch, log_prob_groups=tuple(map(tuple, groups)))
    return [actor.compute_logprobs(batch), actor.compute_logprobs(grouped)]


@dataclass(frozen=True)
class Files:
    """Folders of a training run.

    ``load``: a checkpoint to load. ``save``: where to save one after the second step. ``export``:
    where to export the final weights.
    """

    load: str | None = None
    save: str | None = None
    export: str | None = None


def train(
    actor: Any,
    steps: Sequence[Sequence[TrainSample]],
    *,
    files: Files = Files(),
    max_tokens: int | None = 64,
    two_passes: bool = False,
) -> dict[str, Any]:
    """Train on the remaining steps.

    With ``two_passes`` each step is trained twice, the second time against the log-probs from
    before the first.
    """
    if files.load is None:
        actor.import_weights()
        first = 0
    else:
        first = actor.load(files.load)
    metrics = []
    for number, samples in enumerate(steps[first:], start=first + 1):
        batch = my_batch(actor, samples, max_tokens)
        old = actor.compute_logprobs(batch)
        metrics.append(dict(actor.train_step(batch, old).metrics))
        if two_passes:
            metrics.append(dict(actor.train_step(batch, old).metrics))
        if number == 2 and files.save is not None:
            actor.save(files.save, number)
    if files.export is not None:
        actor.export(files.export)
    return {"metrics": metrics, "hash": actor.weights_hash()}


def train_and_compare(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, two_passes: bool
) -> dict[str, Any]:
    """Train; also return the tensors by which layouts are compared.

    ``gradients``: full gradients of the first step. ``weights``: full weights after the last step.
    """
    gradients: dict[str, Any] = {}
    prepare_grads = actor.optimizer.prepare_grads

    def take_gradients() -> Any:
        if not gradients:
            gradients.update(whole_tensors(actor, gradients=True))
        return prepare_grads()

    actor.optimizer.prepare_grads = take_gradients
    trained = train(actor, steps, two_passes=two_passes)
    return trained | {"gradients": gradients, "weights": whole_tensors(actor, gradients=False)}


def whole_tensors(actor: Any, *, gradients: bool) -> dict[str, Any]:
    """Return all full tensors, or their gradients, by Hugging Face name; collective.

    NumPy arrays on rank 0; the other ranks return no tensors.
    """
    import torch

    from rlpost.trainer.weights.exporter import Exporter

    inventory = copy.copy(actor.inventory)
    if gradients:
        for chunk in actor.model:
            _share_reduced_gradients(chunk)
        inventory.held = {
            name: dataclasses.replace(held, tensor=held.tensor.main_grad)
            for name, held in inventory.held.items()
            if isinstance(held.tensor, torch.nn.Parameter)
        }
        # the router's expert bias is a buffer and has no gradient
        inventory.entries = [
            entry
            for entry in inventory.entries
            if not entry.rules[0].megatron.endswith("expert_bias")
        ]
    exporter = Exporter(inventory)
    tensors = {
        name: tensor
        for bucket in exporter.plan(2**40)
        for name, tensor in exporter.gather(bucket).items()
    }
    first = torch.distributed.get_rank() == 0
    return (
        {name: tensor.clone().numpy() for name, tensor in tensors.items()} if first else {"": None}
    )


def _share_reduced_gradients(chunk: Any) -> None:
    """All-gather the reduced gradients within each data-parallel group.

    The distributed optimizer leaves each data-parallel rank with only its part of them.
    """
    import torch.distributed as dist

    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        if group.ddp_config.use_distributed_optimizer:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                parts = list(bucket.grad_data.chunk(ranks.size()))
                dist.all_gather(parts, parts[ranks.rank()].clone(), group=ranks)


def look_and_train(
    actor: Any,
    samples: Sequence[TrainSample],
    *,
    folder: str,
    steps: Sequence[Sequence[TrainSample]],
) -> dict[str, Any]:
    """Call ``look``, compute log-probs of the samples, and ``train``, in one world."""
    seen = look(actor, samples, f"{folder}/imported")
    batch = my_batch(actor, samples, max_tokens=None)
    seen |= {"batch": batch, "logprobs": actor.compute_logprobs(batch)}
    return seen | train(
        actor, steps, files=Files(save=f"{folder}/saved", export=f"{folder}/trained")
    )


def count_forwards(actor: Any, samples: Sequence[TrainSample]) -> dict[str, int]:
    """Count the forward calls of norms and attention in a training step of one micro-batch."""
    from rlpost.trainer.attention import PackedAttention
    from rlpost.trainer.norm import RMSNorm

    counts = {"norms": 0, "attentions": 0}

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return forward

    RMSNorm.forward = counted("norms", RMSNorm.forward)  # not restored: this process ends soon
    PackedAttention.forward = counted("attentions", PackedAttention.forward)
    actor.import_weights()
    actor.train_step(my_batch(actor, samples, max_tokens=10_000))
    return counts


def save_beside_training(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folders: Sequence[str]
) -> list[str]:
    """Save three checkpoints, two of them in the background; return the weights' hash at each save.

    After the first step one is saved into the first folder, blocking, and one into the second in
    the background, while everything is offloaded and restored, as on shared GPUs, and the other
    steps are trained. The last state is then saved into the third folder.
    """
    actor.import_weights()
    train = lambda samples: actor.train_step(my_batch(actor, samples, max_tokens=None))  # noqa: E731
    train(steps[0])
    hashes = [actor.weights_hash()] * 2
    actor.save(folders[0], 1)
    actor.save(folders[1], 1, in_background=True)
    assert actor.memory.offload("weights", "grads", "optimizer")
    actor.memory.restore("weights", "grads", "optimizer")
    for samples in steps[1:]:
        train(samples)
    actor.saves.finish()
    actor.save(folders[2], len(steps), in_background=True)
    actor.saves.finish()
    return [*hashes, actor.weights_hash()]


def hash_of_saved(actor: Any, *, folder: str) -> tuple[str, dict[str, Any]]:
    """Return the hash of a checkpoint's weights, and the sums of the optimizer's moments."""
    actor.load(folder)
    inner = [
        one.optimizer for one in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
    ]
    states = [state for one in inner for state in one.state.values()]
    sums = {
        key: [state[key].double().sum().item() for state in states]
        for key in ("exp_avg", "exp_avg_sq")
    }
    return actor.weights_hash(), sums


def train_with_offload(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, offloads: bool
) -> dict[str, Any]:
    """Train; with ``offloads``, offload and restore everything between steps.

    The weights are restored first, alone. Returns a hash of the weights, the loss of each step, and
    the bytes that the first offload freed.
    """
    actor.import_weights()
    losses, freed = [], {}
    for samples in steps:
        losses.append(
            actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics["train/loss"]
        )
        if not offloads:
            continue
        moved = actor.memory.offload("weights", "grads", "optimizer")
        freed = freed or moved
        assert actor.memory.offload("weights") == {}, "already offloaded"
        actor.memory.restore("weights")
        actor.weights_hash()
        actor.memory.restore("weights", "grads", "optimizer")
    return {"hash": actor.weights_hash(), "losses": losses, "freed": freed}


def positions_of_a_step(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Record the positions that the actor reports before each micro-batch of a training step.

    Also returns the position after the step, and the seconds of its passes and of the whole step.
    """
    import time

    from rlpost.observe.progress.position import RECORDER

    found, cross = [], actor.stop_points.cross

    def observed(index: int) -> None:
        found.append(actor.position)
        cross(index)

    actor.import_weights()
    actor.stop_points.cross = observed
    began = time.perf_counter()
    with RECORDER.call("train_step"):
        result = actor.train_step(my_batch(actor, samples, max_tokens=None))
    seconds = time.perf_counter() - began
    return {"positions": found, "after": actor.position, "own_s": result.own_s, "s": seconds}


def plan_sync(actor: Any) -> Any:
    """Return the buckets of a weight update."""
    return actor.buckets.plan


def send_weights(actor: Any, *, connections: Sequence[Sequence[int]], group_name: str) -> None:
    """Send all buckets to one peer, which joins once for each entry of ``connections``.

    Each entry has one port per pipeline stage.
    """
    actor.import_weights()
    for ports in connections:
        stage = actor.broadcast.stage
        actor.broadcast.connect("127.0.0.1", ports[stage], 1, f"{group_name}-{stage}", 90.0)
        for index in range(len(actor.buckets)):
            actor.send_bucket(index)
        actor.broadcast.disconnect()


def connect_without_engines(actor: Any, *, port: int) -> str:
    """Return the actor's error when no engine joins within a second."""
    try:
        actor.broadcast.connect("127.0.0.1", port, 1, "rlpost", 1.0)
    except SyncError as error:
        return str(error)
    return "connected"


def load(actor: Any, *, folder: str) -> str:
    """Load a checkpoint; return "loaded" or the error."""
    try:
        actor.load(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"
