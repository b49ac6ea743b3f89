"""Engines that were started outside the run (``--rollout-external-engine-addrs``).

Input: their addresses, the key, and the arguments of a server that the run needs. Output: addresses
with the number of ranks of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.bounded import for_each
from rlpost.engines.engine_client import EngineClient
from rlpost.errors import RolloutError
from rlpost.types import EngineAddress

MAY_BE_NONE = "enable_multimodal"
"""SGLang (0.5.21) serves images without it for all models whose encoder the trainer has."""


async def external_addresses(
    urls: Sequence[str], api_key: str, required: Mapping[str, object]
) -> tuple[EngineAddress, ...]:
    """Query external engines for their numbers of ranks.

    Args:
        required: arguments that each server must have been started with.

    Raises:
        RolloutError: an engine does not answer, or has another value of an argument.
    """

    async def queried(url: str) -> EngineAddress:
        address = url if "://" in url else f"http://{url}"
        info = await EngineClient(address, api_key).server_info()
        for name, value in required.items():
            actual = info.get(name)
            if actual != value and not (actual is None and name == MAY_BE_NONE):
                flag = f"--{name.replace('_', '-')}"
                raise RolloutError(
                    f"--rollout-external-engine-addrs {url}: its {flag} is {actual}, and images need {value}; "
                    f"start the engine with {flag}" + ("" if value is True else f" {value}")
                )
        return EngineAddress(
            address, num_gpus=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
        )

    return tuple(await for_each(queried, urls))
