"""A model that real engines load on a GPU.

Its heads have 64 dimensions, a size that all of SGLang's attention kernels support.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

PROMPTS = 64


def make_gpu_model(folder: Path) -> Path:
    """Make a random Qwen3 in bfloat16, and prompts in ``train.jsonl``.

    It has the tokenizer of the tiny model.
    """
    import torch

    from rlpost.extensions.fetching.tiny_model import TINY, make_model, make_tokenizer

    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    model = make_model(
        tokenizer, TINY | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    dice = random.Random(1)
    problems = [(dice.randint(10, 99), dice.randint(10, 99)) for _ in range(PROMPTS)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in problems]
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder
