"""``rlpost journal``: what a run would go on with after a crash, and whether its files are good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlpost.arguments import Parser
from rlpost.cli.runs import add_run_options, find_run, settings_of
from rlpost.errors import ConfigError
from rlpost.rollout.journal_format import BATCH, EVALUATION, GROUP, Record, Segment, segments
from slurm.run_folder import RunFolder

COLUMNS = ("segment", "from step", "goes on from", "groups", "dropped", "tokens", "batches", "evaluations", "bytes")


def main(arguments: Sequence[str]) -> int:
    """``rlpost journal [RUN] [--records]``."""
    made = Parser(
        prog="rlpost journal", description="The journal of a run: what followed on its checkpoints, and its damage."
    )
    add_run_options(made)
    made.add_argument("--records", action="store_true", help="every record, in order")
    options = made.parse_args(arguments)
    folder = journal_folder(find_run(options.run, options.runs_dir))
    found = segments(folder)
    if not found:
        raise ConfigError(f"rlpost journal: {folder} has no journal; it appears with the first attempt of a run")
    print("\n".join([str(folder), *table([_row(segment) for segment in found])]))
    for segment in found:
        if options.records:
            print("\n".join([f"\n{segment.path.name}", *map(_line, segment.records)]))
        if segment.problem is not None:
            print(f"{segment.path}: {segment.problem}; what is before it serves")
    return 0


def journal_folder(run: RunFolder) -> Path:
    """Beside the checkpoints of a run."""
    save = settings_of(run).get("checkpoint", {}).get("save")
    return (Path(save) if save else run.checkpoints) / "journal"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *rows)]


def _row(segment: Segment) -> list[str]:
    header, kinds = segment.header, Counter(record.kind for record in segment.records)
    groups = [record.meta for record in segment.records if record.kind == GROUP]
    base = "its own state" if header.base == header.number else f"segment {header.base}"
    return [
        str(header.number),
        str(header.step),
        base,
        str(len(groups)),
        str(sum(not meta["wanted"] for meta in groups)),
        str(sum(meta["num_tokens"] for meta in groups)),
        str(kinds[BATCH]),
        str(kinds[EVALUATION]),
        str(segment.good_bytes),
    ]


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
