"""Convert Megatron's torch_dist to Hugging Face weights: ``--input-dir X --output-dir Y
--origin-hf-dir Z``.

Runs as a single process, under torchrun or under srun; accepts the MODEL_ARGS of Megatron recipes
and every layout (docs/actor.md).
"""

from __future__ import annotations

import sys

from rlpost.extensions.converting.convert import torch_dist_to_hf

if __name__ == "__main__":
    sys.exit(torch_dist_to_hf(sys.argv[1:]))
