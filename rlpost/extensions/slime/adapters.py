"""Registers slime's interface: its functions run with rlpost's types.

The driver registers it in its own process, and grading processes do so for it
(``rlpost.algorithm.plugin``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlpost.algorithm import plugin
from rlpost.algorithm.signatures import Kind
from rlpost.extensions.slime import modules
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.filters import (
    RewardPostProcess,
    SlimeBufferFilter,
    SlimeFilter,
    SlimeGrader,
)
from rlpost.extensions.slime.rewards import slime_reward
from rlpost.tasks.reward.grader import Grader


class SlimeAdapters(plugin.Adapters):
    """See ``rlpost.algorithm.plugin.Adapters``."""

    module = __name__

    def prepare_imports(self) -> None:
        """Install the import hook that provides slime's modules."""
        modules.install()

    def refusal(self, kind: Kind) -> str | None:
        """Refuse generate functions where slime itself is installed."""
        if kind != "generate" or not modules.is_installed():
            return None
        return (
            "slime is installed here, and its HTTP client does not know the engines of this run; "
            "uninstall it from the environment of the nodes: rlpost has the names that plug-ins import"
        )

    def arguments(self, settings: Mapping[str, object]) -> Arguments:
        """Return a namespace of the settings."""
        return Arguments(settings)

    def connected(self, args: Any, url: str, api_key: str) -> None:
        """Set the address of the first engine, which stands for all."""
        args.connected(url, api_key)

    def grader(self, grader: Any, wanted: object) -> Grader:
        """Keep the prompts of graded groups if the filter is slime's."""
        return SlimeGrader(grader, wanted) if isinstance(wanted, SlimeFilter) else grader

    def adapt(
        self, kind: Kind, function: Callable[..., object], args: Any, **options: object
    ) -> Callable[..., object]:
        """Wrap a function. ``evaluation`` is an option of generate functions."""
        if kind == "generate":
            from rlpost.extensions.slime.generate import (
                SlimeGenerate,  # needs the tokenizer's library
            )

            return SlimeGenerate(function, args, evaluation=bool(options["evaluation"]))
        if kind == "filter":
            return SlimeFilter(function, args)
        if kind == "buffer filter":
            return SlimeBufferFilter(function, args)
        if kind == "reward post-process":
            return RewardPostProcess(
                function, args, path=str(options["path"]), key=str(options["key"])
            )
        assert kind in ("reward", "group reward"), kind
        return slime_reward(function, args)


def register() -> None:
    """Register slime's interface in this process."""
    plugin.register(SlimeAdapters())
