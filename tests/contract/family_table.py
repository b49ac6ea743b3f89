"""Print the table of families in docs/benchmarks.md.

Usage: ``python -m tests.contract.family_table [NAME ...]``

Each row is a tiny random model of a family. It shows the largest difference of packed logits from
transformers' at several layouts, relative to the largest logit where that is above 1. It also shows
whether an export, and a conversion to torch_dist and back at another layout, return the weights bit
for bit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.contract.actor_ranks import look, run_ranks
from tests.contract.conversion_ranks import Conversion, convert
from tests.contract.families import (
    FAMILIES,
    WITH_TENSOR_PARALLEL,
    load_folder,
    load_model,
    make_family,
)
from tests.contract.samples import STEPS
from tests.settings import rank_config

TP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}
EP: dict[str, Any] = {"expert_model_parallel_size": 2}
LIMIT = 1e-5


def expected_logits(folder: Path) -> torch.Tensor:
    """Return transformers' logits of the samples, computed one sequence at a time."""
    model = load_model(folder)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([sample.token_ids])).logits[0] for sample in STEPS[0]])


def difference(folder: Path, layout: dict[str, Any], num_ranks: int) -> tuple[float, bool]:
    """Return the difference of the logits, and whether the export equals the model bit for bit."""
    settings, expected = (
        rank_config(str(folder), distributed_timeout_minutes=2, **layout),
        expected_logits(folder),
    )
    with tempfile.TemporaryDirectory() as export:
        seen = run_ranks(look, num_ranks, settings, samples=STEPS[0], export=export)
        same = equal(Path(export), folder)
    logits = [
        torch.from_numpy(one["logits"])[: expected.size(0)]
        for one in seen
        if one["logits"] is not None
    ]
    return max((ours - expected).abs().max().item() for ours in logits) / max(
        1.0, expected.abs().max().item()
    ), same


def tensor_parallel(family: str) -> dict[str, Any]:
    """Return the settings of two tensor-parallel ranks, with those that the family adds."""
    return TP | WITH_TENSOR_PARALLEL.get(family, {})


def equal(ours: Path, theirs: Path) -> bool:
    """Whether two folders hold the same tensors."""
    found, expected = load_folder(ours), load_folder(theirs)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def main(chosen: list[str]) -> int:
    """Print the table; return 1 if a difference is too large or a bit is lost."""
    failed, families = False, chosen or list(FAMILIES)
    print("| model | one process | TP 2, SP | PP 2, uneven | EP 2 | export | torch_dist and back |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for family in families:
            make_family(root / family, family)
        convert(
            [Conversion(family, tensor_parallel(family), PP) for family in families],
            name,
            num_ranks=2,
        )
        for family in families:
            layouts = [
                ({}, 1),
                (tensor_parallel(family), 2),
                (PP, 2),
                *([(EP, 2)] if "moe" in family else []),
            ]
            found = [difference(root / family, layout, num_ranks) for layout, num_ranks in layouts]
            returned = equal(root / f"{family}_back", root / family)
            exported = all(same for _, same in found)
            failed |= max(value for value, _ in found) >= LIMIT or not exported or not returned
            cells = [*(f"{value:.1e}" for value, _ in found), *([""] if len(found) == 3 else [])]
            cells += ["same bits" if good else "differs" for good in (exported, returned)]
            print(f"| {family} | {' | '.join(cells)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
