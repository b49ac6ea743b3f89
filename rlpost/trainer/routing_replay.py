"""Routing replay: Megatron's routers send tokens to experts that were chosen before.

Input: micro-batches whose rows have routes (``rlpost.trainer.routes``). Output: forward passes that
use them, a record of the experts that were used, and counts for the metrics.

Routes determine the experts of a token. The weight of each expert is computed from the trainer's
scores, so the router is trained as without replay. The trainer routes tokens with unknown routes.

Megatron obtains the experts from ``router.router_replay`` (``topk_routing_with_score_function`` in
``moe_utils.py`` of 0.16.1); this module sets it to one object per layer. Megatron's own class is
not used: it keeps a single list of all routers of the process, and one micro-batch for all of them.

Invariant: a layer that the backward pass recomputes uses the experts of its first computation, even
if other micro-batches were computed in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from rlpost.config.tree import Config
from rlpost.trainer import device, parallel
from rlpost.trainer.packing import PackedMicroBatch, RowLayout
from rlpost.trainer.routes import (
    UNKNOWN,
    RecordedRoutes,
    RouteShape,
    packed_routes,
    token_rows,
)
from rlpost.trainer.weights.inventory import all_gather
from rlpost.types import MicroBatch

if TYPE_CHECKING:
    import numpy as np

Choice = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class ReplayPass:
    """A pass over the micro-batches of a rank."""

    is_training: bool
    records: bool
    index: int | None = None  # of the micro-batch in its forward pass; None during backward
    micro_batch: PackedMicroBatch | None = None
    # by micro-batch, as ``routes``; on the host once all layers are recorded
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)
    num_recorded: Counter[int] = field(default_factory=Counter)  # layers, by micro-batch


class LayerRouting:
    """The routing of one layer; Megatron calls it as ``router.router_replay``."""

    def __init__(self, replay: RoutingReplay, slot: int) -> None:
        self._replay = replay
        self._slot = slot  # among the MoE layers of this rank
        # Experts of forward passes that backward repeats. Megatron's schedules run the backward
        # passes of a chunk in the order of its forward passes, so the first is the next.
        self.to_repeat: deque[torch.Tensor] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choice | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [rows, experts] -> scores and numbers of the experts of each row, [rows, k]."""
        assert default_compute_topk is not None
        current = self._replay.current
        if current is None:  # outside the passes of the actor
            return default_compute_topk(scores, topk, num_groups, group_topk)
        if current.micro_batch is None:
            experts = self._next_to_repeat(len(scores))
        else:
            with torch.no_grad():
                _, computed = default_compute_topk(scores, topk, num_groups, group_topk)
                experts = self._chosen(computed, current)
            is_checkpointed = current.is_training and not torch.is_grad_enabled()
            if is_checkpointed:
                self.to_repeat.append(experts.to(torch.int16))
        return scores.gather(1, experts), experts

    def _next_to_repeat(self, num_rows: int) -> torch.Tensor:
        if not self.to_repeat or len(self.to_repeat[0]) != num_rows:
            raise RuntimeError("backward repeats a layer in another order than forward computed it")
        return self.to_repeat.popleft().long()

    def _chosen(self, computed: torch.Tensor, current: ReplayPass) -> torch.Tensor:
        """The given experts where they are known, else those ``computed``; recorded and counted."""
        assert current.micro_batch is not None and current.index is not None
        routes = current.micro_batch.routes
        if routes is None:
            experts = computed
        else:
            replayed_experts = routes[:, self._slot].long()
            in_order = replayed_experts.sort(1).values
            # A route with a repeated expert is treated as unknown: the probabilities would not add
            # up.
            is_repeated = (in_order[:, 1:] == in_order[:, :-1]).any(1)
            is_known = (replayed_experts != UNKNOWN).all(1) & ~is_repeated
            experts = torch.where(is_known[:, None], replayed_experts, computed)
            if current.is_training:
                differs = (in_order != computed.sort(1).values).any(1) & is_known
                self._replay.counts[self._slot, :2] += torch.stack([is_known.sum(), differs.sum()])
        if current.records:
            self._replay.record(current, self._slot, experts)
        return experts

    def count_load(
        self, module: torch.nn.Module, arguments: object, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Forward hook of the router; its second output is the routing map, [rows, experts]."""
        current = self._replay.current
        if current is None or not current.is_training or current.micro_batch is None:
            return
        assert current.micro_batch.is_token is not None
        goes_to = output[1] & current.micro_batch.is_token[:, None]
        self._replay.counts[self._slot, COUNTS:] += goes_to.sum(0)


class RoutingReplay:
    """The routers of this rank's decoder layers; empty for a dense model.

    The router of the layer for multi-token prediction is excluded: engines report no routes for it,
    and its inputs are other tokens.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: Config,
        layout: RowLayout,
        fields: Mapping[str, Any],
    ) -> None:
        """Take over the routers of ``chunks``, this rank's models without wrappers.

        ``fields`` are the family's fields of Megatron's TransformerConfig.
        """
        self.current: ReplayPass | None = None
        self._layout = layout
        self._replays = config.grpo.use_rollout_routing_replay or config.grpo.use_routing_replay
        self._uses_engines = config.grpo.use_rollout_routing_replay
        self._recorded = RecordedRoutes() if config.grpo.use_routing_replay else None
        is_sparse = fields.get("moe_layer_freq", [])
        self.layer_numbers = [number for number, sparse in enumerate(is_sparse) if sparse]
        routers = [
            layer.mlp.router
            for chunk in chunks
            for layer in chunk.decoder.layers
            if isinstance(layer.mlp, MoELayer)
        ]
        group = parallel.tensor_parallel_group()
        splits_rows = config.perf.sequence_parallel and group.size() > 1
        self._shape = RouteShape(
            num_layers=len(self.layer_numbers),
            num_experts=fields.get("num_moe_experts", 0),
            topk=fields.get("moe_router_topk", 0),
            layers=tuple(self.layer_numbers.index(router.layer_number - 1) for router in routers),
            tensor_rank=group.rank() if splits_rows else 0,
            tensor_size=group.size() if splits_rows else 1,
        )
        self.counts = self._no_counts()
        self._layers = [LayerRouting(self, slot) for slot in range(len(routers))]
        for router, layer in zip(routers, self._layers, strict=True):
            router.register_forward_hook(layer.count_load)
            if self._replays:
                router.router_replay = layer

    def attached(self, packed: PackedMicroBatch, micro_batch: MicroBatch) -> PackedMicroBatch:
        """Return a packed micro-batch with the fields that the routers need.

        Raises:
            DataError: the routes of a sample are those of another model.
        """
        if not self._layers:
            return packed
        if not self._replays:
            return replace(packed, is_token=token_rows(micro_batch, self._layout, self._shape))
        samples = micro_batch
        if not self._uses_engines:
            samples = tuple(replace(sample, routes=None) for sample in micro_batch)
        routes, is_token = packed_routes(samples, self._layout, self._shape, self._recorded)
        return replace(packed, routes=routes, is_token=is_token)

    @contextmanager
    def passing(
        self, *, is_training: bool, micro_batches: Sequence[MicroBatch] = ()
    ) -> Iterator[None]:
        """Context of a pass, in which forward passes use the routes of their micro-batches.

        ``is_training``: there is a backward pass. ``micro_batches``, if given, are those whose
        experts are recorded, in the order of the pass.
        """
        self.current = ReplayPass(
            is_training, records=bool(micro_batches) and self._recorded is not None
        )
        for layer in self._layers:
            layer.to_repeat.clear()
        if is_training:
            self.counts = self._no_counts()
            if self._recorded is not None:
                self._recorded.mark_used()
        try:
            yield
            if any(layer.to_repeat for layer in self._layers):
                raise RuntimeError("backward did not repeat a layer that forward computed for it")
            self._keep(micro_batches, self.current.recorded)
        finally:
            self.current = None

    @contextmanager
    def forward(self, index: int, micro_batch: PackedMicroBatch) -> Iterator[None]:
        """Context in which one chunk of the model computes a micro-batch of the pass."""
        assert self.current is not None
        self.current.index, self.current.micro_batch = index, micro_batch
        try:
            yield
        finally:
            self.current.index = self.current.micro_batch = None

    def record(self, current: ReplayPass, slot: int, experts: torch.Tensor) -> None:
        """Record the experts [rows, k] of a layer for the current micro-batch."""
        assert current.index is not None
        shape = (len(experts), len(self._layers), self._shape.topk)
        if current.index not in current.recorded:
            current.recorded[current.index] = torch.empty(
                shape, dtype=torch.int16, device=experts.device
            )
        current.recorded[current.index][:, slot] = experts.to(torch.int16)
        current.num_recorded[current.index] += 1
        if current.num_recorded[current.index] == len(self._layers):
            current.recorded[current.index] = device.on_host(current.recorded[current.index])

    def metrics(self) -> dict[str, float]:
        """Metrics of the last training pass, equal on every rank; empty if dense. Collective."""
        if not self.layer_numbers:
            return {}
        whole = torch.zeros(
            len(self.layer_numbers),
            self.counts.size(1),
            dtype=torch.float64,
            device=device.current(),
        )
        whole[list(self._shape.layers)] = self.counts.double()
        dist.all_reduce(whole)
        return routing_metrics(
            whole.cpu().numpy(),
            self.layer_numbers,
            topk=self._shape.topk,
            with_replay=self._replays,
        )

    def _keep(self, micro_batches: Sequence[MicroBatch], recorded: dict[int, torch.Tensor]) -> None:
        if self._recorded is None or not recorded:
            return
        for index, micro_batch in enumerate(micro_batches):
            part = device.on_device(recorded[index])
            whole = _of_all_rows(part, self._shape.tensor_size)
            self._recorded.add(micro_batch, whole.cpu(), self._layout)

    def _no_counts(self) -> torch.Tensor:
        """For each layer: known and differing tokens, then the tokens of each expert."""
        shape = (len(self._shape.layers), COUNTS + self._shape.num_experts)
        return torch.zeros(shape, dtype=torch.int64, device=device.current())


