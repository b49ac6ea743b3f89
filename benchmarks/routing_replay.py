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

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.page import machine, make_parser, show, table
from rlpost.actor.actor import Actor
from rlpost.actor.settings import ActorSettings
from rlpost.columns import RouteColumn
from rlpost.types import TrainBatch, TrainSample

HEADING = "## Routing replay"
VOCAB_SIZE, LAYERS, EXPERTS, TOPK = 512, 8, 64, 8
# tokens, tokens, samples a step, samples a micro-batch
PROMPT, RESPONSE, SAMPLES, MICRO_BATCH = (
    16,
    112,
    32,
    8,
)
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
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
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


@contextmanager
def trainer(folder: Path, *, replays: bool, port: int) -> Iterator[Actor]:
    """The actor in bfloat16, in this process."""
    actor = Actor(
        ActorSettings(str(folder), bf16=True, lr=1e-4, use_rollout_routing_replay=replays)
    )
    actor.setup(0, 1, "127.0.0.1", port)
    actor.import_weights()
    yield actor
    actor.close()


def run(folder: Path, *, replays: bool, num_steps: int, port: int) -> list[dict[str, float]]:
    """Train; the metrics of each step."""
    metrics = []
    with trainer(folder, replays=replays, port=port) as actor:
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
            values = [
                statistics.fmean(one[column] for one in metrics[chosen]) for column in COLUMNS
            ]
            made.append(
                [
                    label,
                    name,
                    *(f"{value:.2e}" if value < 0.1 else f"{value:.2f}" for value in values),
                ]
            )
    return made


def figure(curves: dict[str, list[float]]) -> str:
    """An SVG of the mean difference of log-probs by step, from 0."""
    width, height, left, bottom = 560, 240, 60, 36
    top = max(map(max, curves.values())) * 1.15
    count = len(next(iter(curves.values())))

    def place(step: int, value: float) -> tuple[float, float]:
        x = left + (width - left - 20) * (step / max(count - 1, 1))
        return round(x, 1), round((height - bottom) * (1 - value / top), 1)

    drawn = []
    for number in range(5):
        value = top * number / 4
        _, y = place(0, value)
        drawn.append(f'<path d="M{left} {y}H{width - 20}" stroke="#94a3b8" stroke-width="0.5"/>')
        drawn.append(
            f'<text x="{left - 6}" y="{max(y + 4, 12)}" text-anchor="end">{value:.4f}</text>'
        )
    for step in range(count):
        x, _ = place(step, 0)
        drawn.append(
            f'<text x="{x}" y="{height - bottom + 16}" text-anchor="middle">{step + 1}</text>'
        )
    drawn.append(
        f'<text x="{(left + width) / 2}" y="{height - 4}" text-anchor="middle">step</text>'
    )
    for (label, values), colour in zip(curves.items(), ("#ea580c", "#2563eb"), strict=True):
        points = [place(step, value) for step, value in enumerate(values)]
        line = " ".join(f"{x},{y}" for x, y in points)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        drawn.append(
            f'<text x="{x}" y="{y - 8}" text-anchor="end" style="fill:{colour}">{label}</text>'
        )
    style = "<style>text{font:12px sans-serif;fill:#64748b}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{style}{"".join(drawn)}</svg>\n'


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
        curves = {
            "without replay": [one[name] for one in off],
            "with replay": [one[name] for one in on],
        }
        FIGURE.write_text(figure(curves))
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
