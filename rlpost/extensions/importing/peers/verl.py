"""The rows of verl, in the order in which an import lists its defaults.

The keys are those of ``verl.trainer.main_ppo`` at 1dda039 (22 August 2026), and older names of them.
"""

from __future__ import annotations

from rlpost.extensions.importing.peers.row import Stack
from rlpost.extensions.importing.peers.verl_actor import ACTOR_ROWS
from rlpost.extensions.importing.peers.verl_data import DATA_ROWS
from rlpost.extensions.importing.peers.verl_engines import ENGINES_ROWS
from rlpost.extensions.importing.peers.verl_layout import LAYOUT_ROWS
from rlpost.extensions.importing.peers.verl_run import RUN_ROWS

VERL = Stack("verl", (*DATA_ROWS, *RUN_ROWS, *ACTOR_ROWS, *LAYOUT_ROWS, *ENGINES_ROWS))
"""The rows of verl."""