def _of_all_rows(part: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Gather the rows of all tensor-parallel ranks' routers."""
    if num_parts == 1:
        return part
    # As bytes: neither gloo nor NCCL sends 16-bit integers.
    mine = part.contiguous().view(torch.uint8)
    return torch.cat(all_gather(mine, parallel.tensor_parallel_group())).view(torch.int16)


COUNTS = 2
"""Columns before those of the experts: tokens with known routes, and those that differ."""


def routing_metrics(
    counts: np.ndarray, layer_numbers: Sequence[int], *, topk: int, with_replay: bool
) -> dict[str, float]:
    """Compute shares and loads.

    Args:
        counts: [MoE layers, 2 + experts] float64 array, over all ranks.
        layer_numbers: number of each in the model, from 0.
        topk: experts of a token.
        with_replay: whether routes are replayed; otherwise only the load is reported.
    """
    known, differing, load = counts[:, 0], counts[:, 1], counts[:, COUNTS:]
    imbalance = load.max(1) / load.mean(1)
    metrics = {
        "train/expert_load_max": float(imbalance.max()),
        "train/expert_load_mean": float(imbalance.mean()),
    }
    if not with_replay:
        return metrics
    num_tokens = load.sum() / topk  # over all layers
    metrics["train/routing_replayed_frac"] = float(known.sum() / num_tokens)
    metrics["train/routing_diff_frac"] = _share(differing.sum(), known.sum())
    for number, layer_differing, layer_known in zip(layer_numbers, differing, known, strict=True):
        metrics[f"train/routing_diff_frac@{number}"] = _share(layer_differing, layer_known)
    return metrics


def _share(part: float, whole: float) -> float:
    """Return part / whole; 0 if ``whole`` is 0."""
    return float(part / whole) if whole else 0.0
