"""``rlpost judge-agreement`` against a server that judges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.errors import ConfigError, DataError
from rlpost.extensions.judge.agreement import main
from tests.unit.tasks.judge.chat_judge import GRADE, PAIR, judging


def run(reply: Callable[[str], Any], *words: str) -> int:
    async def whole() -> int:
        async with judging(reply) as (url, bodies):
            code = await asyncio.to_thread(main, [*words, "--url", url])
            assert {body["key"] for body in bodies} == {"Bearer secret"}
            return code

    return asyncio.run(whole())


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_ENGINES_KEY", "secret")


def write(folder: Path, judge: str, *rows: dict[str, Any]) -> list[str]:
    (folder / "judge.toml").write_text(judge)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / "rows.jsonl"), "--judge", str(folder / "judge.toml")]


def graded(response: str, human: int) -> dict[str, Any]:
    return {"prompt": "q", "label": "l", "response": response, "human": human}


def test_grades_are_compared_and_a_low_agreement_fails(tmp_path: Path, capsys: Any) -> None:
    rows = [graded("a", 5), graded("a", 4), graded("b", 1), graded("?", 3), graded("x", 3)]
    words = write(tmp_path, GRADE, *rows)
    out = tmp_path / "verdicts.jsonl"

    def reply(question: str) -> str:
        if "Answer: ?" in question:
            return "Verdict: none"
        if "Answer: a" in question:
            return "Verdict: 5"
        return "Verdict: 1" if "Answer: b" in question else "?"

    assert run(reply, *words, "--min-agreement", "0.5", "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "agreement         0.667 (95 %: 0.208 to 0.939)" in text
    assert "refused           1\nunparsable        1\n" in text
    assert "  4.0 -> 5.0 " in text and "rows.jsonl, line 2: human 4.0, judge 5.0" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["judge"] for line in lines] == [5.0, 5.0, 1.0, None, None]
    assert [line.get("problem") for line in lines][3:] == ["refused", "unparsable"]
    assert run(reply, *words, "--min-agreement", "0.7") == 1
    assert "agreement 0.667 is less than --min-agreement 0.7" in capsys.readouterr().out


def test_pairs_are_judged_in_both_orders_and_a_flip_is_a_tie(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {"prompt": "q", "response_a": "good", "response_b": "bad", "human": "A"},
        {"prompt": "q", "response_a": "bad", "response_b": "good", "human": "b"},
        {"prompt": "q", "response_a": "same", "response_b": "same", "human": "tie"},
    ]

    def reply(question: str) -> str:
        return "Verdict: B" if "A: bad" in question else "Verdict: A"

    assert run(reply, *write(tmp_path, PAIR, *rows), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["share"], found["flipped"], found["kappa"]) == (1.0, 1, 1.0)
    assert found["counts"] == {"a -> a": 1, "b -> b": 1, "tie -> tie": 1}


def test_wrong_rows_and_options_are_named(tmp_path: Path) -> None:
    words = write(tmp_path, GRADE, graded("a", 7))
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: 'human' is 7; the verdict is '7'"):
        main([*words, "--url", "http://h/v1"])
    words = write(tmp_path, GRADE, {"prompt": "q", "response": "a"})
    with pytest.raises(DataError, match="no key 'human'; it has prompt, response"):
        main([*words, "--url", "http://h/v1"])
    with pytest.raises(ConfigError, match="--url 'h:1': must start with http"):
        main([*words, "--url", "h:1"])
    with pytest.raises(ConfigError, match="--min-agreement 2: must be from 0 to 1"):
        main([*words, "--url", "http://h/v1", "--min-agreement", "2"])
