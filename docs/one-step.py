"""Steps of GRPO with the functions that a run uses, on one process, without Ray, engines or files.

    make assets
    python docs/one-step.py            # prints the reward of 40 steps, in about a minute

A run does the same with more parts: SGLang engines generate (``rlpost.rollout``), processes with a time
limit grade (``rlpost.tasks.reward``), ranks of Megatron-core compute log-probs and gradients
(``rlpost.trainer``), and the driver connects them (``rlpost.driver.loop``).
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.algorithm.advantage import grpo_advantages
from rlpost.algorithm.loss import token_weights
from rlpost.algorithm.objective import Tokens, loss_function
from rlpost.config.load import load
from rlpost.tasks.reward.registry import reward_function

TINY = Path(__file__).parents[1] / "assets/tiny"
PROMPTS, ANSWERS, LENGTH = 16, 8, 8
SETTINGS = load([], {"grpo": {"eps_clip_high": 0.28}}).config.loss_settings


def generate(model, tokenizer, rows):
    """Return ids [N, P + R], which of them are no padding, P, and 1 for each answer token [N, R]."""
    prompts = [row["prompt"] for row in rows for _ in range(ANSWERS)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=LENGTH,
        do_sample=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    width = inputs["input_ids"].shape[1]
    is_end = (ids[:, width:] == tokenizer.eos_token_id).long()
    mask = is_end.cumsum(1) - is_end == 0  # the end token itself is trained, padding follows it
    attended = torch.cat([inputs["attention_mask"], mask.long()], 1)
    return ids, attended, width, mask.float()


def answer_logprobs(model, ids, attended, width):
    """Return log-probs and entropies of the answer tokens, each [N, R]."""
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=attended, position_ids=positions).logits[:, width - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, width:, None])[..., 0], entropy


def grade(tokenizer, ids, width, mask, rows):
    """Return the reward of each answer, 0 or 1."""
    score = reward_function("exact_match")
    labels = [row["label"] for row in rows for _ in range(ANSWERS)]
    texts = [
        tokenizer.decode(answer[kept.bool()], skip_special_tokens=True)
        for answer, kept in zip(ids[:, width:], mask, strict=True)
    ]
    return [float(score(text, label, {})) for text, label in zip(texts, labels, strict=True)]


def objective(logprobs, entropy, old, advantages, mask):
    """Return the loss of a step: the mean over samples of the mean over their tokens."""
    kept, lengths = mask.bool(), mask.sum(1)

    def of_tokens(per_sample):
        return per_sample[:, None].expand_as(mask)[kept]

    tokens = Tokens(
        logprobs=logprobs[kept],
        entropy=entropy[kept],
        old_logprobs=old[kept],
        rollout_logprobs=old[kept],  # one model both generates and trains here
        ref_logprobs=None,
        advantages=of_tokens(torch.tensor(advantages)),
        loss_mask=mask[kept],
        sample_lengths=of_tokens(lengths).long(),
        sample_sums=lambda values: values,  # of GSPO and of sequence-level corrections
    )
    losses, _ = loss_function(SETTINGS)(tokens, SETTINGS)
    weights = token_weights(
        tokens.sample_lengths, num_samples=len(mask), num_tokens=int(mask.sum()), per_token=False
    )
    return (losses * weights).sum()


def main(num_steps: int) -> list[float]:
    """Train; return the mean reward of each step."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()]
    means = []
    for step in range(num_steps):
        batch = rows[step * PROMPTS : (step + 1) * PROMPTS]
        with torch.no_grad():
            ids, attended, width, mask = generate(model, tokenizer, batch)
            old, _ = answer_logprobs(model, ids, attended, width)
        rewards = grade(tokenizer, ids, width, mask, batch)
        groups = [rewards[at : at + ANSWERS] for at in range(0, len(rewards), ANSWERS)]
        advantages = [value for group in groups for value in grpo_advantages(group)]
        logprobs, entropy = answer_logprobs(model, ids, attended, width)
        loss = objective(logprobs, entropy, old, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        means.append(sum(rewards) / len(rewards))
        print(f"step {step + 1}  reward {means[-1]:.3f}  loss {loss.item():+.4f}", flush=True)
    return means


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
