"""Published runs of others, and what the planner's arithmetic says of them.

Input: the rows below. Output: the table of docs/speed.md. A row has the figures of its source, and
``assumed`` names what the source does not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlpost.cli.planned_gpus import parse_size
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.model_file import MODELS, read_model
from rlpost.config.plan.cards import CARDS
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Layout, Shape
from rlpost.extensions.planning.estimate import Estimate, estimate
from rlpost.extensions.planning.layout_search import layout_words
from rlpost.extensions.planning.plan_verb import model_of
from rlpost.extensions.planning.rates import RATES
from rlpost.extensions.planning.step_time import StepTime, step_time
from rlpost.extensions.planning.train_time import Training, mfu, train_step

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- generated: tools/make_docs.py -->", "<!-- end -->"
PROMPT = 256
"""Tokens of the longest prompt of NeMo-RL's runs, which the source does not say."""
PRETRAINING = replace(RATES, logit_bytes=20, tensor_exposed=0.5)
"""Fused cross-entropy in place of log-probs; products hide half of tensor-parallel collectives."""


NEAR = 0.25
"""Deviation up to which a prediction counts as right."""
NOT_NEAR = {
    "gpt-oss": "other models of the same pages are near, so the reason is in what this one alone has; "
    "most likely attention with sinks. On B200 and GB200 alike the missing time is that of eleven "
    "passes over the scores of attention in bfloat16, and a fused kernel makes none; cuDNN had none "
    "for sinks before 9.13 (NVIDIA-NeMo/RL#1685). With MXFP8 and CUDA graphs of a whole step the same "
    "64 GB200 reach 28,947 tokens/s (26.06), and the page names attention of cuDNN for 18,304 in 26.06.01 "
    "(NVIDIA/cudnn-frontend#256)",
    "NeMo-RL": "of the step with 235B, 229 s do not get shorter from 128 to 256 GPUs (395 and 312 s, if "
    "the rest halves); the arithmetic has 156 s of them. Waking and refilling engines, preparation of "
    "data and stragglers are not counted, and the same runs took 506 and 225 s with release 0.4 "
    "(NVIDIA-NeMo/RL#1560)",
}
"""Why predictions are not near, by source or model."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A figure of others and the planner's, both in ``unit``."""

    name: str
    published: float
    predicted: float
    unit: str
    source: str
    assumed: str = ""
    """What the source does not say."""

    @property
    def deviation(self) -> float:
        """Share by which the prediction exceeds the published figure."""
        return self.predicted / self.published - 1


def _trained(
    name: str, job: Training, tflops: float, source: str, assumed: str = ""
) -> PublishedRun:
    """A training run of Megatron-core on full sequences in bfloat16, by its model TFLOP/s."""
    predicted = job.card.tflops * mfu(job, sum(train_step(job).values()))
    return PublishedRun(name, tflops, predicted, "TFLOP/s", source, assumed)


def _tokens(
    name: str, job: Training, tokens: float, source: str, assumed: str = ""
) -> PublishedRun:
    """The same by its tokens a second and GPU, where a source counts operations in another way."""
    step_tokens = job.tokens * job.batches * job.layout.data
    predicted = step_tokens / job.layout.world / sum(train_step(job).values())
    return PublishedRun(name, tokens, predicted, "tokens/s", source, assumed)


