"""Rehearsal: build all ranks of a configuration on the meta device, sequentially in one process.

Input: the settings of a recipe and the description of its model. Output: facts about each rank
(groups, weights, optimizer shards), the calls that each issues in a step, and the faults among
them. No collective runs and no tensor has data.

Imports ``rlpost.trainer`` first, which must happen before ``megatron.core`` on a CPU.
"""

import rlpost.trainer  # noqa: F401
