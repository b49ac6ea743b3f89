"""Write the lines of ``metrics.jsonl`` to the mirrors of extensions as well.

Input: the settings, run folder and cluster of an attempt.
Output: a function that writes a line to every enabled mirror, valid inside the context.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from pathlib import Path

from common.cluster import Cluster
from rlpost.config import extensions
from rlpost.config.tree import Config

logger = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, float]], None]
"""Write the metrics of a step to a mirror; it logs its failures and raises nothing."""


@contextmanager
def mirrors(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """Yield a function that writes one line to all enabled mirrors; None if none is enabled.

    Raises ConfigError.
    """
    with ExitStack() as open_ones:
        opened = [
            open_ones.enter_context(extensions.load(mirror.open)(config, run_folder, cluster))
            for mirror in extensions.mirrors().values()
        ]
        writes: list[Write] = [write for write in opened if write is not None]
        refused: set[str] = set()

        def write(step: int, metrics: Mapping[str, float]) -> None:
            values = numbers(metrics)
            for name in metrics.keys() - values.keys() - refused:
                refused.add(name)
                logger.warning(
                    "metric %s is %.60r, no number: no mirror has it", name, metrics[name]
                )
            for one in writes:
                one(step, values)

        yield write if writes else None


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are numbers: a mirror may fail on a whole line for one other value.

    >>> numbers({"a": 1, "b": "1", "c": None, "d": float("nan")})
    {'a': 1.0, 'd': nan}
    """
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
