"""docs/layouts.md: parallel layouts by model, with a table computed by the planner.

Input: the models of jobs/models and the layouts below. Output: the text of the page, the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.cli.planned_gpus import GPU_MEMORY, parse_size
from rlpost.config.flags import flag
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.extensions.planning.estimate import Estimate, estimate
from rlpost.extensions.planning.layout_search import layout_words, suggest
from rlpost.extensions.planning.plan_verb import model_of


@dataclass(frozen=True)
class Start:
    """A starting layout: ``nodes`` of eight GPUs, colocated."""

    model: str
    title: str
    nodes: int
    tp: int
    engine_gpus: int
    pp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    cp: int = 1
    ep: int = 1
    is_offloaded: bool = False

    @property
    def perf(self) -> dict[str, object]:
        """The parallel sizes as settings of the table [perf]."""
        sizes: dict[str, object] = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
        }
        if self.first_stage_layers is not None:
            sizes["decoder_first_pipeline_num_layers"] = self.first_stage_layers
        if self.last_stage_layers is not None:
            sizes["decoder_last_pipeline_num_layers"] = self.last_stage_layers
        if self.ep > 1:
            sizes |= {"expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": 1}
        return sizes


STARTS = (
    Start("qwen2_5_7b", "Qwen2.5-7B", nodes=1, tp=2, engine_gpus=1),
    Start("glm4_9b", "GLM-4-9B", nodes=1, tp=2, engine_gpus=1),
    Start("qwen3_30b_a3b", "Qwen3-30B-A3B", nodes=1, tp=4, ep=8, engine_gpus=4, is_offloaded=True),
    Start("glm47_flash", "GLM-4.7-Flash", nodes=1, tp=4, ep=8, engine_gpus=4, is_offloaded=True),
    Start("qwen2_5_32b", "Qwen2.5-32B", nodes=4, tp=4, pp=2, engine_gpus=2),
    Start("llama3_1_70b", "Llama-3.1-70B", nodes=4, tp=8, pp=2, engine_gpus=4),
    Start(
        "qwen3_235b_a22b",
        "Qwen3-235B-A22B",
        nodes=8,
        tp=2,
        pp=8,
        first_stage_layers=11,
        last_stage_layers=11,
        cp=1,
        ep=8,
        engine_gpus=16,
        is_offloaded=True,
    ),
    Start(
        "glm45_355b",
        "GLM-4.5 (355B)",
        nodes=8,
        tp=2,
        pp=8,
        first_stage_layers=10,
        last_stage_layers=10,
        cp=2,
        ep=8,
        engine_gpus=32,
        is_offloaded=True,
    ),
    Start(
        "deepseek_v3",
        "DeepSeek-V3 (671B)",
        nodes=32,
        tp=8,
        pp=4,
        last_stage_layers=13,
        cp=2,
        ep=32,
        engine_gpus=32,
        is_offloaded=True,
    ),
    Start(
        "kimi_k2",
        "Kimi-K2 (1T)",
        nodes=32,
        tp=8,
        pp=8,
        last_stage_layers=5,
        cp=2,
        ep=32,
        engine_gpus=64,
        is_offloaded=True,
    ),
)


@dataclass(frozen=True)
class Example:
    """A search for layouts on ``nodes`` of eight GPUs, colocated."""

    model: str
    title: str
    nodes: int
    engine_gpus: int


EXAMPLES = (
    Example("deepseek_v3", "DeepSeek-V3", 32, 32),
    Example("qwen3_235b_a22b", "Qwen3-235B-A22B", 16, 16),
)
NUM_SHOWN = 3
"""Suggestions of an example."""
# The workload of every row.
ROLLOUT = {"rollout_batch_size": 64, "n_samples_per_prompt": 8, "rollout_max_response_len": 8192}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MAX_TOKENS_PER_GPU = 16384

_PAGE = """\
# Which layout for my model

Written by `make docs`. The planner answers for your numbers, without a GPU and without the weights:

```bash
rlpost plan RECIPE --suggest
rlpost plan --model llama3_1_70b --actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate --n-samples-per-prompt 8 --suggest
rlpost plan RECIPE --gpus 16 --gpu-memory 141GB --json
```

## Colocate or split

| | `--colocate` | split (`--rollout-num-gpus N`) |
|---|---|---|
| GPUs | trainer and engines use all of them in turn | each has its own |
| runs | one phase after the other | training overlaps generation with `--rollout-mode one_step_off` or `fully_async` |
| staleness | none | bounded: one step, or `--max-staleness` |
| memory | the trainer releases its memory while engines generate; keep `--sglang-mem-fraction-static` at 0.7 or less | a whole GPU for each side |
| weight update | through memory of the same GPU | by broadcast over the network |
| choose it | up to a few nodes, or when a step must train exactly on what the current weights generated | long answers of uneven length, agents and tools, which leave GPUs idle at the end of a rollout |

A colocated recipe becomes a split one with three flags, and needs the GPUs of both sides:

```bash
rlpost plan jobs/recipes/qwen3_4b.toml --colocate false --actor-num-nodes 1 --rollout-num-gpus 8
```

How many GPUs for each side: run a few steps and compare `time/generate_s` with `time/train_s` in `metrics.jsonl`; move
GPUs to the slower side until they are close.

## Where to start

{memory} GPUs, colocated, {prompts} prompts x {answers} answers of up to {length} tokens, full recomputation,
distributed optimizer. "GPU, training" is the peak of the fullest GPU while it trains; while it generates, engines fill
70 % of it. Sizes are the planner's ([how it counts](recipes.md#the-planner)), not measurements.

| model | parameters | GPUs | layout | GPU, training | host memory a node |
|---|---|---|---|---|---|
{rows}

## Let the planner search

