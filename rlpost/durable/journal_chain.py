"""The chain of journal segments: which records follow a checkpoint.

Input: the segments of a folder, and the checkpoint state that a run resumes from. Output: the
records that provably follow that state, in order; for everything else the file, the reason why it
is not used, and what that costs.

    state of step 20 names 5        5 ──── 6 ──── 7            6 began at the state of step 30, 7 at that of step 40
                                      └─── 8 ──── 9            8: a resume from step 30 copied 6 and 7

Each header seals the previous segment: number, bytes and digest at the moment when the new one
began. A resume keeps the seal of the state that it resumed from, so that 8 continues 5 exactly as 6
did. The chain takes the newest segment that continues the last one, and ends where there is none.
After a segment that is missing, empty, damaged, copied or from another history, the seals of later
segments are invalid, and these are not used.

``rlpost.rollout.replay`` also checks each record against the run's own bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from rlpost.durable.journal_format import BATCH, DROPPED, GROUP, PART, Record, Seal
from rlpost.durable.journal_segments import Segment, Unreadable, read_segment, segment_paths
from rlpost.durable.open_parts import OpenParts
from rlpost.durable.result_settings import Change, compare
from rlpost.images.store import WITH_IMAGES


@dataclass(frozen=True, slots=True)
class Found:
    """The records that follow a checkpoint.

    ``records`` are groups, batches and evaluations in order, each once; ``parts`` are those of
    groups that are not finished by then; ``chain`` are the segments that hold them; ``problems``
    are messages about segments and bytes that are not used. ``changes`` are lines on settings that
    have changed since; with ``is_trained_otherwise`` only settings of training are among them, so
    that what later weights than those of the checkpoint have generated cannot be used.
    """

    records: tuple[Record, ...] = ()
    parts: tuple[Record, ...] = ()
    problems: tuple[str, ...] = ()
    chain: tuple[Segment, ...] = ()
    changes: tuple[str, ...] = ()
    is_trained_otherwise: bool = False

    @property
    def previous(self) -> Seal | None:
        """The segment that ended at the checkpoint's state; None when it is unknown."""
        return self.chain[0].header.previous if self.chain else None


def read_folder(folder: Path) -> tuple[list[Segment], list[Unreadable]]:
    """Return all segments of a journal by number, and the files without a valid header.

    Raises OSError when the folder cannot be listed, CheckpointError when a file cannot be read.
    """
    found = [read_segment(path) for path in segment_paths(folder)]
    valid = [each for each in found if isinstance(each, Segment)]
    return valid, [each for each in found if isinstance(each, Unreadable)]


def follow(
    segments: Iterable[Segment],
    base: int,
    step: int,
    settings: str | None = None,
    *,
    data: str | None = None,
    unreadable: Iterable[Unreadable] = (),
) -> Found:
    """Find what happened after the checkpoint state of ``step`` steps that names segment ``base``.

    Of an event that is recorded twice (still to be replayed when the next state was saved) the
    first counts. Segments written with other ``settings`` of generation or other prompt ``data``
    are not used; None skips that comparison.
    """
    ordered = sorted(segments, key=lambda segment: segment.header.number)
    chain: list[Segment] = []
    problems: list[str] = []
    following = _start(ordered, base, step)
    if following is None and (
        base > 0 or any(segment.header.number >= base for segment in ordered)
    ):
        problems.append(
            f"no segment continues the checkpoint of step {step}, which names segment {base}"
        )
    served = base - 1  # the newest segment that needs no message
    changes, is_trained_otherwise = dict[str, None](), False
    while following is not None:
        served = following.header.number
        change = Change() if settings is None else compare(following.header.settings, settings)
        changes |= dict.fromkeys((*change.generated, *change.trained))
        changed = _changed(following, change, data)
        if changed is not None:
            problems.append(_unused(following, changed))
            break
        is_trained_otherwise |= bool(change.trained)
        chain.append(following)
        following = _next(following, ordered)
    for segment in chain:
        problems += [f"{segment.path}: {damage}" for damage in segment.damaged]
    if chain and chain[-1].problem is not None:
        problems.append(f"{chain[-1].path}: {chain[-1].problem}")
    for file in unreadable:
        if file.number >= base:
            problems.append(f"{file.path}: {file.problem}; its {file.num_bytes} bytes are not used")
    # Segments before ``served`` that are not in the chain were superseded by a resume.
    for segment in ordered:
        if segment.header.number > served:
            problems.append(_unused(segment, _why(segment, chain, ordered)))
    records, parts = _events(chain, problems)
    return Found(
        records,
        parts,
        tuple(problems),
        tuple(chain),
        tuple(changes),
        is_trained_otherwise=is_trained_otherwise,
    )


