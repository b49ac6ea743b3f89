"""docs/models.md: the models, a section for each series.

Input: the registry of families, the files of jobs/models and jobs/recipes, the layouts of
docs/layouts.md, and the notes below. Output: the text of the page, the same on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rlpost.cli.planned_gpus import GPU_MEMORY
from rlpost.cli.recipes import first_sentence
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.model_file import MODELS, named_in
from rlpost.extensions.planning.layout_search import layout_words
from rlpost.models.families import FAMILIES

from .layouts import STARTS, planned


@dataclass(frozen=True)
class Series:
    """Architectures that share a section, and what a user of them has to know."""

    name: str
    title: str
    notes: str = ""
    trains_context_parallel: bool = True

    @property
    def models(self) -> dict[str, str]:
        """For each architecture of config.json, the models that have it."""
        return {name: it.models for name, it in FAMILIES.items() if it.page == self.name}


_LATENT = """\
**Latent attention.** `--tensor-model-parallel-size` must divide `q_lora_rank`, `kv_lora_rank` and
`qk_rope_head_dim`: the projections to the narrow vectors are sharded, with TransformerEngine too. The gradient of
the key that all heads share is summed over the tensor-parallel ranks, which Megatron-core 0.16.1 does not do. The
norms of the narrow vectors have transformers' epsilon (1e-6); SGLang uses `rms_norm_eps`, which differs in
GLM-4.7-Flash, far below the noise of bfloat16. The fused rotary kernel is off; `--apply-rope-fusion true` selects
Megatron's for models with YaRN.