`--suggest` tries every layout that divides GPUs, model and batch, and prints those that fit, the shortest step first, by
the arithmetic of [speed](speed.md#what-the-planner-predicts). The workload of these examples is that of the table.

{examples}

## The order in which to change sizes

Start with the smallest sizes that fit, because every split costs communication; the rest is data parallelism.
Change one size at a time, in this order:

1. **TP** until weights, gradients and logits fit, at most the GPUs of a node (NVLink), always with `--sequence-parallel`.
   It must divide the attention heads and the groups of keys and values.
2. **EP** for a mixture of experts: experts are most of the weights, so this comes before more TP. Keep
   `--expert-tensor-parallel-size 1`, and EP within the GPUs of a node: every layer sends tokens to experts and back, and
   between nodes that takes about eight times as long. It must divide the number of experts.
3. **PP** when one node is not enough: it sends only activations between nodes. Layers have to divide, or set
   `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`. Its idle share shrinks with the number
   of micro-batches; `rlpost plan --suggest` prints it.
4. **CP** when a single answer is too long for `--max-tokens-per-gpu`: a sequence may have that many tokens times CP.
5. **Engines**: the smallest `--rollout-num-gpus-per-engine` that leaves enough KV cache (`rlpost plan`: answers at once).
   More small engines generate more tokens a second than few large ones.

On racks whose nodes share a faster network (Slurm's topology/block), give `--segment` the number of nodes that Slurm
must place within one block. Agents order nodes by block and ranks fill nodes in that order, so the row `blocks` of
`rlpost plan` shows for each kind of parallelism how many groups may cross a block. Keep tensor, context and expert
groups within one, because they communicate in every layer.

Before a larger size, these cost no communication:

| what is full | flag |
|---|---|
| activations | `--recompute-granularity full --recompute-method uniform --recompute-num-layers 1`, then a lower `--max-tokens-per-gpu` |
| optimizer state | `--use-distributed-optimizer`, then `--optimizer-cpu-offload` (needs host memory: see the table) |
| engine colocated with a trainer | a lower `--sglang-mem-fraction-static` |
"""  # noqa: E501


def layouts_page() -> str:
    """The text of docs/layouts.md."""
    return _PAGE.format(
        memory=GPU_MEMORY,
        prompts=ROLLOUT["rollout_batch_size"],
        answers=ROLLOUT["n_samples_per_prompt"],
        length=f"{ROLLOUT['rollout_max_response_len']:,}",
        rows="\n".join(_row(start, planned(start)) for start in STARTS),
        examples="\n\n".join(_example(example) for example in EXAMPLES),
    )


def search_flags(example: Example) -> dict[str, dict[str, object]]:
    """The settings of an example by group, without its model."""
    return {
        "cluster": {
            "actor_num_nodes": example.nodes,
            "actor_num_gpus_per_node": 8,
            "colocate": True,
            "rollout_num_gpus_per_engine": example.engine_gpus,
        },
        "rollout": dict(ROLLOUT),
        "perf": {
            **RECOMPUTE,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": MAX_TOKENS_PER_GPU,
            "use_distributed_optimizer": True,
        },
        "sglang": {"sglang_mem_fraction_static": 0.7},
    }


def search_command(example: Example) -> str:
    """The command of an example, a group of settings a line."""
    lines = [f"rlpost plan --suggest --model {example.model}"]
    for table in search_flags(example).values():
        words = [
            flag(key) if value is True else f"{flag(key)} {value}" for key, value in table.items()
        ]
        lines.append("    " + " ".join(words))
    return " \\\n".join(lines)


def _example(example: Example) -> str:
    config = _loaded(example.model, search_flags(example))
    shape, width = model_of(config)
    found = suggest(config, shape, gpu_bytes=parse_size(GPU_MEMORY), engine_width=width)
    lines = [f"{choice.words}\n    {choice.reasons}" for choice in found[:NUM_SHOWN]]
    return (
        f"{example.title} on {8 * example.nodes} {GPU_MEMORY} GPUs:\n\n"
        f"```bash\n{search_command(example)}\n```\n\n```text\n" + "\n".join(lines) + "\n```"
    )


def _loaded(model: str, values: Mapping[str, Mapping[str, object]]) -> Config:
    texts = {}
    for group, table in values.items():
        texts[group] = {key: str(value) for key, value in table.items()}
    return load([], texts | {"checkpoint": {"model": model}}).config


def planned(start: Start) -> Estimate:
    """The planner's estimate of a row."""
    values: dict[str, dict[str, object]] = {
        "cluster": {
            "actor_num_nodes": start.nodes,
            "actor_num_gpus_per_node": 8,
            "colocate": True,
            "rollout_num_gpus_per_engine": start.engine_gpus,
        },
        "rollout": dict(ROLLOUT),
        "perf": {
            **RECOMPUTE,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": MAX_TOKENS_PER_GPU,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            **start.perf,
        },
        "optimizer": {"optimizer_cpu_offload": start.is_offloaded},
        "sglang": {"sglang_mem_fraction_static": 0.7},
    }
    config = _loaded(start.model, values)
    shape, engine_width = model_of(config)
    return estimate(config, shape, gpu_bytes=parse_size(GPU_MEMORY), engine_width=engine_width)


def _row(start: Start, made: Estimate) -> str:
    training = next(phase.total for phase in made.phases if phase.name == "train")
    cells = (
        f"[{start.title}](../jobs/models/{start.model}.json)",
        f"{made.shape.parameters.total / 1e9:.1f}B",
        str(made.layout.world),
        layout_words(made),
        f"{training / 1e9:.0f} GB",
        f"{made.host_bytes_per_node / 1e9:.0f} GB",
    )
    return f"| {' | '.join(cells)} |"
