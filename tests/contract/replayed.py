"""Compare routing replay at the layouts of a mixture of experts with forced routes in transformers.

``python -m tests.contract.replayed [NAME ...]`` runs the named layouts, or all of them, and prints
the table of docs/actor.md.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpost.types import TrainSample
from tests.contract import forced_routes
from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.contract.layouts import LAYOUTS, LIMIT, MOE, Layout, pp
from tests.contract.replay_ranks import replay
from tests.contract.samples import STEPS
from tests.settings import rank_config

TEMPERATURE = 0.8
SAMPLES = STEPS[0]
CASES = [
    Layout("moe-alone", MOE, 1),
    *(layout for layout in LAYOUTS if layout.model == MOE),
    Layout("qwen3-moe-alone", "qwen3-moe", 1),
    Layout("qwen3-moe-pp2", "qwen3-moe", 2, pp(2)),
]
BY_NAME = {layout.name: layout for layout in CASES}
COMPARED = (
    "gate.weight", "q_proj.weight", "layernorm.weight", "embed_tokens.weight", "lm_head.weight", "model.norm.weight",
)  # fmt: skip
"""Endings of the names of weights whose gradients are compared.

Experts are left out: transformers keeps them under other names.
"""


@dataclass(frozen=True)
class Models:
    """Weights of the engines and of the trainer; the routers of the two differ."""

    engines: Path
    trainer: Path
    routes: list[np.ndarray[Any, Any]]  # chosen by the engines for ``SAMPLES``

    def of_engines(self) -> Any:
        """Load the engines' model in transformers."""
        return loaded(self.engines)

    def of_trainer(self) -> Any:
        """Load the trainer's model in transformers."""
        return loaded(self.trainer)


def make_models(folder: Path, name: str) -> Models:
    make_family(folder / "engines", name)
    model = loaded(folder / "engines")
    torch.manual_seed(7)
    with torch.no_grad():
        for block in forced_routes.moe_blocks(model):
            block.gate.weight += 0.1 * torch.randn_like(block.gate.weight)
    model.save_pretrained(folder / "trainer")
    routes = forced_routes.routes_of(loaded(folder / "engines"), SAMPLES)
    return Models(folder / "engines", folder / "trainer", routes)


def loaded(folder: Path) -> Any:
    """Load a folder's model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run(
    layout: Layout,
    folder: Path,
    samples: list[TrainSample],
    *,
    then: Path | None = None,
    **flags: bool,
) -> list[Any]:
    settings = rank_config(
        str(folder),
        rollout_temperature=TEMPERATURE,
        distributed_timeout_minutes=2,
        **layout.settings,
        **flags,
    )
    return run_ranks(
        replay,
        layout.num_ranks,
        settings,
        samples=samples,
        then=None if then is None else str(then),
    )


def largest_difference(
    found: list[Any], wanted: forced_routes.Expected, samples: list[TrainSample]
) -> tuple[float, float]:
    """Return the largest differences of log-probs and of gradients.

    The former is absolute, the latter relative to the largest value of each tensor.
    """
    of_sample = {
        sample.token_ids: values for sample, values in zip(samples, wanted.logprobs, strict=True)
    }
    of_logprobs = max(
        abs(ours - theirs)
        for rank in found
        if rank["logprobs"]
        for tokens, values in zip(rank["samples"], rank["logprobs"], strict=True)
        for ours, theirs in zip(values, of_sample[tokens], strict=True)
    )
    gradients = found[0]["gradients"]
    names = [name for name in gradients if name.endswith(COMPARED) and name in wanted.gradients]
    assert any("gate" in name for name in names)
    of_gradients = max(
        float(
            np.abs(gradients[name] - wanted.gradients[name]).max()
            / np.abs(wanted.gradients[name]).max()
        )
        for name in names
    )
    return of_logprobs, of_gradients


def compare(
    layout: Layout, models: Models
) -> tuple[list[Any], forced_routes.Expected, list[TrainSample]]:
    """Return what the ranks computed, what they must compute, and the samples.

    Some tokens of the samples have no routes.
    """
    samples = forced_routes.with_gaps(SAMPLES, models.routes)
    wanted = forced_routes.expected(models.of_trainer(), samples, temperature=TEMPERATURE)
    return run(layout, models.trainer, samples, use_rollout_routing_replay=True), wanted, samples


def main(chosen: list[str]) -> int:
    """Print the table; return 1 if a layout differs by more than the limit."""
    failed = False
    print("| layout | model | ranks | log-probs | gradients |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        models = cache(lambda name: make_models(Path(root) / name, name))
        for layout in CASES:
            if chosen and layout.name not in chosen:
                continue
            found, wanted, samples = compare(layout, models(layout.model))
            of_logprobs, of_gradients = largest_difference(found, wanted, samples)
            print(
                f"| {layout.name} | {layout.model} | {layout.num_ranks} | {of_logprobs:.1e} | {of_gradients:.1e} |",
                flush=True,
            )
            failed |= max(of_logprobs, of_gradients) >= LIMIT
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
