"""Give ranks whole tensors, which they hash or write: each rank receives the slices that it lacks.

Input: the inventory of this rank, and the rank of each tensor. Output: the whole Hugging Face
tensors of this rank, bucket by bucket. The messages go from rank to rank by a plan
(``rlpost.config.plan.whole_tensors``), over a process group that exists for the exchange: the
buffers of its connections are freed at the end. A failure of one rank is raised on all: those that
exchange with it stop before their next bucket, the others after their last one.
"""

from __future__ import annotations

import hashlib
import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.config.plan.shard_roles import RankPlan, rank_plans
from rlpost.config.plan.weight_update import SMALLEST
from rlpost.config.plan.whole_tensors import Item, assign, largest_holders, whole_plan
from rlpost.errors import RlpostError, WeightError
from rlpost.models.regions import Box, BoxGroup, grouped
from rlpost.trainer.outcomes import gather_objects, on_every_rank, raise_on_every_rank
from rlpost.trainer.progress import EXCHANGE_GROUP
from rlpost.trainer.weights.box_exchange import BoxExchange
from rlpost.trainer.weights.inventory import Inventory
from rlpost.trainer.weights.layouts import as_bytes
from rlpost.trainer.weights.shard_sources import ShardSources

BUCKET_BYTES = SMALLEST
"""Bytes that a rank sends, and that it receives, at a time."""
Tensors = dict[str, torch.Tensor]
Use = Callable[[Tensors], None]
"""Takes the tensors of a bucket, on the device. They stay valid while they are held."""
Failed = Callable[[str], RlpostError]
"""Makes an exception from a message."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank holds of the weights: its boxes, and the tensors that it helps to gather."""

    stage: int
    host: str
    boxes: tuple[BoxGroup, ...]
    gathered: frozenset[str]