def contents(records: Sequence[Record]) -> str:
    """Summarise records for a message."""
    groups = [record for record in records if record.kind == GROUP]
    tokens = sum(record.meta["num_tokens"] for record in groups)
    batches = sum(record.kind == BATCH for record in records)
    parts = sum(record.kind == PART for record in records)
    text = f"groups: {len(groups)} ({tokens} tokens), batches: {batches}"
    return f"{text}, answers and turns: {parts}" if parts else text


def _start(ordered: Sequence[Segment], base: int, step: int) -> Segment | None:
    """Return the newest segment of a state: its first one, or that of the newest resume."""
    for segment in reversed(ordered):
        if (segment.header.base, segment.header.step) == (base, step):
            return segment
    return None


def _next(segment: Segment, ordered: Sequence[Segment]) -> Segment | None:
    """Return the segment that continues this one."""
    later = [each for each in ordered if each.header.number > segment.header.number]
    sealed = [
        each
        for each in later
        if each.header.previous is not None and segment.sealed(each.header.previous)
    ]
    return sealed[-1] if sealed else None


def _events(
    chain: Sequence[Segment], problems: list[str]
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Return the records of the chain, every event once, and the parts that are left at its end."""
    events: dict[tuple[int, int], Record] = {}
    parts = OpenParts[Record]()
    for segment, following in zip_longest(chain, chain[1:]):
        seal = None if following is None else following.header.previous
        end = segment.good_bytes if seal is None else seal.num_bytes
        for record in segment.records:
            if record.offset + record.size > end:
                break
            if record.kind == PART:
                # The next segment may begin with a copy of a finished group and its answers.
                if (GROUP, record.meta["prompt_id"]) not in events:
                    parts.add(record.part_key, record)
            elif record.kind == DROPPED:
                parts.drop(record.meta["prompt_id"], record.meta["index"])
            elif record.kind == GROUP and record.key not in events:
                _add_group(record, parts, events, problems)
            else:
                events.setdefault(record.key, record)
                if record.meta.get("drops_parts"):
                    parts.drop()
    return tuple(events.values()), tuple(parts)


def _add_group(
    record: Record,
    parts: OpenParts[Record],
    events: dict[tuple[int, int], Record],
    problems: list[str],
) -> None:
    """Add a group with the answers that it refers to, unless one is damaged that is trained."""
    prompt_id = record.meta["prompt_id"]
    answers = tuple(parts.answers(prompt_id))
    missing = set(record.meta.get("refers_to", ())) - {each.meta["index"] for each in answers}
    if missing and record.meta["wanted"]:
        problems.append(
            f"{record.path}: answers {sorted(missing)} to prompt {prompt_id} are damaged; they are "
            "generated again"
        )
        return
    events[record.key] = replace(record, answers=answers)
    parts.drop(prompt_id)


def _changed(segment: Segment, change: Change, data: str | None) -> str | None:
    """Return why a segment is not used with the settings and data of this attempt, or None."""
    if change.generated:
        return f"settings that decide what is generated have changed since: {'; '.join(change.generated)}"
    if data is None or _is_same_data(segment.header.data, data):
        return None
    files, _, images = data.partition(WITH_IMAGES)
    if images and (segment.header.data or "").startswith(f"{files}{WITH_IMAGES}"):
        return "images that the rows of --prompt-data name by path have changed since"
    return "the files of --prompt-data have changed since"


def _is_same_data(before: str | None, now: str) -> bool:
    """Compare fingerprints; of one without images, as rlpost 0.2 wrote them, the files."""
    return before in (None, now, now.partition(WITH_IMAGES)[0])


def _why(segment: Segment, chain: Sequence[Segment], ordered: Sequence[Segment]) -> str:
    seal = segment.header.previous
    if not segment.header.unbroken:
        return "the records before it could not be written"
    if seal is None:
        return "follows records that are lost"
    if seal.number not in [each.header.number for each in ordered]:
        return f"follows segment {seal.number}, which is missing or damaged"
    if seal.number not in [each.header.number for each in chain]:
        return f"follows segment {seal.number}, which is not used"
    return f"follows records that are lost: the first {seal.num_bytes} bytes of segment {seal.number} have changed"


def _unused(segment: Segment, why: str) -> str:
    return f"{segment.path}: {why}; it is not used. To generate again: {contents(segment.records)}"
