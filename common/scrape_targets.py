"""Files of a run that tell Prometheus what to scrape (``file_sd_configs``): lists of targets.

Input: the run folder and the targets, each with labels. Output: ``RUN/prometheus.json`` (the
driver) and ``RUN/engines.json`` (SGLang's servers).

Invariants: a reader sees an old or a new list, never a part of one; a file holds targets only while
an attempt runs. The process that writes them empties them; if it was killed, the batch host, the
next attempt or ``rlpost status`` does. Standard library of Python 3.6, for batch hosts.
"""

import json
from pathlib import Path
from typing import List, Mapping, Sequence, Tuple

from common.files import read_regular, write_atomic

DRIVER_TARGETS, ENGINE_TARGETS = "prometheus.json", "engines.json"
NONE = "[]"


def targets_text(targets: Sequence[Tuple[str, Mapping[str, str]]]) -> str:
    """Return the file for addresses ``HOST:PORT``, each with its labels.

    >>> targets_text([("10.0.0.1:30000", {"run": "a", "engine": "0"})])
    '[{"targets": ["10.0.0.1:30000"], "labels": {"run": "a", "engine": "0"}}]'
    """
    return json.dumps([{"targets": [one], "labels": dict(labels)} for one, labels in targets])


def empty_targets(run_folder: Path) -> List[Path]:
    """Empty the files that still name targets; return those that cannot be written."""
    failed = []
    for name in (DRIVER_TARGETS, ENGINE_TARGETS):
        path = run_folder / name
        try:
            if path.exists() and read_regular(path).decode() != NONE:
                write_atomic(path, NONE)
        except (OSError, ValueError):
            failed.append(path)
    return failed
