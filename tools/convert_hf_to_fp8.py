"""Convert Hugging Face weights in bfloat16 to FP8 blocks: ``--hf-checkpoint X --save Y``.

Runs as a single process, with or without a GPU (docs/engines.md).
"""

from __future__ import annotations

import sys

from rlpost.extensions.converting.convert import hf_to_fp8

if __name__ == "__main__":
    sys.exit(hf_to_fp8(sys.argv[1:]))
