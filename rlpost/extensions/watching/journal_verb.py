"""``rlpost journal``: the chain of journal segments, and what a resume after a crash would use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common.run_folder import RunFolder
from common.units import count_text, size_text
from rlpost.cli.runs import add_run_options, find_run, settings_of
from rlpost.cli.terminal import named_lines, terminal_width
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.wording import near_path
from rlpost.driver.checkpoints import STATE_FILE
from rlpost.durable.commit import newest_committed
from rlpost.durable.journal_chain import contents, follow, read_folder
from rlpost.durable.journal_format import ANSWER, BATCH, DROPPED, EVALUATION, GROUP, PART, Record
from rlpost.durable.journal_segments import Segment, Unreadable
from rlpost.durable.state import RunState
from rlpost.durable.verification import verified
from rlpost.errors import CheckpointError, ConfigError

COLUMNS = (
    "file",
    "step",
    "base",
    "after",
    "groups",
    "dropped",
    "parts",
    "tokens",
    "batches",
    "evals",
    "size",
)
"""``base``: the segment whose state this one continues; ``after``: the segment that it seals.

``base`` is ``own`` where a segment has its own state; ``parts`` are answers and turns of groups that
were not finished. Names are short, so that a row fits 80
columns.
"""
NAMES = {GROUP: "groups", BATCH: "batches", EVALUATION: "evaluations", PART: "parts"}


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost journal [RUN] [--records | --json | --verify]``."""
    parser = Parser(
        prog="rlpost journal",
        description="Show the journal of a run: its segments, records and damage.",
    )
    add_run_options(parser)
    output = parser.add_mutually_exclusive_group()
    add_switch(output, "--records", "print every record in order")
    add_switch(output, "--json", "print a JSON object: segments and resume")
    add_switch(output, "--verify", "read all checkpoints and compare them with their digests")
    options = parser.parse_args(arguments)
    folder = journal_folder(find_run(options.run, options.runs_dir))
    if options.verify:
        return _verify(folder.parent)
    try:
        segments, unreadable = read_folder(folder)
    except OSError as error:
        raise ConfigError(f"rlpost journal: {folder} cannot be listed: {error}") from error
    except CheckpointError as error:
        raise ConfigError(f"rlpost journal: {error}") from error
    if not segments and not unreadable:
        raise ConfigError(
            f"rlpost journal: {folder} has no journal; it appears with the first attempt of a run"
        )
    if options.json:
        print(json.dumps(journal_object(folder, segments, unreadable), indent=2))
        return 0
    width = terminal_width()
    print("\n".join([near_path(str(folder)), *table([_row(segment) for segment in segments])]))
    for segment in segments:
        if options.records:
            print(f"\n{segment.path.name}")
            print("\n".join(named_lines(map(_line, segment.records), 12, width)))
    chain = _chain(folder, segments, unreadable)
    print("\n".join(named_lines((("", line) for line in chain), 0, width)))
    return 0


def _verify(save: Path) -> int:
    """Print whether each checkpoint is the one that was committed; return 1 if one is not."""
    try:
        found = verified(save)
    except CheckpointError as error:
        raise ConfigError(f"rlpost journal: {error}") from error
    print(near_path(str(save)))
    lines = [
        (path.name, problem or "complete, with the digests of its commit")
        for path, problem in found
    ]
    print("\n".join(named_lines(lines or [("", "no checkpoint")], 16, terminal_width())))
    return int(any(problem is not None for _, problem in found))


def journal_object(
    folder: Path, segments: Sequence[Segment], unreadable: Sequence[Unreadable]
) -> dict[str, object]:
    """Return the journal as a JSON object.

    ``segments`` has the rows of the table. ``resume`` has the checkpoint's step and segment, the
    segments that a resume uses, the number of their records by kind, and all problems.
    """
    base, step = _resumed_from(folder.parent, segments)
    used = follow(segments, base, step, unreadable=unreadable)
    kinds = Counter(record.kind for record in (*used.records, *used.parts))
    return {
        "folder": str(folder),
        "segments": [_segment_object(segment) for segment in segments],
        "resume": {
            "step": step,
            "segment": base,
            "uses": [segment.header.number for segment in used.chain],
            "records": {NAMES[kind]: count for kind, count in kinds.items()},
            "problems": list(used.problems),
        },
    }


