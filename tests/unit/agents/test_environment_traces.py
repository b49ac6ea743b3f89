"""Episode records: written in a thread, read despite damage, and shown in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.run_folder import create_run_folder
from rlpost.config.load import dump, load
from rlpost.extensions.agents.episode_file import MAX_TEXT, EpisodeFile
from rlpost.extensions.watching.report.episodes import chosen, read_episodes, summary
from rlpost.extensions.watching.report.write import write_report

HOSTILE = "</pre><script>alert(1)</script>"


def record(
    prompt_id: int, *, env: str = "calc", reward: float = 1.0, **more: Any
) -> dict[str, Any]:
    scored = {
        "prompt_id": prompt_id,
        "index": 0,
        "env": env,
        "began": 1.5,
        "seconds": 2.0,
        "prompt": f"the prompt {prompt_id}",
        "outcome": "scored",
        "reward": reward,
        "finish": ["stop"],
        "tokens": 30,
        "trained_tokens": 20,
        "versions": [[3, 20], [4, 10]],
        "turns": [
            {
                "text": f"call {HOSTILE}",
                "tokens": 20,
                "reward": 0.25,
                "seconds": 1.0,
                "env_seconds": 0.5,
                "said": "the tool said 12",
                "tool": "calculator",
            }
        ],
    }
    return scored | more


def failed(prompt_id: int, outcome: str = "failed") -> dict[str, Any]:
    left = {key: value for key, value in record(prompt_id).items() if key != "reward"}
    return left | {"outcome": outcome, "why": "the sandbox is gone", "turns": []}


def test_records_are_appended_and_long_texts_are_truncated(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for number in range(2):  # as two attempts of a job
        file = EpisodeFile(path)
        file.write(record(number, prompt="x" * (3 * MAX_TEXT)))
        file.close()
    found = read_episodes(path)
    assert [each["prompt_id"] for each in found] == [0, 1]
    assert len(found[0]["prompt"]) < 1.1 * MAX_TEXT and "characters ..." in found[0]["prompt"]
    assert path.stat().st_mode & 0o077 == 0


def test_damaged_lines_are_skipped_and_the_last_record_of_an_episode_counts(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    lines = [json.dumps(each) for each in (failed(1), record(2), record(1, reward=0.5))]
    path.write_text("\n".join([lines[0], "[1]", lines[1][:40], "null", *lines[1:]]) + "\n")
    found = read_episodes(path)
    assert [(each["prompt_id"], each["outcome"]) for each in found] == [
        (2, "scored"),
        (1, "scored"),
    ]
    assert read_episodes(tmp_path / "gone.jsonl") == []


def test_a_summary_counts_by_environment() -> None:
    records = [record(1), record(2, reward=0.0), failed(3), failed(4, "timeout")]
    calc, other = summary([*records, record(5, env="other")])
    assert (calc["env"], other["env"]) == ("calc", "other")
    assert (calc["episodes"], calc["failed"], calc["timeouts"]) == (4, 2, 1)
    assert (calc["reward"], calc["turns"], calc["tokens"]) == (0.5, 1.0, 30.0)


def test_the_report_shows_the_best_the_worst_and_the_failed_episodes() -> None:
    records = [record(number, reward=number % 3) for number in range(30)] + [failed(99)]
    shown = chosen(records, most=6)
    assert shown[0]["prompt_id"] == 99
    assert [each["reward"] for each in shown[1:]] == [2, 0, 2, 0]


def test_the_report_has_the_conversation_of_an_episode(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", dump(load([], {}).config))
    info = {"verifier": f"test.sh exited {HOSTILE}"}
    lines = [record(1), failed(2), record(3, evaluation="held", info=info)]
    (run.root / "episodes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = write_report(run).read_text()
    for words in (
        "Episodes",
        "the tool said 12",
        "calculator",
        "the sandbox is gone",
        "held",
        "test.sh exited",
    ):
        assert words in page, words
    assert "weights 3, 4" in page and "20 trained" in page
    assert HOSTILE not in page and "alert(1)" in page, "escaped"


def test_a_report_without_episodes_has_no_such_section(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", dump(load([], {}).config))
    assert "#episodes" not in write_report(run).read_text()
