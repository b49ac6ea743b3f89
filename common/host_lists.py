"""Expand Slurm's compact host lists as ``scontrol show hostnames``; find hosts in srun's messages.

Pure, Python 3.6.
"""

import itertools
import re
from typing import Dict, List, Sequence, Tuple

MAX_HOSTS = 65536  # a longer list is a typing error and would exhaust memory

_ITEM = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class HostListError(ValueError):
    """A host list cannot be read."""


def expand(text: str) -> Tuple[str, ...]:
    """Host names in Slurm's order: ``n[01-03,07],gpu-a1`` is n01 n02 n03 n07 gpu-a1.

    Duplicates are kept. Numbers are padded to the width of the first number of their range. If a
    name has several brackets, the last one varies fastest.

    Raises:
        HostListError: shows the list and the invalid part.
    """
    hosts: List[str] = []
    position = 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise HostListError(
                f"host list {text!r}: no host name at {text[position : position + 20]!r}"
            )
        position = match.end()
        if position < len(text):
            if text[position] != "," or position + 1 == len(text):
                raise HostListError(
                    f"host list {text!r}: {text[position:]!r} cannot follow {match[0]!r}"
                )
            position += 1
        hosts += _expand_item(match[0], text)
        if len(hosts) > MAX_HOSTS:
            raise HostListError(f"host list {text!r}: more than {MAX_HOSTS} hosts")
    return tuple(hosts)


def _expand_item(item: str, text: str) -> List[str]:
    parts = re.split(r"\[([^\]]*)\]", item)  # literal, ranges, literal, ...
    choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
    # several brackets multiply: one host more than the limit is enough for the error
    found = itertools.islice(itertools.product(*choices), MAX_HOSTS + 1)
    return ["".join(words) for words in found]


def _numbers(ranges: str, text: str) -> List[str]:
    numbers: List[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostListError(f"host list {text!r}: {part!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise HostListError(
                f"host list {text!r}: the range {part!r} runs backwards or is longer than {MAX_HOSTS}"
            )
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


# Lines of srun (slurm, _task_finish in src/srun/launch.c; src/api/step_launch.c): a node that did
# not accept its tasks, and tasks that ended. Hosts are a compact list.
_OF_HOSTS = (
    re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M),
    re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$", re.M),
)
# A task, by its number, that its node could not start.
_OF_TASK = re.compile(r"^srun: error: task (\d+) launch failed: (.+)$", re.M)


def failed_tasks(launch: str, hosts: Sequence[str]) -> Dict[str, str]:
    """Hosts whose task has failed, each with srun's message.

    srun lists only failed tasks, not those that exited with 0.

    Args:
        launch: output of srun.
        hosts: hosts of the step, by task number.
    """
    failures = {
        hosts[int(task)]: how for task, how in _OF_TASK.findall(launch) if int(task) < len(hosts)
    }
    for pattern in _OF_HOSTS:
        for host_list, how in pattern.findall(launch):
            try:
                failures.update(dict.fromkeys(expand(host_list), how))
            except HostListError:  # another message of the same form
                continue
    return failures
