"""The facts of a report, read from the folder of a run.

Input: a run folder, possibly incomplete. Output: ``RunFacts``, plain values. Missing or damaged
files lead to empty fields, so a report of an incomplete run never fails. No file that may hold a
key is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import Any, cast

from common.attempt import DRIVER_LOG, PREFLIGHT_JSON, VERDICT_JSON
from common.error_lines import with_remedy
from common.files import read_object, tail_text, text_or_empty
from common.ledger import Entry
from common.log_format import as_text
from common.run_folder import RunFolder
from rlpost.algorithm.evaluation_statistics import mean
from rlpost.config.keys import KEYS
from rlpost.config.masking import masked
from rlpost.config.tree import Config
from rlpost.extensions.watching.goodput import Goodput, goodput
from rlpost.extensions.watching.gpu_layout import GpuLayout
from rlpost.extensions.watching.report.episodes import read_episodes
from rlpost.extensions.watching.report.images import Picture, pictures
from rlpost.observe.samples import FILE_NAME, FIXED_NAME, MAX_ANSWER, RecordedAnswer, cut
from rlpost.observe.writer import read_lines, read_metrics

MAX_SAMPLE_STEPS = 60
RECORDED_GROUPS = 2  # of each recorded step, with the best and the worst answer of each
MAX_ATTEMPTS = 20  # whose hosts are shown, the newest
MAX_AGENT_LOGS = 4  # of an attempt that the page links to
MAX_FIXED_STEPS = 20
TAIL_BYTES, TAIL_LINES = 1 << 14, 60
_OPEN_OR_OVER = ("attempt", "started", "verdict", "done")
_NO_FAILURE = ("done", "requeue")
_DATED = re.compile(r"(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d\.\d{3} ")


@dataclass(frozen=True, slots=True)
class RecipeSetting:
    """One line of the resolved recipe; values are JSON."""

    key: str
    value: str
    default: str

    @property
    def differs(self) -> bool:
        """From its default."""
        return self.value != self.default


@dataclass(frozen=True, slots=True)
class HostCheck:
    """One check of an attempt's preflight on one host."""

    attempt: str
    host: str
    name: str
    level: str
    found: str


@dataclass(frozen=True, slots=True)
class RunFailure:
    """How the newest attempt failed: its verdict, and the end of the most informative log."""

    attempt: str
    verdict: str
    cause: str
    log: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run.

    ``samples`` are records of ``rlpost.observe.samples`` with their step; ``episodes`` those of
    ``RunFolder.episodes``; ``network`` is the text
    of each agent of the newest attempt, by host. ``fixed`` are answers to prompts of evaluations
    that are asked at every evaluation; ``pictures`` are the images of all these answers, by
    digest. ``logs`` are the files of each attempt that has any, by
    its name; ``failure`` is set when the newest attempt failed.
    """

    name: str
    folder: str
    written: datetime
    lines: tuple[Mapping[str, float], ...] = ()
    events: tuple[Entry, ...] = ()
    settings: tuple[RecipeSetting, ...] = ()
    checks: tuple[HostCheck, ...] = ()
    network: Mapping[str, str] | None = None
    samples: tuple[RecordedAnswer, ...] = ()
    episodes: tuple[Mapping[str, object], ...] = ()
    code: str = ""
    layout: GpuLayout | None = None
    fixed: tuple[RecordedAnswer, ...] = ()
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    logs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    failure: RunFailure | None = None

    @property
    def num_steps(self) -> object:
        """Value of --num-rollout; None without a run.json."""
        found = [one.value for one in self.settings if one.key == "rollout.num_rollout"]
        return json.loads(found[0]) if found else None

    @property
    def goodput(self) -> Goodput | None:
        """Up to the time of the report."""
        return goodput(self.events, self.lines, self.layout, self.written)


def read_facts(run: RunFolder) -> RunFacts:
    """Read the current facts of a run."""
    settings = masked(read_object(run.run_json))
    attempts = _attempts(run.attempts)
    code = read_object(run.root / "code.json")
    events = tuple(entry for entry in run.ledger.read() if "time" in entry and "event" in entry)
    by_step = _samples(run.report / FILE_NAME, MAX_SAMPLE_STEPS)
    samples = tuple(chain(*reversed(by_step)) if by_step else _recorded(settings))
    fixed = tuple(chain(*_samples(run.report / FIXED_NAME, MAX_FIXED_STEPS)))
    return RunFacts(
        name=run.root.name,
        folder=str(run.root),
        written=datetime.now(UTC),
        lines=tuple(read_metrics(run.metrics)),
        events=events,
        settings=compared(settings),
        checks=tuple(
            check
            for path in attempts[-MAX_ATTEMPTS:]
            for check in checks_of(path.name, read_object(path / PREFLIGHT_JSON))
        ),
        network={
            path.stem.removeprefix("agent-"): network_table(text_or_empty(path))
            for path in sorted((run.attempts / "latest").glob("agent-*.log"))
        },
        samples=samples,
        episodes=tuple(read_episodes(run.episodes)),
        code=_commit(code),
        layout=GpuLayout.of_settings(settings),
        fixed=fixed,
        pictures=pictures(run.root, (*fixed, *samples)),
        logs={path.name: logs for path in attempts if (logs := _log_names(path))},
        failure=_failure(run, events),
    )


def _commit(code: Mapping[str, object]) -> str:
    if not code.get("commit"):
        return ""
    return f"{code['commit']}{', with changes' if code.get('is_dirty') else ''}"


def compared(settings: Mapping[str, object]) -> tuple[RecipeSetting, ...]:
    """Every setting of a run.json beside its default; variables that hold a key are left out."""
    defaults = Config().model_dump(mode="json")
    found = []
    for table, values in settings.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, dict):
                value = {name: one for name, one in value.items() if name not in KEYS}
            default = defaults.get(table, {}).get(key)
            found.append(RecipeSetting(f"{table}.{key}", json.dumps(value), json.dumps(default)))
    return tuple(found)


def checks_of(attempt: str, preflight: Mapping[str, object]) -> list[HostCheck]:
    """The checks of a preflight.json, host by host."""
    hosts = preflight.get("hosts", {})
    return [
        HostCheck(attempt, host, check["name"], check["level"], check["found"])
        for host, of_host in (hosts.items() if isinstance(hosts, dict) else ())
        for check in (of_host.get("checks") or () if isinstance(of_host, dict) else ())
        if isinstance(check, dict) and {"name", "level", "found"} <= check.keys()
    ]


def network_table(log: str) -> str:
    """Return the lines below "network of this node" in an agent's log."""
    block: list[str] = []
    inside = False
    for line in "\n".join(map(as_text, log.splitlines())).splitlines():
        if _DATED.match(line):
            if inside:
                break
            inside = line.endswith("network of this node")
        elif inside:
            block.append(line)
    return "\n".join(block)


