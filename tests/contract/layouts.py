"""Compare parallel layouts of the trainer with one process.

Loss, gradients and weights are compared over three steps. ``python -m tests.contract.layouts [NAME
...]`` runs the named layouts, or all of them, and prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.types import TrainSample
from tests.contract.actor_ranks import run_ranks, train_and_compare
from tests.contract.families import LATENT_MTP, MTP, make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

LIMIT = 1e-5  # relative, in float32
DENSE, TIED, MOE, LATENT = "qwen3", "qwen3-tied", "glm4.5-moe", "deepseek-v3-moe"
GEMMA, LONG = "gemma3", "qwen3-long"
LOSSES = ("train/loss", "train/mtp_loss")
SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


@dataclass(frozen=True)
class Layout:
    """A way to shard one model over a number of ranks."""

    name: str
    model: str
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "grpo"


def tp(size: int, *, sp: bool = True) -> dict[str, Any]:
    return {"tensor_model_parallel_size": size, "sequence_parallel": sp}


def pp(size: int, **more: Any) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": size, **more}


def ep(size: int, etp: int | None = None) -> dict[str, Any]:
    return {"expert_model_parallel_size": size, "expert_tensor_parallel_size": etp}


CP2 = {"context_parallel_size": 2}
VPP = {"num_layers_per_virtual_pipeline_stage": 1}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True}
GATHER = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
EXPERTS = SELECTIVE | {"megatron": {"recompute_modules": ["moe"]}}
UNEVEN = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
UNEVEN_MOE = {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "mtp": {"enable_mtp_training": True},
    "muon": {"optimizer": "muon", "use_distributed_optimizer": False},
    "gspo-kl": {"policy_loss": "gspo", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "cispo": {"policy_loss": "cispo", "calculate_per_token_loss": True},
    "entropy-tis": {
        "entropy_coef": 0.1,
        "use_tis": True,
        "tis_level": "geometric",
        "tis_clip": 0.1,
        "tis_clip_low": 0.02,
    },
}

LAYOUTS = [
    Layout("tp2", DENSE, 2, tp(2, sp=False)),
    Layout("tp2-sp", DENSE, 2, tp(2)),
    Layout("pp2", DENSE, 2, pp(2)),
    Layout("pp2-uneven", DENSE, 2, pp(2, **UNEVEN)),
    Layout("pp2-tied", TIED, 2, pp(2)),
    Layout("pp4", DENSE, 4, pp(4)),
    Layout("pp2-vpp2", DENSE, 2, pp(2, **VPP)),
    Layout("cp2", DENSE, 2, CP2),
    Layout("dp2-ddp", DENSE, 2, PLAIN),
    Layout("dp2-ddp-overlap", DENSE, 2, PLAIN | OVERLAP),
    Layout("dp2", DENSE, 2),
    Layout("dp2-overlap", DENSE, 2, GATHER),
    Layout("recompute-full", DENSE, 1, FULL),
    Layout("recompute-block", DENSE, 1, BLOCK),
    Layout("tp2-sp-recompute-selective", DENSE, 2, tp(2) | SELECTIVE),
    Layout("tp2-sp-pp2", DENSE, 4, tp(2) | pp(2)),
    Layout("tp2-sp-pp2-tied", TIED, 4, tp(2) | pp(2)),
    Layout("tp2-sp-cp2", DENSE, 4, tp(2) | CP2),
    Layout("tp2-sp-dp2-recompute", DENSE, 4, tp(2) | FULL),
    Layout("cp2-pp2", DENSE, 4, CP2 | pp(2)),
    Layout("cp2-pp2-vpp2", DENSE, 4, CP2 | pp(2, **VPP)),
    Layout("cp2-dp2", DENSE, 4, CP2),
    Layout("pp2-dp2-overlap", DENSE, 4, pp(2) | GATHER),
    Layout("moe-ep2", MOE, 2, ep(2)),
    Layout("moe-ep2-ddp", MOE, 2, ep(2) | PLAIN),
    Layout("moe-ep2-overlap", MOE, 2, ep(2) | GATHER),
    Layout("moe-tp2-sp", MOE, 2, tp(2)),
    Layout("moe-tp2-sp-ep2-etp1", MOE, 2, tp(2) | ep(2, 1)),
    Layout("moe-pp2", MOE, 2, pp(2)),
    Layout("moe-cp2", MOE, 2, CP2),
    Layout("moe-cp2-ep2", MOE, 2, CP2 | ep(2)),
    Layout("moe-ep2-dp4", MOE, 4, ep(2)),
    Layout("moe-ep2-recompute", MOE, 2, ep(2) | FULL),
    Layout("moe-tp2-sp-ep2-pp2", MOE, 4, tp(2) | ep(2, 1) | pp(2)),
    Layout("moe-tp2-sp-ep2-etp2", MOE, 4, tp(2) | ep(2, 2)),
    Layout("moe-pp2-uneven-recompute", MOE, 2, pp(2, **UNEVEN_MOE) | FULL),
    Layout("moe-pp4", MOE, 4, pp(4)),  # the first stage has no experts
    Layout("moe-pp2-vpp2", MOE, 2, pp(2, **VPP)),
    Layout("moe-pp2-vpp2-recompute-experts", MOE, 2, pp(2, **VPP) | EXPERTS),
    Layout("moe-tp2-sp-recompute-experts", MOE, 2, tp(2) | EXPERTS),
    Layout("moe-cp2-pp2-recompute", MOE, 4, CP2 | pp(2) | FULL),
    Layout("moe-tp2-sp-cp2", MOE, 4, tp(2) | CP2),
    Layout("latent-cp2-ep2", LATENT, 2, CP2 | ep(2)),
    Layout("gemma-tp2-sp-recompute", GEMMA, 2, tp(2) | FULL),
    Layout("gemma-cp2-pp2-uneven", GEMMA, 4, CP2 | pp(2, **UNEVEN)),
    Layout("long-tp2-sp-cp2", LONG, 4, tp(2) | CP2),
    Layout("cp2-pp2-gspo-kl", DENSE, 4, CP2 | pp(2), "gspo-kl"),
    Layout("tp2-sp-cispo", DENSE, 2, tp(2), "cispo"),
    Layout("tp2-sp-entropy-tis", DENSE, 2, tp(2) | {"log_probs_chunk_size": 7}, "entropy-tis"),
    Layout("cp2-pp2-entropy-tis", DENSE, 4, CP2 | pp(2), "entropy-tis"),
    Layout("tp2-sp-pp2-muon", DENSE, 4, tp(2) | pp(2), "muon"),
    Layout("moe-tp2-sp-ep2-muon", MOE, 2, tp(2) | ep(2, 1), "muon"),
    Layout("mtp-recompute", MTP, 1, FULL, "mtp"),
    Layout("mtp-tp2-sp", MTP, 2, tp(2), "mtp"),
    Layout("mtp-pp2", MTP, 2, pp(2), "mtp"),
    Layout("mtp-pp2-vpp2", MTP, 2, pp(2, **VPP), "mtp"),
    Layout("mtp-latent-tp2-sp-ep2", LATENT_MTP, 2, tp(2) | ep(2, 1), "mtp"),
    Layout("mtp-cp2", MTP, 2, CP2, "mtp"),
    Layout("mtp-cp2-ep2", MTP, 2, CP2 | ep(2), "mtp"),
    Layout("mtp-ep2-overlap", MTP, 2, ep(2) | GATHER, "mtp"),
    Layout("mtp-ep2-dp4", MTP, 4, ep(2), "mtp"),
    Layout("mtp-tp2-sp-ep2-pp2-recompute", MTP, 4, tp(2) | ep(2, 1) | pp(2) | FULL, "mtp"),
    Layout("mtp-cp2-pp2-vpp2-overlap", MTP, 4, CP2 | pp(2, **VPP) | GATHER, "mtp"),
]


@dataclass(frozen=True)
class Difference:
    """The largest relative errors against one process."""

    loss: float
    grad_norm: float
    gradients: float
    weights: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.gradients, self.weights)


class Comparison:
    """Runs layouts and compares each with a single process, run once per model and algorithm."""

    def __init__(self, folder: Path, *, steps: Sequence[Sequence[TrainSample]] = STEPS) -> None:
        self.folder = folder
        self.steps = steps
        self.model = cache(self._model)
        self.alone = cache(
            lambda model, algorithm: self._run(Layout("alone", model, 1, algorithm=algorithm))
        )

    def __call__(self, layout: Layout) -> Difference:
        """Return the largest differences over steps and ranks."""
        expected, found = self.alone(layout.model, layout.algorithm)[0], self._run(layout)
        assert all(one["hash"] == found[0]["hash"] for one in found), (
            "every rank exports the same weights"
        )
        pairs = [
            (ours, theirs)
            for one in found
            for ours, theirs in zip(one["metrics"], expected["metrics"], strict=True)
        ]
        return Difference(
            loss=max(_loss_difference(pairs, name) for name in LOSSES if name in pairs[0][1]),
            grad_norm=max(abs(a["train/grad_norm"] / b["train/grad_norm"] - 1) for a, b in pairs),
            gradients=_difference(found[0]["gradients"], expected["gradients"]),
            weights=_difference(found[0]["weights"], expected["weights"]),
        )

    def _model(self, name: str) -> Path:
        make_family(self.folder / name, name)
        return self.folder / name

    def _run(self, layout: Layout) -> list[dict[str, Any]]:
        settings = rank_config(
            self.model(layout.model), lr=1e-3, adam_eps=1e-4, rollout_temperature=0.8, distributed_timeout_minutes=2,
            update_weight_buffer_size=40_000, **layout.settings, **ALGORITHMS[layout.algorithm],
        )  # fmt: skip
        two_passes = layout.algorithm != "grpo"  # the second has ratios other than 1
        return run_ranks(
            train_and_compare, layout.num_ranks, settings, steps=self.steps, two_passes=two_passes
        )


def _loss_difference(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> float:
    # relative to the largest loss of all steps: that of one step may happen to be near zero
    largest = max(abs(theirs[name]) for _, theirs in pairs)
    return max(abs(ours[name] - theirs[name]) for ours, theirs in pairs) / largest


def _difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Return the largest difference over all tensors, relative to each tensor's largest value."""
    assert ours.keys() == theirs.keys()
    return max(
        float(np.abs(ours[key] - theirs[key]).max() / (np.abs(theirs[key]).max() or 1.0))
        for key in ours
    )


def main(chosen: list[str]) -> int:
    """Print the table; return 1 if a layout differs by more than the limit."""
    differ = []
    print(
        "| layout | model | ranks | loss | grad norm | gradients | weights |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        compare = Comparison(Path(folder))
        for layout in LAYOUTS:
            if chosen and layout.name not in chosen:
                continue
            found = compare(layout)
            cells = [layout.name, layout.model, str(layout.num_ranks)]
            cells += [
                f"{value:.1e}"
                for value in (found.loss, found.grad_norm, found.gradients, found.weights)
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
            differ += [layout.name] if found.largest >= LIMIT else []
    if differ:
        print(f"differ by {LIMIT:.0e} or more: {', '.join(differ)}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
