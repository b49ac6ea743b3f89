"""Create a complete Hugging Face model of half a million parameters without any download.

Input: a folder, a seed. Output, in that folder: a Qwen3 with tied embeddings, a character tokenizer
with a chat template, and a generation config. A short supervised warm-up on two-digit addition ends
when about a third of the answers are right, so that reinforcement learning has rewards.
``arithmetic_data`` creates the problems if they are missing; the held-out ones are never trained on.
``rlpost fetch tiny`` calls this.

``tiny_model.json`` is written last and marks the folder as complete: a second call with the same
settings does nothing. The same settings give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from common.modes import follow_umask
from rlpost.cli.waiting_notes import explained
from rlpost.extensions.fetching import arithmetic_data
from rlpost.models.model_types import HfConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

COMPLETE = "tiny_model.json"
FORMAT = 2  # increment it when existing folders become invalid
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzQA+-*=?:., \n"
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB_SIZE = 64  # divisible by every tensor-parallel size up to 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
AGENTS_CONTEXT = 16384
"""Characters, with the rules of a game or the tools of a domain."""
OF_CALLS = '{}"_<>/'
"""Characters that calls of tools have besides."""
AGENTS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] }}"
    '{% for call in message.tool_calls or [] %}{{ \'<tool_call>{"name": "\' + call.function.name }}'
    "{{ '\", \"arguments\": ' + call.function.arguments | tojson + '}</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As Qwen2.5 writes calls; marks of roles are those of ``CHAT_TEMPLATE``."""
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
LONGEST_ANSWER = 4
RIGHT_FROM, NUM_COUNTED, MOST_STEPS = 0.3, 8, 1000
"""A warm-up ends with the step at which this share of the answers of the last batches was right."""


def make_tokenizer(
    special: Sequence[str] = SPECIAL,
    template: str = CHAT_TEMPLATE,
    characters: str = CHARACTERS,
) -> PreTrainedTokenizerFast:
    """One id per character; unused ids get names, so that every sampled id can be decoded."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    spare = [f"<|spare{i}|>" for i in range(VOCAB_SIZE - len(special) - len(characters))]
    vocab = {token: i for i, token in enumerate([*special, *characters, *spare])}
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=spare[-1]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special, *spare])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=spare[-1],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


TINY: HfConfig = dict(
    model_type="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=True,
)
"""Eight query and four key-value heads, so that grouped attention and four-way splits are real."""


def make_model(tokenizer: PreTrainedTokenizerFast, hf: HfConfig) -> PreTrainedModel:
    """Random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    fields = {"max_position_embeddings": 512}
    fields |= {
        key: value for key, value in hf.items() if key not in ("model_type", "architectures")
    }
    config = AutoConfig.for_model(hf["model_type"], **fields, **ids)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def read_problems(
    path: Path, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, answer ids and end token) per line."""
    pairs = []
    for line in path.read_text().splitlines():
        problem = json.loads(line)
        answer = [*tokenizer.encode(problem["label"]), tokenizer.eos_token_id]
        pairs.append((tokenizer.encode(problem["prompt"]), answer))
    return pairs


def accuracy(model: PreTrainedModel, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Share of problems with an exact greedy answer. All prompts have one length."""
    import torch

    prompts = torch.tensor([prompt for prompt, _ in pairs])
    generated = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
    )
    answers = generated[:, prompts.shape[1] :].tolist()
    right = [
        answer[: len(expected)] == expected
        for answer, (_, expected) in zip(answers, pairs, strict=True)
    ]
    return sum(right) / len(right)


def warm_up(
    model: PreTrainedModel,
    pairs: list[tuple[list[int], list[int]]],
    *,
    num_steps: int | None,
    seed: int,
) -> None:
    """Supervised steps on the answers alone (Adam, cross entropy).

    ``num_steps`` None: until a share of ``RIGHT_FROM`` is right, before they are trained on.
    """
    import torch

    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    started, shares = time.monotonic(), list[float]()
    for step in range(1, 1 + (MOST_STEPS if num_steps is None else num_steps)):
        indices = torch.randint(len(pairs), (BATCH_SIZE,), generator=drawn).tolist()
        loss, share = answer_loss(model, [pairs[index] for index in indices])
        shares.append(share)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        is_able = num_steps is None and fmean(shares[-NUM_COUNTED:]) >= RIGHT_FROM
        if step % 100 == 0 or step == num_steps or is_able:
            seconds = time.monotonic() - started
            print(f"  warm-up: {step} steps, loss {loss.item():.3f}, {seconds:.1f} s", flush=True)
        if is_able:
            return


def answer_loss(
    model: PreTrainedModel, batch: list[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, float]:
    """Return the mean cross entropy of the tokens of answers, a scalar, and the share of right ones.

    An answer is right if each of its tokens is the most likely one after those before it, so if
    greedy decoding gives it.
    """
    import torch

    ignored = -100
    longest = max(len(answer) for _, answer in batch)
    prompts = torch.tensor([prompt for prompt, _ in batch])
    answers = torch.tensor([answer + [ignored] * (longest - len(answer)) for _, answer in batch])
    inputs = torch.cat([prompts, answers.clamp(min=0)], dim=1)
    logits = model(inputs).logits[:, prompts.shape[1] - 1 : -1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), answers.flatten(), ignore_index=ignored
    )
    is_right = (logits.argmax(-1) == answers) | (answers == ignored)
    return loss, is_right.all(-1).double().mean().item()


