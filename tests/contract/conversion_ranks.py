"""Convert weights to torch_dist and back, on ranks that are real processes.

Each direction has its own layout; the models are converted one after the other.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.contract.actor_ranks import in_processes
from tests.ports import free_ports
from tests.settings import rank_config


@dataclass(frozen=True)
class Conversion:
    """A conversion from Hugging Face to torch_dist and back.

    At the layout ``there`` Hugging Face weights are read and torch_dist is written. At the layout
    ``back`` that is read and Hugging Face weights are written.
    """

    model: str
    there: dict[str, Any]
    back: dict[str, Any]


def convert(conversions: Sequence[Conversion], folder: str, *, num_ranks: int) -> None:
    """Run all conversions in one world.

    ``folder`` holds the models, as MODEL, and receives MODEL_torch_dist and MODEL_back.
    """
    ports = free_ports(2 * len(conversions))
    in_processes(
        _rank_main, [(conversions, folder, (rank, num_ranks, ports)) for rank in range(num_ranks)]
    )


def _rank_main(
    pipe: Connection,
    conversions: Sequence[Conversion],
    folder: str,
    place: tuple[int, int, list[int]],
) -> None:
    from rlpost.extensions.converting.conversion import Converter, with_parts_of
    from rlpost.trainer.parallel import Rendezvous

    rank, num_ranks, ports = place
    remaining = iter(ports)
    try:
        for each in conversions:
            original, kept = f"{folder}/{each.model}", f"{folder}/{each.model}_torch_dist"
            for layout, forward in ((each.there, True), (each.back, False)):
                settings = rank_config(original, distributed_timeout_minutes=2, **layout)
                settings = with_parts_of(settings, original if forward else kept)
                meeting = Rendezvous(
                    rank, num_ranks, "127.0.0.1", next(remaining), secret="of the conversion"
                )
                converter = Converter(settings, meeting)
                if forward:
                    converter.from_hugging_face(original)
                    converter.to_torch_dist(kept)
                else:
                    converter.from_torch_dist(kept)
                    converter.to_hugging_face(f"{folder}/{each.model}_back")
                converter.close()
        pipe.send((True, None))
    except Exception:
        pipe.send((False, traceback.format_exc()))