def _segment_object(segment: Segment) -> dict[str, object]:
    header, kinds = segment.header, Counter(record.kind for record in segment.records)
    groups = [record.meta for record in _groups(segment)]
    return {
        "number": header.number,
        "step": header.step,
        "base": header.base,
        "previous": None if header.previous is None else header.previous.number,
        "groups": len(groups),
        "dropped": sum(not meta["wanted"] for meta in groups),
        "parts": kinds[PART],
        "tokens": sum(meta["num_tokens"] for meta in groups),
        "batches": kinds[BATCH],
        "evaluations": kinds[EVALUATION],
        "bytes": segment.good_bytes,
    }


def _chain(
    folder: Path, segments: Sequence[Segment], unreadable: Sequence[Unreadable]
) -> list[str]:
    """Return lines on the segments that a resume uses, and why it uses no others.

    The settings and the prompt data of the run are not compared.
    """
    base, step = _resumed_from(folder.parent, segments)
    used = follow(segments, base, step, unreadable=unreadable)
    names = " -> ".join(segment.path.stem for segment in used.chain) or "no segment"
    lines = [
        f"a resume from step {step} (segment {base}) uses {names}; {contents((*used.records, *used.parts))}"
    ]
    lines += used.problems
    return lines


def _resumed_from(save: Path, found: Sequence[Segment]) -> tuple[int, int]:
    """Return segment and step of the newest complete checkpoint, or of the start of the run."""
    newest = newest_committed(save, checksums=False).path
    if newest is not None:
        try:
            state = RunState.from_json((newest / STATE_FILE).read_text())
            return state.journal, state.step
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"rlpost journal: {newest / STATE_FILE}: {error}") from error
    return 0, next(
        (segment.header.step for segment in reversed(found) if segment.header.base == 0), 0
    )


def journal_folder(run: RunFolder) -> Path:
    """Return the folder of a run's journal, which is beside its checkpoints."""
    save = settings_of(run).get("checkpoint", {}).get("save")
    return (Path(save) if save else run.checkpoints) / "journal"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with right-aligned columns."""
    columns = []
    for cells in zip(COLUMNS, *rows, strict=True):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) for cell in cells])
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def _row(segment: Segment) -> list[str]:
    """Return the cells of a segment in the order of COLUMNS."""
    shown = _segment_object(segment)
    is_state = shown["base"] == shown["number"]
    shown["base"] = "own" if is_state else shown["base"]
    shown["previous"] = "-" if shown["previous"] is None else shown["previous"]
    shown["tokens"] = count_text(sum(record.meta["num_tokens"] for record in _groups(segment)))
    shown["bytes"] = size_text(segment.good_bytes)
    return [str(value) for value in shown.values()]


def _groups(segment: Segment) -> list[Record]:
    return [record for record in segment.records if record.kind == GROUP]


def _line(record: Record) -> tuple[str, str]:
    meta = record.meta
    if record.kind == GROUP:
        dropped = "" if meta["wanted"] else ", dropped by the filter"
        text = f"group of prompt {meta['prompt_id']}, {meta['num_tokens']} tokens{dropped}"
    elif record.kind == PART:
        part = "" if meta["part"] == ANSWER else f"{meta['part']} {meta['number']} of "
        whose = f"{part}answer {meta['index']} to prompt {meta['prompt_id']}"
        text = f"{whose}, {meta['num_tokens']} tokens"
    elif record.kind == DROPPED:
        prompt_id, index = meta["prompt_id"], meta["index"]
        suffix = "" if index is None else f", answer {index}"
        whose = "all groups" if prompt_id is None else f"prompt {prompt_id}{suffix}"
        text = f"parts of {whose} are void"
    elif record.kind == BATCH:
        text = f"batch after step {meta['step']}: prompts {', '.join(map(str, meta['prompt_ids']))}"
    else:
        values = ", ".join(f"{name} {value:.4g}" for name, value in meta["metrics"].items())
        text = f"evaluation after step {meta['step']}: {values}"
    return f"{record.offset:>10}", text
