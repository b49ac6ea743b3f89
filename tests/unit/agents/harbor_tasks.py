"""Small tasks in Harbor's format, written for the tests."""

from __future__ import annotations

from pathlib import Path

TOML = """\
version = "1.0"
[agent]
timeout_sec = 60.0
[verifier]
timeout_sec = 20.0
[environment]
memory_mb = 256
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY words.txt /app/words.txt\n"
SOLUTION = "#!/bin/sh\nwc -l < words.txt > /app/count.txt\n"
TESTS = """\
#!/bin/sh
if [ "$(cat /app/count.txt)" = 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(
    folder: Path,
    name: str = "count",
    *,
    toml: str = TOML,
    dockerfile: str | None = DOCKERFILE,
    tests: str | None = TESTS,
    solution: str | None = SOLUTION,
    more: dict[str, str] | None = None,
) -> Path:
    """Write a task: count the lines of a file. ``more``: further files by their path."""
    files = {
        "task.toml": toml,
        "instruction.md": "Write the number of lines of words.txt to /app/count.txt.\n",
        "environment/words.txt": "c\na\nb\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": tests,
        "solution/solve.sh": solution,
        **(more or {}),
    }
    for path, text in files.items():
        if text is not None:
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return folder / name
