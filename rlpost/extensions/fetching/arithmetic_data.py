"""Write a prompt set of two-digit additions, the smallest task on which a policy visibly learns.

Input: a folder. Output: ``train.jsonl`` and ``heldout.jsonl`` in it, one problem a line, for
example ``{"prompt": "Q:07+31=", "label": "38"}``; with ``--as questions`` in words for a chat model.
Every pair of numbers below 50 appears exactly once, in one of the two files. ``messages.jsonl`` has
the problems of the first as messages, for supervised training. The same seed always gives the same
bytes; files with the right content are not rewritten.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from common.files import write_atomic

NUM_ADDENDS = 50  # sums stay below 100
NUM_HELDOUT = 200
FILES = ("train.jsonl", "heldout.jsonl", "messages.jsonl")


FORMS = {
    "terms": "Q:{left:02d}+{right:02d}=",
    "questions": "What is {left} + {right}? Answer with the number only.",
}
"""The text of a prompt, by the value of --as."""
Row = dict[str, Any]


def problems(seed: int, form: str = "terms") -> tuple[list[Row], list[Row]]:
    """All problems as (train, heldout), shuffled by ``seed``; ``form`` is a key of FORMS."""
    every: list[Row] = [
        {"prompt": FORMS[form].format(left=left, right=right), "label": str(left + right)}
        for left in range(NUM_ADDENDS)
        for right in range(NUM_ADDENDS)
    ]
    random.Random(seed).shuffle(every)
    return every[NUM_HELDOUT:], every[:NUM_HELDOUT]


def as_messages(problem: Row) -> Row:
    """The problem and its answer as a conversation."""
    turns = (("user", problem["prompt"]), ("assistant", problem["label"]))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def holds_only(path: Path, lines: list[Row]) -> bool:
    """Whether a file is missing or has only these lines; another seed changes only their order."""
    known = {json.dumps(line) for line in lines}
    return not path.exists() or set(path.read_text().splitlines()) <= known


def write_lines(path: Path, lines: list[Row]) -> bool:
    """Replace ``path`` atomically; False if it already has these lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.is_file() and path.read_text() == text:
        return False
    write_atomic(path, text, mode=0o666)
    return True


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("assets/tiny"), help="folder of the two files"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the order")
    parser.add_argument(
        "--as", choices=FORMS, default="terms", dest="form", help="form of a prompt"
    )
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    train, heldout = problems(arguments.seed, arguments.form)
    rows = dict(zip(FILES, (train, heldout, list(map(as_messages, train))), strict=True))
    for name in rows:
        every = [*train, *heldout]
        if not holds_only(arguments.out / name, [*every, *map(as_messages, every)]):
            sys.exit(f"--out {arguments.out}: {name} exists with other content; use another folder")
    for name, lines in rows.items():
        written = write_lines(arguments.out / name, lines)
        print(
            f"{arguments.out / name}: {len(lines)} problems{'' if written else ', already there'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
