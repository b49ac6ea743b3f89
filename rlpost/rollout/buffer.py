"""The rollout buffer: tracks prompts and groups from fetch to training. Pure.

Input: events (a prompt was fetched; a group finished, was aborted or was trained) and the version
of the weights.
Output: how many groups to start, whether a batch is complete and which groups it holds, and at any
moment a ``Backlog`` from which another buffer resumes.

    fetched -> waiting <-> running -> finished -> in training -> trained
                               |         |
                               +---------+-> filtered

Invariant, asserted by ``Tally``: every fetched prompt is exactly once trained, filtered or still in
the buffer.

There are two modes. With ``max_staleness`` None the buffer generates one batch at a time: it starts
``start_size`` groups, starts more when filters leave too few, and aborts the groups that still run
when the batch is full. With a number it generates continuously: it starts a group if every group
can still be trained at most that many versions after its first token. The number in flight is
bounded as in AReaL (arXiv 2505.24298, eq. 3). Groups enter batches by their deadlines, so that the
bound holds for every token and not only on average.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, Unfinished

FILTERED, ABORTED, CONTINUED, WASTED = COUNTED = (
    "rollout/num_filtered",
    "rollout/num_aborted",
    "rollout/num_continued",
    "rollout/wasted_tokens",
)


@dataclass(frozen=True, slots=True)
class Rules:
    """Sizes and limits of the rollout buffer.

    There are ``batch_size`` groups per step for ``num_steps`` steps; ``start_size`` groups are
    started for a batch. ``versions`` say which weights engines have after each step.
    """

    batch_size: int
    start_size: int
    num_steps: int
    max_staleness: int | None = None
    keep_partial: bool = False  # keep the tokens of aborted answers
    versions: PolicyVersions = field(default_factory=PolicyVersions)


class Tally:
    """Counts and open prompt ids.

    Ids rise, so a prompt enters once; it leaves once, trained or filtered.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._open = set(backlog.prompt_ids)
        self.num_fetched, self.num_trained = backlog.num_fetched, backlog.num_trained
        self.num_filtered, self.newest_id = backlog.num_filtered, backlog.newest_id
        assert len(self._open) == len(backlog.prompt_ids), "a prompt is in the backlog twice"
        self.check(backlog.prompt_ids)

    def mark_fetched(self, prompt_id: int) -> None:
        """Record that the cursor returned a prompt."""
        assert prompt_id > self.newest_id, (
            f"prompt {prompt_id} after {self.newest_id}: fetched twice"
        )
        self.newest_id = prompt_id
        self._open.add(prompt_id)
        self.num_fetched += 1

    def mark_trained(self, prompt_id: int) -> None:
        """Record that the group of a prompt was trained."""
        self._open.remove(prompt_id)
        self.num_trained += 1

    def mark_filtered(self, prompt_id: int) -> None:
        """Record that the group of a prompt was filtered."""
        self._open.remove(prompt_id)
        self.num_filtered += 1

    def check(self, held: Iterable[int]) -> None:
        """Assert that ``held`` are exactly the open prompts, and that the counts add up."""
        held = list(held)
        assert sorted(held) == sorted(self._open), "prompts were lost or are held twice"
        counts = (
            f"fetched {self.num_fetched}, trained {self.num_trained}, filtered {self.num_filtered}"
        )
        assert self.num_fetched == self.num_trained + self.num_filtered + len(held), (
            f"{counts}, held {len(held)}"
        )


class _Finished:
    """Complete groups by prompt id, in order of completion, and by the oldest version of a token.

    No operation on one group is linear in the backlog.
    """

    def __init__(self, groups: Iterable[SampleGroup]) -> None:
        self.by_id: dict[int, SampleGroup] = {}
        self._by_version: dict[int, dict[int, SampleGroup]] = {}
        for group in groups:
            self.add(group)

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, group: SampleGroup) -> None:
        self.by_id[group.prompt_id] = group
        self._by_version.setdefault(group.oldest_version, {})[group.prompt_id] = group

    def pop(self, prompt_id: int) -> SampleGroup:
        """Remove and return a group. Raises KeyError when it is not here."""
        group = self.by_id.pop(prompt_id)
        of_version = self._by_version[group.oldest_version]
        del of_version[prompt_id]
        if not of_version:
            del self._by_version[group.oldest_version]
        return group

    def older_than(self, version: int) -> list[SampleGroup]:
        """Return the groups with a token of a version before ``version``."""
        old = [own.values() for before, own in self._by_version.items() if before < version]
        return list(itertools.chain.from_iterable(old))

    def oldest(self, count: int) -> list[SampleGroup]:
        """Return ``count`` groups, oldest version first, then in order of completion."""
        ordered = (self._by_version[version].values() for version in sorted(self._by_version))
        return list(itertools.islice(itertools.chain.from_iterable(ordered), count))

    def versions_after(self, count: int) -> Counter[int]:
        """Return how many groups of each version are left without the ``count`` oldest."""
        left: Counter[int] = Counter()
        for version in sorted(self._by_version):
            size = len(self._by_version[version])
            left[version] = max(0, size - count)
            count = max(0, count - size)
        return left


