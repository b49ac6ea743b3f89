"""``rlpost judge-agreement``: how often a judge agrees with the labels of people.

Input: rows with a prompt, an answer (or two) and the verdict of a person; a judge's file; the
address of a model. Output: agreement with its interval, kappa, refusals and unparsable replies
apart, and rows that differ. Exit code 1 below --min-agreement.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import write_atomic
from rlpost.cli.terminal import aligned
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.engine_groups import judge_url_group
from rlpost.config.wording import near_path
from rlpost.engines.group_client import GroupClient
from rlpost.engines.places import Place, Places
from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.judge.judge import ChatClient, Comparison, Judge
from rlpost.extensions.judge.judge_file import JudgeFile, prompt_values, read_judge
from rlpost.extensions.judge.verdicts import Agreement, NoVerdict, Verdict, agreement, parse_verdict
from rlpost.tasks.number_text import plain_text
from rlpost.tasks.rows import Rows

SHOWN = 3  # rows that differ
KEY_VARIABLE = "JUDGE_ENGINES_KEY"


@dataclass(frozen=True)
class LabelledRow:
    """One row: the fields of the prompt, the answers, and the verdict of a person."""

    where: str
    prompt: Mapping[str, str]
    answers: tuple[str, ...]
    human: str | float


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost judge-agreement ROWS --judge FILE --url URL``; 1 below --min-agreement."""
    parser = Parser(
        prog="rlpost judge-agreement",
        description="Compare a judge's verdicts with those of people. A row has the keys prompt, response (a pair: "
        f"response_a and response_b) and human. ${KEY_VARIABLE} is sent as the server's key.",
    )
    parser.add_argument("rows", metavar="ROWS", help="JSONL or Parquet file; PATH@[A:B] for a part")
    parser.add_argument(
        "--judge", required=True, metavar="FILE", help="the judge (docs/rewards.md)"
    )
    parser.add_argument("--url", required=True, help="of the model: http://HOST:PORT/v1")
    parser.add_argument("--model", default="default", help="its name in requests")
    parser.add_argument("--human-key", default="human", help="key of a person's verdict")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="of one request, with retries"
    )
    parser.add_argument(
        "--min-agreement", type=float, metavar="SHARE", help="fail below it, 0 to 1"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each row's verdict (JSONL)")
    add_switch(parser, "--json", "print the figures for programs")
    options = parser.parse_args(arguments)
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {options.url!r}: must start with http:// or https://")
    least = options.min_agreement
    if least is not None and not 0 <= least <= 1:
        raise ConfigError(f"--min-agreement {least:g}: must be from 0 to 1")
    file = read_judge(options.judge)
    rows = read_rows(options.rows, file, human_key=options.human_key)
    group = judge_url_group(options.url, options.model, options.timeout_s, label="--url")
    places, capacity = Places(), group.settings.concurrency
    key = os.environ.get(KEY_VARIABLE, "")
    places.set_own([Place(url, key, capacity) for url in group.settings.url])
    chat = GroupClient(group, places)

    async def judge_and_close() -> list[Verdict | Comparison | NoVerdict]:
        try:
            return await judge_rows(file, chat, rows)
        finally:
            await chat.close()

    verdicts = asyncio.run(judge_and_close())
    result = summarize(file, rows, verdicts)
    if options.out is not None:
        write_atomic(options.out, "".join(f"{line}\n" for line in records(rows, verdicts)))
    if options.json:
        figures = asdict(result) | {"share": result.share, "interval": result.interval}
        print(json.dumps(figures | {"counts": confusion(rows, verdicts)}, indent=2))
    else:
        print("\n".join(report(result, rows, verdicts)))
        if options.out is not None:
            print(f"verdicts: {near_path(str(options.out))}")
    if least is not None and not result.share >= least:
        print(f"agreement {result.share:.3f} is less than --min-agreement {least:g}")
        return 1
    return 0


def read_rows(source: str, file: JudgeFile, *, human_key: str = "human") -> list[LabelledRow]:
    """Read labelled rows.

    Raises:
        DataError: a key is missing, or a person's verdict is none of the judge's.
    """
    rows = Rows(source)
    answers = ("response",) if file.kind == "grade" else ("response_a", "response_b")
    labelled = []
    for position in range(len(rows)):
        row, where = rows.row(position), rows.where(position)
        for key in ("prompt", *answers, human_key):
            if row.get(key) is None:
                raise DataError(f"{where}: no key {key!r}; it has {', '.join(row)}")
        rest = {key: value for key, value in row.items() if key not in (*answers, human_key)}
        label, prompt = rest.pop("label", None), str(rest.pop("prompt"))
        values = prompt_values(prompt, None if label is None else plain_text(label), rest)
        human = parse_verdict(f"{file.grammar.marker} {plain_text(row[human_key])}", file.grammar)
        if isinstance(human, NoVerdict):
            raise DataError(f"{where}: {human_key!r} is {row[human_key]!r}; {human.why}")
        texts = tuple(str(row[key]) for key in answers)
        labelled.append(LabelledRow(where, values, texts, human.value))
    return labelled


async def judge_rows(
    file: JudgeFile, chat: ChatClient, rows: Sequence[LabelledRow]
) -> list[Verdict | Comparison | NoVerdict]:
    """Return the verdict on each row. Raises GradingLost when the model does not answer."""
    judge = Judge(file, chat)

    async def one(row: LabelledRow) -> Verdict | Comparison | NoVerdict:
        try:
            if file.kind == "grade":
                return await judge.grade(row.prompt, row.answers[0])
            return await judge.compare(row.prompt, *row.answers)
        except (DataError, GradingLost) as error:
            raise type(error)(f"{row.where}: {error}") from error

    return list(await asyncio.gather(*(one(row) for row in rows)))


def value_of(verdict: Verdict | Comparison | NoVerdict) -> str | float | NoVerdict:
    """Return a verdict as a person would give it; a pair that depends on the order is a tie."""
    if isinstance(verdict, Comparison):
        return "a" if verdict.score > 0.5 else "b" if verdict.score < 0.5 else "tie"
    return verdict.value if isinstance(verdict, Verdict) else verdict


def summarize(
    file: JudgeFile,
    rows: Sequence[LabelledRow],
    verdicts: Sequence[Verdict | Comparison | NoVerdict],
) -> Agreement:
    """Return the figures over all rows."""
    compared = [each for each in verdicts if isinstance(each, Comparison)]
    flipped = sum(each.is_flipped for each in compared) if file.kind == "pair" else None
    return agreement(
        [row.human for row in rows], [value_of(each) for each in verdicts], flipped=flipped
    )


def confusion(
    rows: Sequence[LabelledRow], verdicts: Sequence[Verdict | Comparison | NoVerdict]
) -> dict[str, int]:
    """Return how many rows have each pair of verdicts, ``HUMAN -> JUDGE``."""
    values = [value_of(each) for each in verdicts]
    return dict(
        sorted(
            Counter(
                f"{row.human} -> {value.kind if isinstance(value, NoVerdict) else value}"
                for row, value in zip(rows, values, strict=True)
            ).items()
        )
    )


def report(
    result: Agreement,
    rows: Sequence[LabelledRow],
    verdicts: Sequence[Verdict | Comparison | NoVerdict],
) -> list[str]:
    """Return the lines for a terminal."""
    low, high = result.interval
    table = [
        ("rows", str(result.rows)),
        ("with a verdict", str(result.judged)),
        ("refused", str(result.refused)),
        ("unparsable", str(result.unparsable)),
        ("agreement", f"{result.share:.3f} (95 %: {low:.3f} to {high:.3f})"),
        ("kappa", _number(result.kappa)),
    ]
    if result.mean_difference is not None and result.rank_correlation is not None:
        table.append(("mean difference", f"{result.mean_difference:.3f}"))
        table.append(("rank correlation", _number(result.rank_correlation)))
    if result.flipped is not None:
        table.append(("same position twice", str(result.flipped)))
    lines = aligned(table, None)
    lines += [
        "",
        "human -> judge",
        *aligned([(f"  {key}", str(n)) for key, n in confusion(rows, verdicts).items()], None),
    ]
    differing = [
        f"{row.where}: human {row.human}, judge {value.why if isinstance(value, NoVerdict) else value}"
        for row, value in zip(rows, map(value_of, verdicts), strict=True)
        if value != row.human
    ]
    if differing:
        lines += ["", f"rows that differ, {min(SHOWN, len(differing))} of {len(differing)}"]
        lines += [f"  {line}" for line in differing[:SHOWN]]
    return lines


def _number(value: float) -> str:
    return "not defined (one value only)" if math.isnan(value) else f"{value:.3f}"


def records(
    rows: Sequence[LabelledRow], verdicts: Sequence[Verdict | Comparison | NoVerdict]
) -> list[str]:
    """Return a line of JSON for each row."""
    lines = []
    for row, verdict in zip(rows, verdicts, strict=True):
        value = value_of(verdict)
        entry: dict[str, object] = {"row": row.where, "human": row.human}
        if isinstance(value, NoVerdict):
            entry |= {"judge": None, "problem": value.kind, "why": value.why}
        else:
            entry |= {"judge": value}
        if isinstance(verdict, Comparison):
            entry |= {"first": verdict.first.value, "swapped": verdict.swapped.value}
        lines.append(json.dumps(entry))
    return lines
