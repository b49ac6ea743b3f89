"""The arithmetic problems: each pair once, disjoint train and held-out files, fixed by a seed."""

import json
import subprocess
import sys
from pathlib import Path

from rlpost.extensions.fetching.arithmetic_data import as_messages
from rlpost.tasks.prompts import PromptFields, check_prompt_file

ROOT = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, "-m", "rlpost.extensions.fetching.arithmetic_data"]


def make(out: Path, *more: str) -> str:
    command = [*TOOL, "--out", str(out), *more]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_every_pair_is_in_one_of_the_two_files_with_its_sum(tmp_path: Path) -> None:
    make(tmp_path)
    assert check_prompt_file(tmp_path / "train.jsonl", PromptFields("prompt", "label")) == 2300
    assert check_prompt_file(tmp_path / "heldout.jsonl", PromptFields("prompt", "label")) == 200
    lines = [
        line
        for name in ("train", "heldout")
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    problems = [json.loads(line) for line in lines]
    pairs = [
        tuple(map(int, problem["prompt"].removeprefix("Q:").removesuffix("=").split("+")))
        for problem in problems
    ]
    assert len(set(pairs)) == len(pairs) == 2500
    assert all(
        problem["label"] == str(sum(pair)) for problem, pair in zip(problems, pairs, strict=True)
    )
    conversations = (tmp_path / "messages.jsonl").read_text().splitlines()
    assert list(map(json.loads, conversations)) == list(map(as_messages, problems[:2300]))


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    assert make(tmp_path).count("already there") == 3
    assert {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()
    } == before


def test_prompts_of_another_seed_are_replaced_and_other_files_are_kept(
    tmp_path: Path,
) -> None:
    make(tmp_path)
    before = (tmp_path / "train.jsonl").read_bytes()
    make(tmp_path, "--seed", "1")
    assert (tmp_path / "train.jsonl").read_bytes() != before
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "mine"}\n')
    command = [*TOOL, "--out", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1 and "heldout.jsonl exists with other content" in refused.stderr
    assert (tmp_path / "heldout.jsonl").read_text() == '{"prompt": "mine"}\n'