@dataclass(frozen=True)
class ModelPlan:
    """Configuration of a model to create."""

    hf: HfConfig
    """The model's config.json."""
    seed: int = 0
    num_steps: int | None = None
    """Of the warm-up; None: until enough answers are right."""
    for_agents: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """All settings that determine the files, as the marker stores them."""
        said: dict[str, object] = {
            "format": FORMAT,
            "seed": self.seed,
            "warmup_steps": self.num_steps,
        }
        said |= {"agents": True} if self.for_agents else {}
        return said if self.hf == TINY else said | {"model": self.hf}


def build(folder: Path, data: Path, plan: ModelPlan) -> float:
    """Make everything in ``folder``; return the accuracy on the held-out problems."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # of files that are written within a second
    torch.set_num_threads(1)  # sums in a fixed order; more threads gain nothing at this size
    torch.manual_seed(plan.seed)
    tokenizer = make_tokenizer()
    if plan.for_agents:
        tokenizer = make_tokenizer(template=AGENTS_TEMPLATE, characters=CHARACTERS + OF_CALLS)
    model = make_model(tokenizer, plan.hf)
    share = 0.0
    if plan.num_steps != 0:
        problems = read_problems(data / "train.jsonl", tokenizer)
        warm_up(model, problems, num_steps=plan.num_steps, seed=plan.seed)
        heldout = read_problems(data / "heldout.jsonl", tokenizer)
        share = accuracy(model.eval(), heldout)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(
        f"  {sum(p.numel() for p in model.parameters())} parameters, {share:.1%} of the held-out problems right"
    )
    return share


def is_complete(out: Path, settings: Mapping[str, object]) -> bool:
    """Whether ``out`` holds everything that a call with these settings would make."""
    marker = out / COMPLETE
    if not marker.is_file():
        return False
    made = json.loads(marker.read_text())
    return made["settings"] == settings and all((out / name).is_file() for name in made["files"])


def publish(built: Path, out: Path, said: dict[str, Any]) -> None:
    """Move the files of ``built`` into ``out``; the marker comes last and means complete."""
    unfinished = built / COMPLETE
    # Marks the folder as created here, in case this process is killed.
    unfinished.write_text(json.dumps({"settings": None, "files": []}) + "\n")
    os.replace(unfinished, out / COMPLETE)
    said["files"] = sorted(path.name for path in built.iterdir())
    for name in said["files"]:
        os.replace(built / name, out / name)
    marker = built / COMPLETE
    marker.write_text(json.dumps(said, indent=1) + "\n")
    os.replace(marker, out / COMPLETE)


def produce(out: Path, settings: Mapping[str, object], make: Callable[[Path], float]) -> None:
    """Create files with ``make`` and move them to ``out``, unless ``out`` is complete."""
    if is_complete(out, settings):
        print(f"{out}: already there")
        return
    out.mkdir(parents=True, exist_ok=True)
    theirs = sorted(
        path.name
        for path in out.iterdir()
        if path.name == "config.json" or path.suffix == ".safetensors"
    )
    if theirs and not (out / COMPLETE).exists():
        sys.exit(
            f"--out {out}: holds {theirs[0]} and no {COMPLETE}, so it is a model that was not made here; "
            "name another folder"
        )
    print(f"{out}: making a tiny model", flush=True)
    built = out / f".building.{os.getpid()}"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    try:
        with explained("torch and the warm-up of the model (usually 15 s)"):
            share = make(built)
        follow_umask(built)  # safetensors writes files for their owner alone
        publish(built, out, {"settings": settings, "heldout_accuracy": share})
    finally:
        shutil.rmtree(built, ignore_errors=True)
    print(f"{out}: done")


def make_problems(data: Path) -> None:
    """Create the problems if they are missing."""
    if not all((data / name).is_file() for name in arithmetic_data.FILES):
        arithmetic_data.main(["--out", str(data)])


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/tiny"), help="folder of the model")
    parser.add_argument("--data", type=Path, help="folder of the problems (default: --out)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the warm-up"
    )
    parser.add_argument(
        "--warmup-steps",
        type=int,
        help="supervised steps of 64 problems (default: until 30%% of the answers are right)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=TINY["num_hidden_layers"],
        help="layers of the model, such as 6 for a teacher of docs/distillation.md",
    )
    parser.add_argument(
        "--agents",
        action="store_true",
        help="a context and a chat template for environments with tools (docs/agents.md)",
    )
    arguments = parser.parse_args(argv)
    out, data = arguments.out, arguments.data or arguments.out
    hf = dict(TINY) | {"num_hidden_layers": arguments.layers}
    if arguments.agents:
        hf["max_position_embeddings"] = AGENTS_CONTEXT
    plan = ModelPlan(
        hf,
        seed=arguments.seed,
        num_steps=arguments.warmup_steps,
        for_agents=arguments.agents,
    )
    make_problems(data)
    produce(out, plan.settings, lambda built: build(built, data, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
