"""Download the model and data sets of a recipe from the Hugging Face hub: ``python
tools/fetch_assets.py RECIPE``.

The same as ``rlpost fetch``; see docs/recipes.md.
"""

from __future__ import annotations

import sys

from rlpost.cli.entry import run_command
from rlpost.cli.fetch import main
from rlpost.cli.secret_flags import hide_keys

if __name__ == "__main__":
    hide_keys()
    sys.exit(run_command(main, None))