def _dense(hidden: int, ffn: int, heads: int, groups: int, layers: int, vocab: int) -> Shape:
    return Shape(hidden, ffn, heads, groups, hidden // heads, vocab, (False,) * layers)


def _sparse(dense: Shape, experts: int, width: int, topk: int, shared: int = 0) -> Shape:
    return replace(
        dense,
        sparse=(True,) * dense.num_layers,
        num_experts=experts,
        expert_ffn=width,
        topk=topk,
        shared_ffn=shared,
    )


LLAMA_405B = _dense(16384, 53248, 128, 8, 126, 128256)
LLAMA_70B = _dense(8192, 28672, 64, 8, 80, 128256)
MIXTRAL = _dense(6144, 16384, 48, 8, 56, 32000)
QWEN2_57B = _sparse(_dense(3584, 18944, 28, 4, 28, 151936), 64, 2560, 8, 20480)
GPT_OSS = replace(
    _sparse(_dense(2880, 2880, 64, 8, 36, 201088), 128, 2880, 4), head_dim=64, sinks=True
)


WINDOW = 128


def _job(
    shape: Shape, card: str, layout: Layout, batch: int, length: int, **more: object
) -> Training:
    """``batch``: sequences of ``length`` in a step, one in a micro-batch."""
    layout = replace(layout, sequence_parallel=layout.tensor > 1)
    rows = int(more.pop("rows", 1))  # type: ignore[call-overload]
    return Training(
        shape,
        layout,
        CARDS[card],
        8,
        tokens=length * rows,
        batches=batch / rows / layout.data,
        attended=length,
        overlaps_reduce=True,
        fuses_gradients=True,
        rates=PRETRAINING,
        **more,  # type: ignore[arg-type]
    )


def training_runs() -> Iterator[PublishedRun]:
    """Training runs of Megatron-core."""
    paper, peak = "arXiv 2407.21783, table 4", CARDS["H100"].tflops
    stages = "two layers a virtual stage"
    layout = Layout(8192, 8, 16, 1, expert_tensor=1, chunk=2)
    job = _job(LLAMA_405B, "H100", layout, 64 * 32, 8192)
    yield _trained("Llama 3 405B, 8,192 H100", job, 430, paper, stages)
    job = _job(LLAMA_405B, "H100", replace(layout, world=16384), 128 * 16, 8192)
    yield _trained("the same, 16,384 H100", job, 400, paper, stages)
    job = _job(LLAMA_405B, "H100", replace(layout, world=16384, context=16), 8 * 16, 131072)
    yield _trained("the same, 131,072 tokens, CP 16", job, 380, paper, stages)
    paper, one = "arXiv 2504.14960, table 3", "one layer a virtual stage"
    layout = Layout(128, 2, 8, 1, 8, expert_tensor=1, chunk=1)
    job = _job(_sparse(MIXTRAL, 8, 16384, 2), "H100", layout, 256, 4096)
    yield _trained("Mixtral 8x22B, 128 H100", job, 0.493 * peak, paper, one)
    fine = _sparse(MIXTRAL, 64, 2048, 8)
    job = _job(fine, "H100", replace(layout, tensor=4), 256, 4096)
    yield _trained("Mixtral 8x22B in 64 experts", job, 0.288 * peak, paper, one)
    job = _job(fine, "H100", replace(layout, expert_tensor=2), 256, 4096)
    yield _trained("the same, experts over two nodes", job, 0.171 * peak, paper, one)
    layout = Layout(64, 2, 4, 1, 4, expert_tensor=1, chunk=1)
    job = _job(QWEN2_57B, "H100", layout, 256, 4096)
    yield _trained("Qwen2 57B-A14B, 64 H100", job, 0.390 * peak, paper, one)
    layout = Layout(256, 8, 16, 1, 8, expert_tensor=1, chunk=1)
    job = _job(_sparse(LLAMA_70B, 8, 28672, 2), "H100", layout, 256, 4096)
    yield _trained("Llama 3 8x70B, 256 H100", job, 0.416 * peak, paper, one)
    yield from _bridge_runs()


def _bridge_runs() -> Iterator[PublishedRun]:
    """Runs in bfloat16 whose sources count operations otherwise in each release: by tokens."""
    page = "Megatron-Bridge, archive of performance summaries"
    older, page = f"{page}, 25.11", f"{page}, 26.02"
    qwen3, deepseek = _shape("qwen3_235b_a22b"), replace(_shape("deepseek_v3"), mtp=False)
    no_chunks, ends = "no virtual stages", {"expert_tensor": 1, "first": 11, "last": 11}
    job = _job(qwen3, "GB200", Layout(256, 1, 8, 1, 32, **ends), 8192, 4096)
    yield _tokens("Qwen3 235B-A22B, 256 GB200", job, 4916, older, no_chunks)
    layout = Layout(256, 1, 4, 1, 16, expert_tensor=1, chunk=2)
    job = _job(qwen3, "GB300", layout, 8192, 4096, rows=2)
    yield _tokens("Qwen3 235B-A22B, 256 GB300", job, 6131, older)
    job = _job(deepseek, "GB200", Layout(256, 1, 4, 1, 64, expert_tensor=1, last=13), 4096, 4096)
    yield _tokens("DeepSeek-V3, 256 GB200", job, 3139, older, no_chunks)
    job = _job(deepseek, "GB300", Layout(256, 1, 2, 1, 32, expert_tensor=1, last=30), 4096, 4096)
    yield _tokens("DeepSeek-V3, 256 GB300", job, 3848, older, no_chunks)
    layout, one = Layout(64, 1, 4, 1, 8, expert_tensor=1), Layout(64, 1, 1, 1, 8, expert_tensor=1)
    yield _tokens("gpt-oss 120B, 64 H100", _gpt_oss("H100", layout), 5993, page)
    yield _tokens("gpt-oss 120B, 64 B200", _gpt_oss("B200", one, rows=4), 13722, f"{page}.01")
    far = replace(one, expert=64)
    yield _tokens("gpt-oss 120B, experts over 8 nodes", _gpt_oss("B200", far, rows=4), 8047, page)
    yield _tokens("gpt-oss 120B, 64 GB200", _gpt_oss("GB200", far, rows=4), 15784, page)


def _shape(model: str) -> Shape:
    """The shape of a model of jobs/models, which has that of its published config.json."""
    return hf_shape(read_model(MODELS / f"{model}.json"))


def _gpt_oss(card: str, layout: Layout, rows: int = 1) -> Training:
    """Every second layer attends to WINDOW tokens at most, which counts as 2 WINDOW of a triangle."""
    job = _job(GPT_OSS, card, layout, 1280, 4096, rows=rows)
    return replace(job, attended=(4096 + 2 * WINDOW) / 2)


@dataclass(frozen=True, slots=True)
class _Grpo:
    """A colocated GRPO run of NeMo-RL in bfloat16 on nodes of 8 H100.

    Its files of settings: examples/configs/recipes/llm/performance, tag v0.6.0, and what these
    inherit from grpo_math_1B.yaml.
    """

    title: str
    model: str
    nodes: int
    perf: dict[str, object]
    prompts: int
    longest: int
    """Limit of prompt and answer."""
    mean: int
    engine_gpus: int
    seconds: float
    steps: int = 1
    """Optimizer steps."""


_ENDS = {"decoder_first_pipeline_num_layers": 11, "decoder_last_pipeline_num_layers": 11}
_SIZES_235B = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 16,
    "pipeline_model_parallel_size": 8,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    **_ENDS,
}
_SIZES_30B = {"expert_model_parallel_size": 8}
GRPO_RUNS = (
    _Grpo("Qwen3 30B-A3B, 32 H100", "qwen3_30b_a3b", 4, _SIZES_30B, 64, 4096, 3203, 2, 192, 4),
    _Grpo("Qwen3 235B-A22B, 128 H100", "qwen3_235b_a22b", 16, _SIZES_235B, 16, 8192, 5698, 16, 395),
    _Grpo("Qwen3 235B-A22B, 256 H100", "qwen3_235b_a22b", 32, _SIZES_235B, 16, 8192, 5713, 16, 312),
)


