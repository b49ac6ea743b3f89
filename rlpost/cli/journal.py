"""``rlpost journal``: what a run would resume with after a crash, how its files are chained, and where that ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.run_folder import RunFolder
from rlpost.arguments import Parser
from rlpost.checkpoint.commit import newest_committed
from rlpost.checkpoint.state import RunState
from rlpost.cli.runs import add_run_options, find_run, settings_of
from rlpost.errors import CheckpointError, ConfigError
from rlpost.orchestration.checkpoints import STATE_FILE
from rlpost.rollout.journal_chain import contents, follow, read_folder
from rlpost.rollout.journal_format import BATCH, EVALUATION, GROUP, Record, Segment, Unreadable

COLUMNS = (
    "segment",
    "from step",
    "goes on from",
    "follows on",
    "groups",
    "dropped",
    "tokens",
    "batches",
    "evaluations",
    "bytes",
)
NAMES = {GROUP: "groups", BATCH: "batches", EVALUATION: "evaluations"}


def main(arguments: Sequence[str]) -> int:
    """``rlpost journal [RUN] [--records | --json]``."""
    made = Parser(
        prog="rlpost journal", description="The journal of a run: what followed on its checkpoints, and its damage."
    )
    add_run_options(made)
    output = made.add_mutually_exclusive_group()
    output.add_argument("--records", action="store_true", help="every record, in order")
    output.add_argument("--json", action="store_true", help="one object for programs: segments, and what a resume uses")
    options = made.parse_args(arguments)
    folder = journal_folder(find_run(options.run, options.runs_dir))
    try:
        found, unreadable = read_folder(folder)
    except OSError as error:
        raise ConfigError(f"rlpost journal: {folder} cannot be listed: {error}") from error
    if not found and not unreadable:
        raise ConfigError(f"rlpost journal: {folder} has no journal; it appears with the first attempt of a run")
    if options.json:
        print(json.dumps(journal_object(folder, found, unreadable), indent=2))
        return 0
    print("\n".join([str(folder), *table([_row(segment) for segment in found])]))
    for segment in found:
        if options.records:
            print("\n".join([f"\n{segment.path.name}", *map(_line, segment.records)]))
    print("\n".join(_chain(folder, found, unreadable)))
    return 0


def journal_object(folder: Path, found: Sequence[Segment], unreadable: Sequence[Unreadable]) -> dict[str, Any]:
    """The journal for programs: ``segments`` as in the table, and ``resume``: the checkpoint's step and segment, the
    segments that a resume from it uses, how many of their records, and every problem."""
    base, step = _resumed_from(folder.parent, found)
    used = follow(found, base, step, unreadable=unreadable)
    return {
        "folder": str(folder),
        "segments": [_segment_object(segment) for segment in found],
        "resume": {
            "step": step,
            "segment": base,
            "uses": [segment.header.number for segment in used.chain],
            "records": {NAMES[kind]: count for kind, count in Counter(record.kind for record in used.records).items()},
            "problems": list(used.problems),
        },
    }


def _segment_object(segment: Segment) -> dict[str, Any]:
    header, kinds = segment.header, Counter(record.kind for record in segment.records)
    groups = [record.meta for record in segment.records if record.kind == GROUP]
    return {
        "number": header.number,
        "step": header.step,
        "base": header.base,
        "previous": None if header.previous is None else header.previous.number,
        "groups": len(groups),
        "dropped": sum(not meta["wanted"] for meta in groups),
        "tokens": sum(meta["num_tokens"] for meta in groups),
        "batches": kinds[BATCH],
        "evaluations": kinds[EVALUATION],
        "bytes": segment.good_bytes,
    }


def _chain(folder: Path, found: Sequence[Segment], unreadable: Sequence[Unreadable]) -> list[str]:
    """Lines: which segments a resume uses, and why no more. The settings and the data of the run are not compared."""
    base, step = _resumed_from(folder.parent, found)
    used = follow(found, base, step, unreadable=unreadable)
    names = " -> ".join(segment.path.stem for segment in used.chain) or "no segment"
    lines = [f"a resume from step {step} (segment {base}) uses {names}; {contents(used.records)}"]
    lines += used.problems
    if any(segment.header.format == 1 for segment in used.chain):
        lines.append("an older program wrote segments without a chain: that none is missing between them is not proven")
    return lines


def _resumed_from(save: Path, found: Sequence[Segment]) -> tuple[int, int]:
    """Segment and step of the newest complete checkpoint in ``save``, else of the beginning of the run."""
    newest = newest_committed(save, checksums=False).path
    if newest is not None:
        try:
            state = RunState.from_json((newest / STATE_FILE).read_text())
            return state.journal, state.step
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"rlpost journal: {newest / STATE_FILE}: {error}") from error
    return 0, next((segment.header.step for segment in reversed(found) if segment.header.base == 0), 0)


def journal_folder(run: RunFolder) -> Path:
    """Beside the checkpoints of a run."""
    save = settings_of(run).get("checkpoint", {}).get("save")
    return (Path(save) if save else run.checkpoints) / "journal"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *rows)]


def _row(segment: Segment) -> list[str]:
    """The cells of a segment in the order of COLUMNS."""
    shown = _segment_object(segment)
    is_state = shown["base"] == shown["number"]
    shown["base"] = "its own state" if is_state else f"segment {shown['base']}"
    shown["previous"] = "-" if shown["previous"] is None else f"segment {shown['previous']}"
    return [str(value) for value in shown.values()]


def _line(record: Record) -> str:
    meta = record.meta
    if record.kind == GROUP:
        dropped = "" if meta["wanted"] else ", dropped by the filter"
        text = f"group of prompt {meta['prompt_id']}, {meta['num_tokens']} tokens{dropped}"
    elif record.kind == BATCH:
        text = f"batch after step {meta['step']}: prompts {', '.join(map(str, meta['prompt_ids']))}"
    else:
        values = ", ".join(f"{name} {value:.4g}" for name, value in meta["metrics"].items())
        text = f"evaluation after step {meta['step']}: {values}"
    return f"{record.offset:>10}  {text}"
