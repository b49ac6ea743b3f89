"""Real SGLang engines that load the trainer's adapters beside the base: each family's log-probs are
those of the trainer, and an adapter is replaced while requests of the old one end in every way.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(600)
RANK, ALPHA = 4, 8.0
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ATTENTION = TARGETS[:2]