class RolloutBuffer:
    """See the module.

    ``step`` counts trained steps; ``version`` is that of the weights in the engines.
    """

    def __init__(self, rules: Rules, backlog: Backlog, *, step: int) -> None:
        self.rules = rules
        self.step, self.version = step, rules.versions.engines(step)
        self.is_open = False  # whether groups may be started
        self._tally = Tally(backlog)
        # Ordered: groups leave from the front, where a plain dict would pass over all that have
        # left.
        self._waiting = OrderedDict((each.prompt.prompt_id, each) for each in backlog.unfinished)
        self._resumed: set[int] = set()  # waiting groups whose answers an earlier attempt finished
        self._running: dict[int, Unfinished] = {}
        self._since: dict[int, int] = {}  # version of the first token of each running group
        self._num_since: Counter[int] = Counter()  # running groups by that version
        self._finished = _Finished(backlog.finished)
        self._in_training: dict[int, SampleGroup] = {}
        self._counts = defaultdict(float, backlog.counts)  # since the last batch was taken
        self._counts_in_training: Mapping[str, float] = {}
        # Counts of the next batch, if it was taken before a crash.
        self._owed_counts = backlog.counts_in_training

    @property
    def waiting(self) -> tuple[Unfinished, ...]:
        """Groups that may be started, oldest first."""
        return tuple(self._waiting.values())

    def longest_waiting(self, count: int) -> tuple[Unfinished, ...]:
        """Return the first ``count`` of ``waiting``."""
        return tuple(itertools.islice(self._waiting.values(), count))

    @property
    def num_finished(self) -> int:
        """Number of complete groups that are not in training."""
        return len(self._finished)

    @property
    def newest_id(self) -> int:
        """Id of the prompt that was fetched last."""
        return self._tally.newest_id

    def capacity(self) -> int:
        """Return how many groups to start now."""
        self._filter_too_old()
        rules, held_groups = self.rules, len(self._finished) + len(self._running)
        if not self.is_open:
            return 0
        if rules.max_staleness is None:
            return rules.start_size - held_groups if held_groups < rules.batch_size else 0
        # Between training and sync, and between two weight updates, new groups start behind.
        ahead = self.step - self.version
        in_flight = held_groups + len(self._in_training)
        in_time = (rules.max_staleness + 1 - ahead) * rules.batch_size - in_flight
        to_the_end = (rules.num_steps - self.step) * rules.batch_size - in_flight
        return max(0, min(in_time, to_the_end))

    def has_spare(self) -> bool:
        """Whether finished and running groups still fill a batch after one of them is dropped."""
        return len(self._finished) + len(self._running) > self.rules.batch_size

    def add_prompts(self, prompts: Sequence[Prompt]) -> list[Unfinished]:
        """Add prompts of the cursor as waiting groups."""
        entries = [Unfinished(prompt) for prompt in prompts]
        for entry in entries:
            self._tally.mark_fetched(entry.prompt.prompt_id)
            self._waiting[entry.prompt.prompt_id] = entry
        return entries

    def start(self, prompt_id: int, *, recorded_since: int | None = None) -> Unfinished:
        """Start a waiting group and return it, without its answers if they are too old.

        ``recorded_since`` is the oldest policy version that the journal has of the group.
        """
        entry = self._waiting.pop(prompt_id)
        versions = [sample.oldest_version for sample in entry.samples]
        since = min([*versions, self.version if recorded_since is None else recorded_since])
        if since < self._oldest_allowed():
            self._counts[WASTED] += entry.num_tokens
            entry, since = Unfinished(entry.prompt), self.version
        self._counts[CONTINUED] += bool(entry.samples) and prompt_id not in self._resumed
        self._resumed.discard(prompt_id)
        self._running[prompt_id], self._since[prompt_id] = entry, since
        self._num_since[since] += 1
        return entry

    def since(self, prompt_id: int) -> int:
        """Return the policy version of the first token of a running group."""
        return self._since[prompt_id]

    def finish(self, group: SampleGroup, *, wanted: bool) -> None:
        """Record that a running group is complete; filter it unless ``wanted``."""
        self._stop_running(group.prompt_id)
        self._store_finished(group, wanted)

    def abort(self, entry: Unfinished) -> None:
        """Return an aborted group to the waiting ones, with its tokens if ``keep_partial``.

        It counts as aborted only when the batch is full without it: aborts by a preemption are not
        counted.
        """
        prompt_id = entry.prompt.prompt_id
        self._stop_running(prompt_id)
        is_surplus = (
            self.rules.max_staleness is None and len(self._finished) >= self.rules.batch_size
        )
        self._counts[ABORTED] += is_surplus
        if not self.rules.keep_partial:
            self._counts[WASTED] += entry.num_tokens * is_surplus
            entry = Unfinished(entry.prompt)
        self._waiting[prompt_id] = entry

    def has_batch(self) -> bool:
        """Whether ``take`` would return a batch."""
        self._filter_too_old()
        return self._batch() is not None

    def take(self) -> list[SampleGroup] | None:
        """Return the next groups to train, by prompt id; None while the batch is incomplete."""
        self._filter_too_old()
        batch = self._batch()
        return None if batch is None else self._move_to_training(batch)

    def take_again(
        self, prompt_ids: Iterable[int], counts: Mapping[str, float]
    ) -> list[SampleGroup]:
        """Take again the batch that was taken before a crash, with its ``counts``.

        Raises KeyError for a group that is not finished.
        """
        self._filter_too_old()
        groups = self._move_to_training(
            [self._finished.by_id[prompt_id] for prompt_id in prompt_ids]
        )
        self._counts_in_training = counts
        return groups

    def add_answers(self, prompt_id: int, samples: Sequence[Sample]) -> None:
        """Add answers that an earlier attempt finished, all samples of each, to a waiting group.

        Raises KeyError for other groups.
        """
        entry = self._waiting[prompt_id]
        if not entry.samples:
            self._resumed.add(prompt_id)
        finished = {sample.index for sample in samples}
        others = tuple(sample for sample in entry.samples if sample.index not in finished)
        self._waiting[prompt_id] = replace(entry, samples=(*others, *samples))

    def replay(self, group: SampleGroup, *, wanted: bool = True) -> None:
        """Finish a waiting group with its recorded answers; raise KeyError for other groups."""
        del self._waiting[group.prompt_id]
        self._store_finished(group, wanted)

    def mark_trained(self) -> None:
        """Record that the batch that was taken is trained."""
        for prompt_id in self._in_training:
            self._tally.mark_trained(prompt_id)
        self._in_training = {}
        self.step += 1

    def backlog(self) -> Backlog:
        """Return the whole buffer.

        Running groups are returned as they were started, groups in training as finished.
        """
        backlog = Backlog(
            finished=(*self._in_training.values(), *self._finished.by_id.values()),
            unfinished=(*self._running.values(), *self._waiting.values()),
            num_fetched=self._tally.num_fetched,
            num_trained=self._tally.num_trained,
            num_filtered=self._tally.num_filtered,
            newest_id=self._tally.newest_id,
            counts={name: number for name, number in self._counts.items() if number},
            counts_in_training=self._counts_in_training if self._in_training else self._owed_counts,
        )
        self._tally.check(backlog.prompt_ids)
        return backlog

    def add_counts(self, more: Mapping[str, float]) -> None:
        """Add counts, by metric name."""
        for name, number in more.items():
            self._counts[name] += number

    def counts(self) -> Mapping[str, float]:
        """Return, by metric name, counts between the last two batches and groups held at the last.

        A batch that a preemption returned to the buffer keeps the counts of its first ``take``.
        """
        return self._counts_in_training

    def _store_finished(self, group: SampleGroup, wanted: bool) -> None:
        if wanted:
            self._finished.add(group)
        else:
            self._filter(group)

    def _stop_running(self, prompt_id: int) -> None:
        del self._running[prompt_id]
        since = self._since.pop(prompt_id)
        self._num_since[since] -= 1
        if not self._num_since[since]:
            del self._num_since[since]

    def _move_to_training(self, batch: Sequence[SampleGroup]) -> list[SampleGroup]:
        for group in batch:
            self._in_training[group.prompt_id] = self._finished.pop(group.prompt_id)
        if self._owed_counts is None:
            held = {
                "rollout/num_held": float(len(self._finished)),
                "rollout/num_unfinished": float(len(self._waiting) + len(self._running)),
            }
            self._counts_in_training = dict.fromkeys(COUNTED, 0.0) | self._counts | held
            self._counts.clear()
        else:
            self._counts_in_training, self._owed_counts = self._owed_counts, None
        return sorted(batch, key=lambda group: group.prompt_id)

    def _filter_too_old(self) -> None:
        for group in self._finished.older_than(self._oldest_allowed()):
            self._filter(self._finished.pop(group.prompt_id))

    def _filter(self, group: SampleGroup) -> None:
        self._tally.mark_filtered(group.prompt_id)
        self._counts[FILTERED] += 1
        self._counts[WASTED] += group.num_tokens

    def _oldest_allowed(self) -> int:
        return 0 if self.rules.max_staleness is None else self.version - self.rules.max_staleness

    def _batch(self) -> list[SampleGroup] | None:
        size = self.rules.batch_size
        if len(self._finished) < size:
            return None
        if self._running and not self._in_time(
            self._finished.versions_after(size) + self._num_since
        ):
            return None
        return self._finished.oldest(size)

    def _in_time(self, num_by_version: Mapping[int, int]) -> bool:
        """Whether groups that began at these versions can all be trained in time.

        One batch is trained per step, from the next step on. If False, the batch has to wait for
        the running groups.
        """
        bound, size = self.rules.max_staleness, self.rules.batch_size
        if bound is None:
            return True
        num_until = 0
        for version in sorted(num_by_version):
            num_until += num_by_version[version]
            if num_until > (version + bound - self.step) * size:
                return False
        return True
