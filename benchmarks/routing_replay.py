"""How far a bfloat16 trainer is from a float32 engine, with and without routing replay.

    python -m benchmarks.routing_replay [--steps 6] [--write]

A small random mixture of experts (8 layers, 64 experts, 8 of them for a token) is trained by this
project's actor in bfloat16. The engine is transformers in float32 with the actor's exported
weights: it samples the responses, and its log-probs and its routers' choices are those that the
trainer gets. The reward is the share of even tokens. The two runs, without and with
--use-rollout-routing-replay, begin with the same weights and seeds; they differ from the second
step on because they are trained differently. --write puts table and figure into docs/benchmarks.md,
section "Routing replay".
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from benchmarks.figure import draw_lines
from benchmarks.models import SPECIAL_TOKENS, started_actor
from benchmarks.page import machine, make_parser, show, table
from rlpost.actor.settings import ActorSettings
from rlpost.columns import RouteColumn
from rlpost.types import TrainBatch, TrainSample

HEADING = "## Routing replay"
VOCAB_SIZE, LAYERS, EXPERTS, TOPK = 512, 8, 64, 8
PROMPT, RESPONSE = 16, 112  # tokens
SAMPLES, MICRO_BATCH = 32, 8  # samples of a step and of a micro-batch
FIGURE = Path(__file__).parents[1] / "docs/images/routing_replay.svg"
TEXT = f"""A trainer in bfloat16 and an engine in float32, without and with `--use-rollout-routing-replay`
([what it is](moe.md)): a random mixture of {LAYERS} layers with {EXPERTS} experts, of which {TOPK} compute a token.
The engine is transformers with the trainer's exported weights; it samples {SAMPLES} responses of {RESPONSE} tokens
a step, whose reward is the share of even tokens. The trainer's log-probs are compared with the engine's before each
step.

```bash
python -m benchmarks.routing_replay --write
```

![Mean difference of log-probs between engine and trainer, in nats, by step](images/{FIGURE.name})
"""
COLUMNS = {
    "train/rollout_logprob_abs_diff": "mean difference of log-probs, nats",
    "train/rollout_k3": "KL, k3, nats",
    "train/rollout_ratio_max": "largest ratio",
}


def make_model(folder: Path) -> None:
    """Write a random Qwen3-MoE whose routers and logits are sharp enough to differ."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        initializer_range=0.06,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **SPECIAL_TOKENS,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def rollout(folder: Path, seed: int) -> list[TrainSample]:
    """Responses of the float32 engine with its log-probs and routes, and advantages."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    torch.manual_seed(seed)
    with torch.no_grad():
        prompts = torch.randint(3, VOCAB_SIZE, (SAMPLES, PROMPT))
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, min_new_tokens=RESPONSE,
            max_new_tokens=RESPONSE,
        )  # fmt: skip
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(
                lambda module, inputs, output: chosen.append(output[2])
            )
        logits = model(ids).logits[:, PROMPT - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[..., 0]
    # [layers][samples x tokens, k] -> [samples, tokens, layers, k]
    routes = (
        torch.stack(chosen)
        .reshape(LAYERS, SAMPLES, -1, TOPK)
        .permute(1, 2, 0, 3)
        .to(torch.uint8)
        .numpy()
    )
    rewards = (ids[:, PROMPT:] % 2 == 0).float().mean(1)
    advantages = ((rewards - rewards.mean()) / rewards.std()).tolist()
    return [
        TrainSample(
            token_ids=ids[number].numpy(),
            prompt_length=PROMPT,
            loss_mask=[1] * RESPONSE,
            rollout_logprobs=logprobs[number].numpy(),
            advantage=advantages[number],
            routes=RouteColumn(np.ascontiguousarray(routes[number])),
        )
        for number in range(SAMPLES)
    ]


def run(folder: Path, *, replays: bool, num_steps: int, port: int) -> list[dict[str, float]]:
    """Train in bfloat16; return the metrics of each step."""
    metrics = []
    settings = ActorSettings(str(folder), bf16=True, lr=1e-4, use_rollout_routing_replay=replays)
    with contextlib.closing(started_actor(settings, port=port)) as actor:
        for number in range(num_steps):
            exported = folder.parent / f"{replays}-{number}"
            actor.export(exported)
            samples = rollout(exported, seed=number)
            micro_batches = [
                tuple(samples[start : start + MICRO_BATCH])
                for start in range(0, SAMPLES, MICRO_BATCH)
            ]
            batch = TrainBatch(
                tuple(micro_batches), num_samples=SAMPLES, num_tokens=SAMPLES * RESPONSE
            )
            metrics.append(dict(actor.train_step(batch).metrics))
            print(
                f"replay {replays}, step {number + 1}: {_shown(metrics[-1])}",
                file=sys.stderr,
                flush=True,
            )
    return metrics


def _shown(metrics: Mapping[str, float]) -> str:
    names = (*COLUMNS, "train/routing_diff_frac")
    return ", ".join(f"{name} {metrics[name]:.5f}" for name in names if name in metrics)


def rows(off: list[dict[str, float]], on: list[dict[str, float]]) -> list[list[str]]:
    """One for the first step, which both runs make with the same weights, and one for the mean of
    all steps.
    """
    made = []
    for label, chosen in (("first step", slice(0, 1)), (f"mean of {len(off)} steps", slice(None))):
        for name, metrics in (("without", off), ("with", on)):
            cells = []
            for column in COLUMNS:
                value = statistics.fmean(one[column] for one in metrics[chosen])
                cells.append(f"{value:.2e}" if value < 0.1 else f"{value:.2f}")
            made.append([label, name, *cells])
    return made


def main() -> int:
    """Run both and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        make_model(folder)
        off = run(folder, replays=False, num_steps=options.steps, port=29_461)
        on = run(folder, replays=True, num_steps=options.steps, port=29_462)
    differing = statistics.fmean(one["train/routing_diff_frac"] for one in on)
    lines = [
        *TEXT.splitlines(),
        "",
        f"{machine()}. Tokens x layers for which the trainer would have chosen other experts: {differing:.1%}.",
        "",
        *table(["", "replay", *COLUMNS.values()], rows(off, on)),
    ]
    if options.write:
        name = "train/rollout_logprob_abs_diff"
        curves = {}
        for label, metrics in (("without replay", off), ("with replay", on)):
            curves[label] = [(step, one[name]) for step, one in enumerate(metrics, start=1)]
        draw_lines(curves, FIGURE, title="Mean difference of log-probs", ylabel="nats")
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
