"""Megatron's torch_dist to Hugging Face weights: ``--input-dir X --output-dir Y --origin-hf-dir Z``.

Alone, under torchrun or under srun; MODEL_ARGS of Megatron recipes and every layout are understood (docs/actor.md).
"""

from __future__ import annotations

import sys

from rlpost.cli.convert import torch_dist_to_hf

if __name__ == "__main__":
    sys.exit(torch_dist_to_hf())