def _attempts(folder: Path) -> list[Path]:
    """The folders of all attempts in order."""
    paths = [path for path in folder.glob("*") if path.name.isdecimal()]
    return sorted(paths, key=lambda path: int(path.name))


def _log_names(attempt: Path) -> tuple[str, ...]:
    """The driver's log and those of the agents, as far as they exist."""
    found = {path.name for path in attempt.glob("*.log")}
    agents = sorted(name for name in found if name.startswith("agent-"))[:MAX_AGENT_LOGS]
    return tuple([*({DRIVER_LOG} & found), *agents])


def _failure(run: RunFolder, events: Sequence[Entry]) -> RunFailure | None:
    """The newest verdict, if it is a failure, and no later attempt has begun."""
    newest = next((one for one in reversed(events) if one["event"] in _OPEN_OR_OVER), None)
    if newest is None or newest["event"] != "verdict" or newest.get("verdict") in _NO_FAILURE:
        return None
    name = str(newest.get("attempt"))
    attempt = run.attempts / name
    text = newest.get("cause") or read_object(attempt / VERDICT_JSON).get("cause") or ""
    cause = with_remedy(str(text))  # the log is below it
    logs = [attempt / name for name in _log_names(attempt) if _tail(attempt / name)]
    log, tail = "", ""
    if logs:
        log, tail = f"../attempts/{name}/{logs[0].name}", _tail(logs[0])
    return RunFailure(name, str(newest.get("verdict")), cause, log, tail)


def _tail(path: Path) -> str:
    """The last lines of a file, at most TAIL_BYTES."""
    try:
        text = tail_text(path, TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def _samples(path: Path, most: int) -> list[list[RecordedAnswer]]:
    """Read the recorded answers of at most ``most`` steps, evenly spread, by step."""
    lines = list(read_lines(path).lines)
    if len(lines) > most:
        last = len(lines) - 1
        lines = [lines[round(n * last / (most - 1))] for n in range(most)]
    return [_graded_samples(line) for line in lines]


def _graded_samples(line: Mapping[str, Any]) -> list[RecordedAnswer]:
    return [
        cast("RecordedAnswer", {"step": line["step"], **sample})
        for sample in line.get("samples") or ()
        if isinstance(sample, dict) and isinstance(sample.get("reward"), (int, float))
    ]


def _recorded(settings: Mapping[str, Any]) -> list[RecordedAnswer]:
    """Read groups of the newest recordings of --save-debug-rollout-data, without prompts."""
    template = (settings.get("debug") or {}).get("save_debug_rollout_data")
    if not isinstance(template, str) or "{rollout_id}" not in template:
        return []
    path = Path(template)
    before, _, after = path.name.partition("{rollout_id}")
    numbers = []
    for file in path.parent.glob("*"):
        middle = file.name[len(before) : len(file.name) - len(after)]
        if file.name == f"{before}{middle}{after}" and middle.isdecimal():
            numbers.append((int(middle), file))
    answers = []
    for number, file in sorted(numbers, reverse=True)[:MAX_SAMPLE_STEPS]:
        for text in text_or_empty(file).split("\n")[:RECORDED_GROUPS]:
            try:
                group = json.loads(text)
                ordered = sorted(
                    _recorded_answers(number, group), key=lambda answer: -answer["reward"]
                )
                answers += ordered[:1] + ordered[1:][-1:]
            except (ValueError, KeyError, TypeError):
                continue
    return answers


def _recorded_answers(step: int, group: Mapping[str, Any]) -> list[RecordedAnswer]:
    """Return the answers of a recorded group; the samples of one answer have one index."""
    answers: list[RecordedAnswer] = []
    for _, answer_samples in groupby(
        group["samples"], key=lambda scored: scored["sample"]["index"]
    ):
        scored = list(answer_samples)
        samples = [one["sample"] for one in scored]
        answers.append(
            {
                "step": step,
                "prompt_id": samples[0]["prompt_id"],
                "answer": cut("\n".join(sample["text"] for sample in samples), MAX_ANSWER),
                "label": samples[0].get("label"),
                "reward": mean([one["reward"] for one in scored]),
                "num_tokens": sum(len(sample["response_ids"]) for sample in samples),
                "finish": samples[-1]["finish_reason"],
            }
        )
    return answers
