"""Convert Hugging Face weights to Megatron's torch_dist: ``--hf-checkpoint X --save Y``.

Runs as a single process, under torchrun or under srun; accepts the MODEL_ARGS of Megatron recipes
and every layout (docs/actor.md).
"""

from __future__ import annotations

import sys

from rlpost.extensions.converting.convert import hf_to_torch_dist

if __name__ == "__main__":
    sys.exit(hf_to_torch_dist(sys.argv[1:]))