class WholeTensors:
    """The weights of all ranks, to be exchanged as whole tensors. All methods are collective."""

    def __init__(self, inventory: Inventory) -> None:
        """Exchange what each rank of the world holds.

        Raises:
            WeightError: a rank cannot describe its weights; on every rank.
        """
        describe = partial(ShardSources, inventory, None, gathers=True)
        self._sources = on_every_rank(describe, WeightError)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.stage = inventory.groups.pipeline.rank()
        boxes = tuple(grouped(self._sources.regions))
        gathered = self._sources.gathered
        own = Holding(self.stage, socket.gethostname(), boxes, gathered)
        self.holdings = gather_objects(own)

    def team(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage: the first of each host, the second of each host, and so on."""
        ranks = [rank for rank, one in enumerate(self.holdings) if one.stage == stage]
        return alternating_hosts([self.holdings[rank].host for rank in ranks], ranks)

    def all_ranks(self) -> tuple[int, ...]:
        """All ranks, in the order of ``team``."""
        hosts = [one.host for one in self.holdings]
        return alternating_hosts(hosts, range(len(hosts)))

    def balanced(self) -> dict[str, int]:
        """The rank of each tensor of this rank's stage: one that holds most of it, where that fits."""
        team = sorted(self.team(self.stage))
        holders = largest_holders([self.holdings[rank].boxes for rank in team])
        tensors = [tensor for unit in self._units(self.stage) for tensor in unit.tensors]
        items = []
        for tensor in tensors:
            of_team = tuple(team[index] for index in holders[tensor.name])
            items.append(Item(tensor.num_bytes, tuple(team), of_team))
        names = [tensor.name for tensor in tensors]
        return dict(zip(names, assign(items), strict=True))

    def within_stage(
        self,
        receivers: Mapping[str, int],
        use: Use,
        *,
        max_bytes: int,
        failed: Failed = WeightError,
    ) -> None:
        """Give this rank's tensors to ``use``, bucket by bucket; each stage exchanges its own.

        Args:
            receivers: the rank of each tensor of this rank's stage, in that stage.
            use: what it raises is raised on every rank.
            max_bytes: that a rank sends, and that it receives, at a time; a larger tensor that is
                computed goes alone.
            failed: makes the exception from the text of an error that is none of rlpost's.

        Raises:
            WeightError: the shards of the ranks do not fit together; on every rank.
            RlpostError: a rank failed alone, as ``on_every_rank`` says it; on every rank.
            RuntimeError: a rank does not take part in a message any more; on those that notice.
        """
        stages = sorted({one.stage for one in self.holdings})
        teams = [sorted(self.team(stage)) for stage in stages]
        units = self._units(self.stage)
        position = stages.index(self.stage)
        self._exchange(
            teams,
            position,
            self._planned(teams[position], units, receivers, max_bytes),
            use,
            failed,
        )

    def to_first_rank(self, use: Use, *, max_bytes: int, failed: Failed = WeightError) -> None:
        """As ``within_stage``: rank 0 of the world gets all tensors, the others get none."""
        ranks = list(range(len(self.holdings)))
        units = list(self._sources.units)
        receivers = {tensor.name: 0 for unit in units for tensor in unit.tensors}
        self._exchange([ranks], 0, self._planned(ranks, units, receivers, max_bytes), use, failed)

    def _units(self, stage: int) -> list[Unit]:
        return [unit for unit in self._sources.units if unit.stage == stage]

    def _planned(
        self,
        team: Sequence[int],
        units: Sequence[Unit],
        receivers: Mapping[str, int],
        max_bytes: int,
    ) -> RankPlan:
        """This rank's part of the exchange of a team."""

        def plans() -> list[RankPlan]:
            holdings = [self.holdings[rank] for rank in team]
            positions = {name: team.index(rank) for name, rank in receivers.items()}
            sources = [one.boxes for one in holdings]
            plan = whole_plan(units, sources, positions, max_bytes=max_bytes)
            return rank_plans(plan, [one.gathered for one in holdings])

        return on_every_rank(plans, WeightError)[team.index(self.rank)]

    def _exchange(
        self,
        teams: Sequence[Sequence[int]],
        position: int,
        plan: RankPlan,
        use: Use,
        failed: Failed,
    ) -> None:
        """``teams``: the ranks of each exchange; ``position``: the index of this rank's."""
        at = teams[position].index(self.rank)
        groups = self._sources.inventory.groups
        group = _group(teams, position, groups.timeout)
        try:
            exchange = BoxExchange(self._sources, plan, rank=at, group=group)
            failure = _Buckets(exchange, self._sources, use).exchange()
        finally:
            self._sources.release()
            if group is not None:
                dist.destroy_process_group(group)
        raise_on_every_rank(failure, failed)


class _Buckets:
    """The buckets of an exchange. After a failure on any rank, no rank starts another bucket."""

    def __init__(self, exchange: BoxExchange, sources: ShardSources, use: Use) -> None:
        self._exchange, self._use = exchange, use
        self._reserve = sources.reserve
        tensors = [tensor for unit in sources.units for tensor in unit.tensors]
        self._unfinished = _Unfinished({tensor.name: tensor for tensor in tensors})
        # Allocated now: a rank without memory must still be able to say so.
        self._flag = torch.zeros(1, dtype=torch.int32, device=exchange.device)
        self._flat: torch.Tensor | None = None
        self._failure: Exception | None = None

    def exchange(self) -> Exception | None:
        """Exchange all buckets; return what failed on this rank. Collective of the team.

        Raises RuntimeError if a rank does not take part in a message any more.
        """
        self._attempt(self._reserve)
        for index in range(len(self._exchange)):
            # Before the ranks compare: packing begins with gathers, in which the others would wait.
            self._attempt(partial(self._allocate, index))
            # The first of these connects all ranks, which an exchange between some does not do.
            if self._any_failed() or not self._bucket(index):
                break
        return self._failure

    @torch.no_grad()
    def _bucket(self, index: int) -> bool:
        """Exchange a bucket; return False if a rank of the team cannot."""
        flat, self._flat = self._flat, None
        assert flat is not None
        operations: list[dist.P2POp] = []
        self._attempt(lambda: operations.extend(self._exchange.pack(index, flat)))
        if self._any_failed():
            return False
        self._exchange.transfer(operations)
        self._attempt(lambda: self._take(index, flat))
        return True

    def _allocate(self, index: int) -> None:
        size, device = self._exchange.num_incoming(index), self._exchange.device
        self._flat = torch.empty(size, dtype=torch.uint8, device=device)

    def _take(self, index: int, flat: torch.Tensor) -> None:
        complete = self._unfinished.complete_with(self._exchange.incoming(index), flat)
        self._use(complete)
        complete.clear()  # a caller that keeps the dict keeps no memory

    def _attempt(self, act: Callable[[], None]) -> None:
        """Call ``act`` and keep its failure: the other ranks wait for this one."""
        try:
            act()
        except Exception as error:
            self._failure = self._failure or error

    def _any_failed(self) -> bool:
        """Whether a rank of the team has failed. Collective of the team."""
        if self._exchange.group is None:
            return self._failure is not None
        self._flag.fill_(self._failure is not None)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._exchange.group)
        return bool(self._flag.item())


