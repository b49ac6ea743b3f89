"""A complete Hugging Face model of half a million parameters, made on the spot and without any download.

Comes in: a folder, a seed. Goes out, in that folder: a Qwen3 with tied embeddings, a character tokenizer with a chat
template, and a generation config. A short supervised warm-up on two-digit addition leaves it right now and then, so
that reinforcement learning has something to reinforce. The problems come from ``make_arithmetic_data.py``, which is
run first where they are missing; the held-out ones are never trained on.

``tiny_model.json`` is written last and says that the folder is complete: a second call with the same settings does
nothing. The same settings give the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMPLETE = "tiny_model.json"
FORMAT = 1  # raise it when a change makes folders of the past wrong
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzQA+-*=?:., \n"
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCAB_SIZE = 64  # every tensor-parallel size up to 8 divides it with room to spare
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
LONGEST_ANSWER = 4


def make_tokenizer() -> Any:
    """One id a character; ids left over get names of their own, so that whatever is sampled can be decoded."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    spare = [f"<|spare{i}|>" for i in range(VOCAB_SIZE - len(SPECIAL) - len(CHARACTERS))]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, *spare])}
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=spare[-1]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *spare])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=spare[-1],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: Any) -> Any:
    """Random weights; eight query and four key-value heads, so that grouped attention and four-way splits are real."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def read_problems(path: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids with the end token) of each line."""
    pairs = []
    for line in path.read_text().splitlines():
        problem = json.loads(line)
        answer = [*tokenizer.encode(problem["label"]), tokenizer.eos_token_id]
        pairs.append((tokenizer.encode(problem["prompt"]), answer))
    return pairs


def accuracy(model: Any, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Share of problems whose greedy answer is right to the last token. All prompts have one length."""
    import torch

    prompts = torch.tensor([prompt for prompt, _ in pairs])
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=LONGEST_ANSWER, do_sample=False
    )
    answers = made[:, prompts.shape[1] :].tolist()
    right = [given[: len(wanted)] == wanted for given, (_, wanted) in zip(answers, pairs, strict=True)]
    return sum(right) / len(right)


def warm_up(model: Any, pairs: list[tuple[list[int], list[int]]], *, num_steps: int, seed: int) -> None:
    """Supervised steps on the answers alone (Adam, cross entropy)."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    ignored, started = -100, time.monotonic()
    for step in range(1, num_steps + 1):
        batch = [pairs[i] for i in torch.randint(len(pairs), (BATCH_SIZE,), generator=drawn).tolist()]
        longest = max(len(answer) for _, answer in batch)
        prompts = torch.tensor([prompt for prompt, _ in batch])
        answers = torch.tensor([answer + [ignored] * (longest - len(answer)) for _, answer in batch])
        inputs = torch.cat([prompts, answers.clamp(min=0)], dim=1)
        logits = model(inputs).logits[:, prompts.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=ignored)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == num_steps:
            print(f"  warm-up {step}/{num_steps} loss {loss.item():.3f} {time.monotonic() - started:.1f} s", flush=True)


def build(folder: Path, data: Path, *, seed: int, num_steps: int) -> float:
    """Make everything in ``folder``; return the accuracy on the held-out problems."""
    import torch

    torch.set_num_threads(1)  # sums in a fixed order; more threads gain nothing at this size
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, read_problems(data / "train.jsonl", tokenizer), num_steps=num_steps, seed=seed)
    share = accuracy(model.eval(), read_problems(data / "heldout.jsonl", tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"  {sum(p.numel() for p in model.parameters())} parameters, {share:.1%} of the held-out problems right")
    return share


def is_complete(out: Path, settings: dict[str, int]) -> bool:
    """Whether ``out`` holds everything that a call with these settings would make."""
    marker = out / COMPLETE
    if not marker.is_file():
        return False
    made = json.loads(marker.read_text())
    return made["settings"] == settings and all((out / name).is_file() for name in made["files"])


def publish(built: Path, out: Path, said: dict[str, Any]) -> None:
    """Move the files of ``built`` into ``out``, the marker last: a reader who waits for it never sees a half."""
    (out / COMPLETE).unlink(missing_ok=True)
    said["files"] = sorted(path.name for path in built.iterdir())
    for name in said["files"]:
        os.replace(built / name, out / name)
    marker = built / COMPLETE
    marker.write_text(json.dumps(said, indent=1) + "\n")
    os.replace(marker, out / COMPLETE)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("assets/tiny"), help="folder of the model")
    parser.add_argument("--data", type=Path, help="folder of the problems; the same as --out unless given")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=240, help="supervised steps of 64 problems")
    arguments = parser.parse_args(argv)
    out, data = arguments.out, arguments.data or arguments.out
    settings = {"format": FORMAT, "seed": arguments.seed, "warmup_steps": arguments.warmup_steps}
    if is_complete(out, settings):
        print(f"{out}: already there")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    if not all((data / name).is_file() for name in ("train.jsonl", "heldout.jsonl")):
        maker = Path(__file__).with_name("make_arithmetic_data.py")
        subprocess.run([sys.executable, str(maker), "--out", str(data)], check=True)
    print(f"{out}: making a tiny model", flush=True)
    built = out / f".building.{os.getpid()}"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    try:
        share = build(built, data, seed=arguments.seed, num_steps=arguments.warmup_steps)
        publish(built, out, {"settings": settings, "heldout_accuracy": share})
    finally:
        shutil.rmtree(built, ignore_errors=True)
    print(f"{out}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