**Checkpoints.** DeepSeek's are in FP8 blocks and are read as they are; engines get their weights in FP8 blocks if
their checkpoint has them. Kimi-K2-Thinking and K2.5 are published in INT4: use a checkpoint in
bfloat16 or FP8 blocks. Sparse attention (DeepSeek-V3.2, GLM-5) is another architecture and not supported.
"""

_LINEAR = """\
**Linear attention.** Three of four layers have a gated delta net (arXiv 2412.06464), computed in chunks of 64 tokens:
on GPUs by the kernels of flash-linear-attention (`fla-core`, part of the GPU stack; not for keys wider than 256), else
in plain torch ([cost](benchmarks.md#gated-delta-rule)). State and short convolution restart at each sequence of a
packed row. A test compares both, gradients too, in Triton's interpreter; no GPU has run the kernels. Tensor
parallelism shards them by key head; context parallelism is refused.

The decay `A_log` and the norm after linear attention are [in float32](actor.md#weights-in-float32), also if the
folder has them in bfloat16.

The layer for multi-token prediction (`mtp.*`) is not trained; an export copies it unchanged.
"""

SERIES = (
    Series(
        "llama",
        "Llama 3 and Mistral",
        "SmolLM2 is the smallest pretrained model with a recipe: [it learns on two cores]"
        "(one-box.md#a-pretrained-model).\n",
    ),
    Series(
        "qwen2",
        "Qwen2.5 and Qwen2-MoE",
        "Longer contexts and windows: [rotary embeddings](actor.md#long-context-and-windows).\n",
    ),
    Series(
        "qwen3",
        "Qwen3",
        """\
Longer contexts and windows: [rotary embeddings](actor.md#long-context-and-windows). Qwen3 leaves the reasoning
of earlier turns out of its template, so agents begin [a new trajectory](gateway.md#from-messages-to-tokens) there.
For the mixtures use [routing replay](actor.md#mixtures-of-experts-routing-replay) (`--use-rollout-routing-replay`).
""",
    ),
    Series(
        "qwen3-next",
        "Qwen3-Next",
        _LINEAR,
        trains_context_parallel=False,
    ),
    Series(
        "qwen3.5",
        "Qwen3.5, Qwen3.6 and Qwen3.8",
        _LINEAR,
        trains_context_parallel=False,
    ),
    Series(
        "gemma3",
        "Gemma-3",
        """\
`attn_logit_softcapping`, which transformers ignores in Gemma-3, and bidirectional attention are refused. Windows with
context parallelism: [attention kernels](actor.md#attention-kernels).
""",
    ),
    Series(
        "gpt-oss",
        "gpt-oss",
        """\
**Checkpoint.** The published ones are in MXFP4. The importer reads them exactly;
`tools/convert_hf_to_torch_dist.py` followed by `tools/convert_torch_dist_to_hf.py` writes the folder in bfloat16. Use
that folder as `--hf-checkpoint`: engines that load MXFP4 cannot receive updates in bfloat16, and `rlpost check` refuses
a run that would send them.

**Layout.** The experts have biases, which rules out sharding one expert over ranks: with tensor parallelism give
`--expert-tensor-parallel-size 1` and expert parallelism. TransformerEngine has no attention with sinks over packed
rows, so that of rlpost computes it.

**Answers.** Rewards see the text of the analysis channel as a thought, in `<think>` and `</think>`, and the final
channel after it ([rewards](rewards.md#what-a-reward-sees)).
""",
    ),
    Series(
        "minimax-m2",
        "MiniMax-M2",
        "The bias of the router is not trained. Use [routing replay](actor.md#mixtures-of-experts-routing-replay).\n",
    ),
    Series(
        "glm4",
        "GLM-4-0414 and GLM-Z1",
    ),
    Series(
        "glm4.5",
        "GLM-4.5, GLM-4.6, GLM-4.7",
        """\
The bias of the router is not trained. The extra layer is trained with `--enable-mtp-training`
([multi-token prediction](actor.md#multi-token-prediction)) and drafts for the engines
([drafting](engines.md#drafting)); otherwise an export copies it unchanged.
Use [routing replay](actor.md#mixtures-of-experts-routing-replay). A step
on every rank without GPUs, in minutes: `rlpost rehearse glm45_355b` ([rehearsal](rehearsal.md)).
""",
    ),
    Series(
        "deepseek-v3",
        "DeepSeek-V3, Kimi-K2, GLM-4.7-Flash",
        _LATENT,
    ),
)

NODES_AND_ENGINES = {"deepseek_v3": (32, 32), "gpt_oss_120b": (2, 2), "minimax_m2_230b": (4, 8)}
"""Nodes of eight GPUs, and GPUs of an engine, with which the planner finds layouts."""

_PAGE = """\
# Models

Written by `make docs` from `rlpost/models/families`, `jobs/models` and `jobs/recipes`. Another architecture, or an
option of `config.json` that is not supported, is an error on the login node that names it. What holds for all of them:
[the trainer](actor.md#models). To add one: [extending](extending.md#a-model). All have tensor, sequence, pipeline
(interleaved) and data parallelism, and mixtures expert parallelism. *CP*: context parallelism. *MTP*: the layer for
[multi-token prediction](actor.md#multi-token-prediction) is trained with `--enable-mtp-training`. Where a series has no
recipe, copy the nearest in size from `jobs/recipes`, and change its `model`, `hf_checkpoint`, `[assets]` and layout.

A folder that is published with an encoder of images (`...ForConditionalGeneration`) is trained as text, as it is: the
keys of its language model are read in `text_config`. The encoder is then neither trained nor sent to engines; an
export has its weights and `config.json` byte by byte. Small models of each kind have transformers' logits, and their
engines the trainer's log-probs after an update, on CPUs. A critic needs *yes* under *images*. *Images*: with
`--multimodal-keys` they read [images in prompts](data.md#images), and the trainer [runs the encoder](actor.md#images),
frozen or trained. Engines on CPUs have transformers' log-probs with images for small Qwen3-VL (dense, experts),
Qwen2.5-VL, dense Qwen3.5 and GLM-V (dense, experts). All but dense Qwen3-VL have them after an update of a trained
encoder, too. GLM-4.6V and GLM-4.6V-Flash have the classes of GLM-4.5V and GLM-4.1V, and their own
`config.json` was not read.
The norm in the merger of GLM-V has an epsilon of 1e-6 in SGLang and 1e-5 in transformers: check the difference of
log-probs at the first use on GPUs.

| series | `architectures` in `config.json` | models | [LoRA](lora.md) | CP | MTP | images |
|---|---|---|---|---|---|---|
{rows}

{sections}"""


def models_page() -> str:
    """The text of docs/models.md."""
    listed = [architecture for series in SERIES for architecture in series.models]
    assert sorted(listed) == sorted(FAMILIES), "each family has one section"
    rows = [row for series in SERIES for row in _rows(series)]
    sections = map(_section, SERIES)
    return _PAGE.format(rows="\n".join(rows), sections="\n".join(sections))


def _rows(series: Series) -> Iterator[str]:
    anchor = re.sub(r"[^\w -]", "", series.title).lower().replace(" ", "-")
    context = "yes" if series.trains_context_parallel else "refused"
    for name, models in series.models.items():
        family = FAMILIES[name]
        adapters = "yes" if family.adapters else "refused"
        extra = "trained" if family.trains_extra_layer else "-"
        images = "-" if family.vision is None else "yes"
        cells = (
            f"[{series.title}](#{anchor})",
            f"`{name}`",
            models,
            adapters,
            context,
            extra,
            images,
        )
        yield f"| {' | '.join(cells)} |"


def _section(series: Series) -> str:
    recipes = _recipes(series)
    start = _recipe_lines(recipes) if recipes else _start_lines(series)
    lines = [f"## {series.title}", "", *_file_lines(series), "", *start, ""]
    return "\n".join(lines) + (f"\n{series.notes}" if series.notes else "")


@cache
def _architectures() -> dict[str, str]:
    """For each file of jobs/models its architecture."""
    paths = sorted(MODELS.glob("*.json"))
    return {path.stem: json.loads(path.read_text())["architectures"][0] for path in paths}


def _files(series: Series) -> list[str]:
    return [name for name, found in _architectures().items() if found in series.models]


def _file_lines(series: Series) -> Iterator[str]:
    for name in _files(series):
        text = first_sentence(named_in(MODELS / f"{name}.json"))
        yield f"- [`{name}`](../jobs/models/{name}.json): {text}"


def _recipes(series: Series) -> list[str]:
    """The names of the recipes of these models; the shortest first, because variants have longer ones."""
    models = _files(series)
    recipes = (JOBS / "recipes").glob("*.toml")
    names = (
        path.stem for path in recipes if load(files_of(path), {}).config.checkpoint.model in models
    )
    return sorted(names, key=lambda name: (len(name), name))


def _recipe_lines(recipes: list[str]) -> Iterator[str]:
    links = ", ".join(f"[{name}](recipes.md#{name})" for name in recipes)
    yield f"Recipes: {links}."
    yield from _block(f"rlpost fetch {recipes[0]}", f"rlpost submit {recipes[0]} --dry-run")


def _start_lines(series: Series) -> Iterator[str]:
    """How to begin where no recipe exists: a planned layout, or the command that searches one."""
    models = _files(series)
    starts = [start for start in STARTS if start.model in models]
    if starts:
        yield f"| model | {GPU_MEMORY} GPUs | [layout](layouts.md#where-to-start) |"
        yield "|---|---|---|"
    for start in starts:
        yield f"| {start.title} | {8 * start.nodes} | {layout_words(planned(start))} |"
    if starts:
        yield ""
    model = next((name for name in models if name in NODES_AND_ENGINES), models[0])
    nodes, engine = NODES_AND_ENGINES.get(model, (1, 1))
    command = f"rlpost plan --model {model} --actor-num-nodes {nodes} --actor-num-gpus-per-node 8"
    command += f" --colocate --rollout-num-gpus-per-engine {engine} --suggest"
    yield "The planner searches layouts for your GPUs:"
    yield from _block(command)


def _block(*commands: str) -> Iterator[str]:
    yield from ("", "```bash", *commands, "```")