class _Unfinished:
    """Tensors of which some boxes are still to come."""

    def __init__(self, described: Mapping[str, SentTensor]) -> None:
        self._described = described
        self._tensors: Tensors = {}
        self._left: dict[str, int] = {}
        """Elements that are still to come."""

    def complete_with(self, boxes: Iterable[Box], flat: torch.Tensor) -> Tensors:
        """Take boxes, whose bytes are in ``flat``; return the tensors that are complete then."""
        complete: Tensors = {}
        start = 0
        for box in boxes:
            about = self._described[box.tensor]
            stop = start + box.num_elements * about.element_bytes
            values = flat[start:stop].view(getattr(torch, about.dtype)).view(box.size)
            start = stop
            if box.size == about.shape:
                complete[box.tensor] = values
                continue
            if box.tensor not in self._tensors:
                self._tensors[box.tensor] = values.new_empty(about.shape)
                self._left[box.tensor] = math.prod(about.shape)
            edges = zip(box.start, box.size, strict=True)
            part = tuple(slice(first, first + count) for first, count in edges)
            self._tensors[box.tensor][part] = values
            self._left[box.tensor] -= box.num_elements
            if not self._left[box.tensor]:
                complete[box.tensor] = self._tensors.pop(box.tensor)
        return complete


def weights_hash(inventory: Inventory, *, max_bytes: int = BUCKET_BYTES) -> str:
    """SHA-256 over all Hugging Face tensors by name; the same at every layout. Collective.

    The ranks of a stage divide its tensors: each is hashed by one rank, which holds most of it or
    receives it. Every rank of the world must call it. For ``max_bytes`` see
    ``WholeTensors.within_stage``.

    Raises:
        WeightError: a rank failed; on every rank.
    """
    whole = WholeTensors(inventory)
    rank_hashes: dict[str, str] = {}

    def add(tensors: Tensors) -> None:
        rank_hashes.update({name: _digest(name, tensor) for name, tensor in tensors.items()})

    receivers = on_every_rank(whole.balanced, _cannot_hash)
    whole.within_stage(receivers, add, max_bytes=max_bytes, failed=_cannot_hash)
    digests: dict[str, str] = {}
    for rank_digests in gather_objects(rank_hashes):
        digests |= rank_digests
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def _cannot_hash(problem: str) -> WeightError:
    return WeightError(f"cannot hash the weights: {problem}")


def _digest(name: str, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(as_bytes(tensor.cpu()).numpy())
    return digest.hexdigest()


def alternating_hosts(hosts: Sequence[str], ranks: Sequence[int]) -> tuple[int, ...]:
    """Order ranks so that the first of each host comes before the second of any."""
    before: dict[str, int] = {}
    turns = []
    for host, rank in zip(hosts, ranks, strict=True):
        turns.append((before.get(host, 0), rank))
        before[host] = before.get(host, 0) + 1
    return tuple(rank for _, rank in sorted(turns))


def _group(
    teams: Sequence[Sequence[int]], own: int, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """Create the group of each team, and return this rank's; None for a rank alone.

    A separate group also keeps the messages, of which ranks send different numbers, out of the
    counters by which hangs are detected.
    """
    found = None
    for index, team in enumerate(teams):
        if len(team) > 1:
            group = dist.new_group(team, timeout=timeout, group_desc=EXCHANGE_GROUP)
            found = group if index == own else found
    return found
