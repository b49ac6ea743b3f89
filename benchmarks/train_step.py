"""Tokens per second of a training step: log-probs of the old policy, forward, backward, clipping
and optimizer.

    python -m benchmarks.train_step [--size small] [--steps 5] [--trl FOLDER] [--write]

The same small random Qwen3, the same samples of mixed lengths, the same threads, in one process
with interleaved steps: this project's actor; GRPOTrainer of TRL, of which only log-probs, loss and
gradients are called, then torch's AdamW, with its rows padded as TRL pads them (all to the longest
of the generation batch); and a bare Hugging Face model with padding to the longest of each
micro-batch, samples in order of length, and the shortest possible loss. The first step's gradient
norms are compared, so all do the same work. A token is one of a sample, padding does not count.

TRL is not a dependency of this project; install it into a separate folder:

    pip install --no-deps --target FOLDER trl==1.16.0 accelerate datasets pyarrow pandas dill
    multiprocess xxhash

On CUDA the actor's matrices run in bfloat16, and so do the others' (autocast); there the share of
the GPU's peak is shown too. --write puts the table into docs/benchmarks.md, section "Training
step".
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.page import machine, make_parser, show, table
from rlpost.algorithm.schedule import schedule
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.trainer.actor import Actor
from rlpost.types import TrainBatch, TrainSample

HEADING = "## Training step"
VOCAB_SIZE = 2048
# hidden, layers, heads, key and value heads, feed-forward; samples a step; tokens, and samples, of
# a micro-batch
SIZES = {
    "tiny": ((64, 2, 4, 2, 128), 8, 512, 4),
    "small": ((256, 4, 4, 2, 768), 32, 2048, 8),
    "medium": ((1024, 16, 16, 8, 3072), 64, 16_384, 8),
    "large": ((2048, 24, 16, 8, 6144), 128, 16_384, 8),
}
# dense bfloat16, from NVIDIA's data sheets
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
LR, BETAS, EPS, WEIGHT_DECAY, CLIP_GRAD = 1e-6, (0.9, 0.999), 1e-8, 0.01, 1.0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

Step = Callable[[], float]  # one optimizer step; the norm of the gradient before clipping


def save_random_qwen3(folder: Path, **config: object) -> int:
    """Write a random Qwen3 with these settings of ``Qwen3Config``; return its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SPECIAL_TOKENS, tie_word_embeddings=False, **config))
    model.save_pretrained(folder)
    return model.num_parameters()


def one_rank(folder: Path, **values: object) -> Config:
    """Return the settings of the only rank of a model on its node, with these leaves."""
    sizes = {"num_gpus_per_node": 1, "actor_num_gpus_per_node": 1}
    return with_values(Config(), hf_checkpoint=str(folder), **sizes, **values)


def started_actor(settings: Config, *, port: int) -> Actor:
    """Return the only actor rank of a trainer, with the weights of its Hugging Face folder.

    ``port``: that of torch.distributed on this machine.
    """
    actor = Actor(settings)
    actor.setup(0, 1, "127.0.0.1", port)
    actor.import_weights()
    return actor


def make_model(folder: Path, size: str) -> int:
    """Write a random Qwen3; return its number of parameters."""
    hidden, layers, heads, key_value_heads, feed_forward = SIZES[size][0]
    return save_random_qwen3(
        folder,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=hidden // heads,
        max_position_embeddings=8192,
    )


def make_samples(count: int) -> list[TrainSample]:
    """Prompts of 20 to 120 tokens and answers whose lengths have a long tail: median 120, at most
    1000.
    """
    source = random.Random(2)
    samples = []
    for _ in range(count):
        prompt = source.randint(20, 120)
        response = min(1000, max(8, int(source.lognormvariate(4.8, 0.8))))
        samples.append(
            TrainSample(
                token_ids=tuple(source.randrange(3, VOCAB_SIZE) for _ in range(prompt + response)),
                prompt_length=prompt,
                loss_mask=(1,) * response,
                rollout_logprobs=(-math.log(VOCAB_SIZE),) * response,
                advantage=source.uniform(-2, 2),
            )
        )
    return samples


