"""The line of a failure's text that names the error. Pure.

Input: the cause of a verdict: a sentence, or the last lines of a log with records, wrappers and
tracebacks. Output: one line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from common.log_format import as_text

_WRAPPER = re.compile(r"; its last lines:$|; srun said:$|\bfailed:$|; the end of \S+:$")
"""A first line that only names the failed process; the error is below it."""
_RECORD = re.compile(
    r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)? (?P<level>[A-Z]+) (?:\w+\[[^\]]*\] )?"
)
"""The head of a record: date, level and, of an agent, the process (``common.log_format``)."""
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exit|Interrupt|Died|Failed|Lost|Fenced|Hang)"
    r"|(?:[A-Z]\w*)?Exception|Hang)"
    r"(?:: .+)?$"
)
_ERRORS = ("ERROR", "CRITICAL")


def error_line(text: str) -> str:
    """Return the line that names the error.

    That is the first line, unless it is a wrapper. Then it is the last exception of the
    last traceback, or the first line of the last error in the log, or the last line.

    >>> error_line("the driver ended with exit code 1; its last lines:\\n12:00:00.1 INFO up\\n"
    ...            "Traceback (most recent call last):\\n  File x\\nValueError: no such layer")
    'ValueError: no such layer'
    >>> error_line("n01 is gone: no heartbeat\\nlog")
    'n01 is gone: no heartbeat'
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not _WRAPPER.search(lines[0]):
        return lines[0].strip() if lines else ""
    log = [part for line in lines[1:] for part in as_text(line).splitlines() if part.strip()]
    records = _records(log)
    errors = [record for record in records if _level(record) in _ERRORS]
    unlogged = _exception(_after_records(records))
    if unlogged is not None:
        return unlogged
    if not errors:
        return (_exception(log) or log[-1]).strip()
    message = _RECORD.sub("", errors[-1][0]).strip()
    if len(errors[-1]) > 1 and (_WRAPPER.search(message) or message.endswith(":")):
        return _exception(errors[-1]) or errors[-1][-1].strip()
    return message or _exception(errors[-1]) or errors[-1][-1].strip()


def deciding_line(log: str) -> str:
    """Return the line of a process's last output that names its error, never a frame of a traceback.

    >>> deciding_line('  File "click/core.py", line 1, in invoke\\nValueError: too small\\nbye')
    'ValueError: too small'
    """
    return error_line(f"the process failed:\n{log}")


def with_remedy(text: str) -> str:
    """Return the line that names the error, and the lines that say what to do.

    >>> with_remedy("the image /x does not exist\\nremedy: correct --container-image\\nlog")
    'the image /x does not exist\\nremedy: correct --container-image'
    """
    remedies = [line for line in text.splitlines()[1:] if line.startswith("remedy: ")]
    return "\n".join([error_line(text), *remedies])


def _records(log: Sequence[str]) -> list[list[str]]:
    """Group lines by the record that they belong to; lines before the first are one as well."""
    found: list[list[str]] = []
    for line in log:
        if _RECORD.match(line) or not found:
            found.append([])
        found[-1].append(line)
    return found


def _after_records(records: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return the lines after the last record, such as a traceback.

    Empty if that record is an error.
    """
    if not records or _level(records[-1]) in _ERRORS:
        return ()
    return records[-1][1:] if _RECORD.match(records[-1][0]) else records[-1]


def _level(record: Sequence[str]) -> str:
    found = _RECORD.match(record[0])
    return found["level"] if found else ""


def _exception(lines: Sequence[str]) -> str | None:
    """Return the last line that names an exception; None without one."""
    for line in reversed(lines):
        text = line.strip()
        if _EXCEPTION.match(text):
            return text
    return None