def grpo_runs() -> Iterator[PublishedRun]:
    """Whole steps of GRPO."""
    for run in GRPO_RUNS:
        perf = run.perf | {"expert_tensor_parallel_size": 1, "use_dynamic_batch_size": True}
        perf |= {"fused_log_probs": False, "overlap_grad_reduce": True}
        cluster = {"actor_num_nodes": run.nodes, "actor_num_gpus_per_node": 8, "colocate": True}
        context = int(str(perf.get("context_parallel_size", 1)))
        tables = {
            "cluster": cluster | {"rollout_num_gpus_per_engine": run.engine_gpus},
            "perf": perf | {"max_tokens_per_gpu": run.longest // context},
            "rollout": {
                "rollout_batch_size": run.prompts,
                "n_samples_per_prompt": 32,
                "rollout_max_prompt_len": PROMPT,
                "rollout_max_response_len": run.longest - PROMPT,
                "num_steps_per_rollout": run.steps,
            },
            "megatron": {"gradient_accumulation_fusion": False},
            "sglang": {"sglang_mem_fraction_static": 0.6},
            "grpo": {"keep_old_actor": True, "use_kl_loss": True, "kl_loss_coef": 0.01},
        }
        config = load([], tables | {"checkpoint": {"model": run.model}}).config
        planned = estimate(config, model_of(config)[0], gpu_bytes=parse_size("H100"))
        share = run.mean / run.longest
        rates = replace(RATES, mean_share=share, attended_share=share + (1 - share) / 3)
        predicted = step_time(planned, CARDS["H100"], rates).total
        source = "NeMo-RL, performance summary 0.6"
        assumed = "spread of lengths, two passes for log-probs"
        yield PublishedRun(run.title, run.seconds, predicted, "s a step", source, assumed)


_FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_OF_SLIME = {
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 4,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 16,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
}
_30B = {"tensor_model_parallel_size": 4, "context_parallel_size": 1, "max_tokens_per_gpu": 20480}
SOURCES: dict[str, dict[str, object]] = {
    "glm45_355b": _OF_SLIME,
    "qwen3_235b_a22b": {"context_parallel_size": 2, "expert_model_parallel_size": 16},
    "qwen3_30b_a3b": _FULL | _30B,
    "qwen3_4b": _FULL,
}
"""The settings of [perf] in which the source of a recipe differs: slime, for 235B NeMo-RL."""


def recipes_table() -> str:
    """Predicted times of recipes with the layout of their source, and with their own."""
    lines = [
        "| recipe | layout | step | training | MFU |",
        "|---|---|---|---|---|",
    ]
    for name, source in SOURCES.items():
        for perf in (source, {}):
            config = load(files_of(JOBS / f"recipes/{name}.toml"), {"perf": perf}).config
            planned = estimate(config, model_of(config)[0], gpu_bytes=parse_size("H100"))
            lines.append(_row(name, planned, step_time(planned, CARDS["H100"]), is_own=not perf))
    return "\n".join(lines)


def _row(name: str, planned: Estimate, time: StepTime, *, is_own: bool) -> str:
    recomputes = planned.config.perf.recompute_granularity == "full"
    layout = f"{layout_words(planned)}{', recomputed' if recomputes else ''}"
    whose = f"**{layout}**" if is_own else f"source: {layout}"
    seconds = f"{time.total:.0f} s | {time.training:.1f} s | {time.mfu:.1%}"
    return f"| `{name}` | {whose} | {seconds} |"


def table() -> str:
    """The table of docs/speed.md, and the sentences below it."""
    lines = [
        "| run | published | predicted | deviation | source; assumed |",
        "|---|---|---|---|---|",
    ]
    runs = [*training_runs(), *grpo_runs()]
    for run in runs:
        figures = f"{run.published:,.0f} {run.unit} | {run.predicted:,.0f}"
        source = "; ".join(filter(None, (run.source, run.assumed)))
        lines.append(f"| {run.name} | {figures} | {run.deviation:+.0%} | {source} |")
    near = sum(abs(run.deviation) <= NEAR for run in runs)
    lines += ["", f"{near} of {len(runs)} are within {NEAR:.0%}. Not near:", ""]
    lines += [f"- {name}: {reason}." for name, reason in NOT_NEAR.items()]
    return "\n".join(lines)


def speed_page() -> str:
    """The text of docs/speed.md with new tables: of published runs, then of recipes."""
    pieces = (DOCS / "speed.md").read_text().split(BEGIN)
    for number, text in enumerate((table(), recipes_table()), start=1):
        pieces[number] = f"\n{text}\n{END}{pieces[number].partition(END)[2]}"
    return BEGIN.join(pieces)