@contextmanager
def ours(folder: Path, samples: Sequence[TrainSample], size: str) -> Iterator[Step]:
    """The actor, with dynamic micro-batches."""
    lengths = [len(sample.token_ids) for sample in samples]
    (micro_batches,) = schedule(
        lengths, data_parallel_size=1, max_tokens=SIZES[size][2], micro_batch_size=1, work=lengths
    )
    chosen = []
    for indices in micro_batches:
        chosen.append(tuple(samples[index] for index in indices))
    batch = TrainBatch(
        micro_batches=tuple(chosen),
        num_samples=len(samples),
        num_tokens=sum(sample.response_length for sample in samples),
    )
    settings = one_rank(
        folder,
        clip_grad=CLIP_GRAD,
        actor_num_threads=torch.get_num_threads(),
        lr=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
    )
    actor = started_actor(settings, port=29_431)

    def step() -> float:
        return actor.train_step(batch, actor.compute_logprobs(batch)).metrics["train/grad_norm"]

    yield step
    actor.close()


def padded(samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
    """Prompts padded on their left, answers on their right, as TRL does."""
    prompts = max(sample.prompt_length for sample in samples)
    responses = max(sample.response_length for sample in samples)
    shape = {"prompt": prompts, "completion": responses}
    tensors = {}
    for name, width in shape.items():
        for kind in ("ids", "mask"):
            tensors[f"{name}_{kind}"] = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        parts = sample.token_ids[: sample.prompt_length], sample.token_ids[sample.prompt_length :]
        tensors["prompt_ids"][row, prompts - len(parts[0]) :] = torch.tensor(parts[0])
        tensors["prompt_mask"][row, prompts - len(parts[0]) :] = 1
        tensors["completion_ids"][row, : len(parts[1])] = torch.tensor(parts[1])
        tensors["completion_mask"][row, : len(parts[1])] = 1
    tensors["advantages"] = torch.tensor([sample.advantage for sample in samples])
    return {name: value.to(DEVICE) for name, value in tensors.items()}


def _whole(part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask of prompts and completions, [samples, tokens] each."""
    ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
    return ids, torch.cat([part["prompt_mask"], part["completion_mask"]], 1)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": decays, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def _finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def trl(folder: Path, samples: Sequence[TrainSample], size: str) -> Step:
    """TRL's GRPOTrainer, of which nothing but its log-probs, its loss and its backward pass is
    called.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    rows = SIZES[size][3]
    words = {f"t{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        eos_token="t1",
        pad_token="t2",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=len(samples) // rows,
            num_generations=rows,
            loss_type="grpo",
            beta=0.0,
            gradient_checkpointing=False,
            bf16=DEVICE.type == "cuda",
            use_cpu=DEVICE.type == "cpu",
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t3"] * len(samples)}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = len(samples) // rows
    whole = padded(samples)  # TRL pads a generation batch and cuts it into micro-batches afterwards
    parts = []
    for start in range(0, len(samples), rows):
        parts.append({key: value[start : start + rows] for key, value in whole.items()})
    model = trainer.model.to(DEVICE).train()
    optimizer = _optimizer(model)

    def step() -> float:
        for part in parts:
            ids, mask = _whole(part)
            with torch.no_grad():
                old, _, _ = trainer._get_per_token_logps_and_entropies(
                    model, ids, mask, part["completion_ids"].size(1)
                )
            part["old_per_token_logps"] = old
        for part in parts:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, part)
            loss.backward()
        return _finish(model, optimizer)

    return step


def hugging_face(folder: Path, samples: Sequence[TrainSample], size: str) -> Step:
    """A bare model, padded micro-batches of similar lengths, the policy gradient at ratio one."""
    from transformers import AutoModelForCausalLM

    rows = SIZES[size][3]
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    parts = [padded(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).train()
    optimizer = _optimizer(model)

    def logprobs(part: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask = _whole(part)
        length = part["completion_ids"].size(1)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits = (
                model(ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1].float()
            )
        return -F.cross_entropy(logits.transpose(1, 2), part["completion_ids"], reduction="none")

    def step() -> float:
        with torch.no_grad():
            old = [logprobs(part) for part in parts]
        for part, before in zip(parts, old, strict=True):
            mask = part["completion_mask"]
            gain = (logprobs(part) - before).exp() * part["advantages"][:, None] * mask
            (-(gain.sum(1) / mask.sum(1)).sum() / len(samples)).backward()
        return _finish(model, optimizer)

    return step


def measure(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Seconds of each step, after one that warms up and whose gradient norms must agree."""
    norms = {name: step() for name, step in steps.items()}
    first = next(iter(norms.values()))
    tolerance = 0.05 if DEVICE.type == "cuda" else 1e-3
    assert all(abs(norm - first) < tolerance * first for norm in norms.values()), (
        f"not the same work: {norms}"
    )
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count):
        for name, step in steps.items():
            _synchronise()
            started = time.perf_counter()
            step()
            _synchronise()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def step_flops(samples: Sequence[TrainSample], num_parameters: int, size: str) -> float:
    """Floating-point operations that a step needs at least: two forward passes and one backward
    pass of twice a forward pass; the embedding's look-up costs nothing.
    """
    hidden, layers, *_ = SIZES[size][0]
    tokens = sum(len(sample.token_ids) for sample in samples)
    matrices = 2 * (num_parameters - VOCAB_SIZE * hidden) * tokens
    attention = sum(2 * layers * hidden * len(sample.token_ids) ** 2 for sample in samples)
    return 4.0 * (matrices + attention)


def main() -> int:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--size", choices=SIZES, default="large" if DEVICE.type == "cuda" else "small"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count(),
        help="of an operator on the CPU (default: all)",
    )
    parser.add_argument(
        "--trl",
        type=Path,
        help="where TRL was installed; without it, and without TRL, it is left out",
    )
    options = parser.parse_args()
    if options.trl is not None:
        sys.path.append(str(options.trl))
    torch.set_num_threads(options.threads)
    samples = make_samples(SIZES[options.size][1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = make_model(folder, options.size)
        with ours(folder, samples, options.size) as step:
            steps = {"rlpost": step}
            if importlib.util.find_spec("trl"):
                steps["TRL GRPOTrainer"] = trl(folder, samples, options.size)
            steps["Hugging Face, padded"] = hugging_face(folder, samples, options.size)
            lines = report(measure(steps, options.steps), samples, num_parameters, options)
    show(HEADING, lines, write=options.write)
    return 0


def report(
    seconds: dict[str, list[float]],
    samples: Sequence[TrainSample],
    num_parameters: int,
    options: argparse.Namespace,
) -> list[str]:
    """The table and what it is about."""
    lengths = [len(sample.token_ids) for sample in samples]
    tokens, flops = sum(lengths), step_flops(samples, num_parameters, options.size)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{options.threads} threads"
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)
    ours_s = statistics.median(seconds["rlpost"])
    rows = []
    for name, each in seconds.items():
        median = statistics.median(each)
        share = [f"{100 * flops / median / peak:.1f} %"] if peak else []
        cells = [name, f"{tokens / median:.0f}", f"{median:.2f}", f"{min(each):.2f}"]
        rows.append([*cells, f"{median / ours_s:.2f}", *share])
    header = ["step of", "tokens/s", "median s", "least s", "time, rlpost = 1"]
    header += ["of peak"] if peak else []
    return [
        "Log-probs of the old policy, forward, backward, clipping and AdamW on one random Qwen3 of",
        f"{num_parameters / 1e6:.1f} million parameters and {len(samples)} samples of {min(lengths)} to {max(lengths)}",
        f"tokens ({tokens} in all), {options.steps} interleaved steps; TRL and Hugging Face in micro-batches of",
        f"{SIZES[options.size][3]}, padded (see the file). {device}, torch {torch.__version__}; {machine()}:",
        "",
        "```bash",
        "python -m benchmarks.train_step --trl FOLDER --write",
        "```",
        "",
        *table(header, rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
