"""Create the tiny model and its problems: ``python tools/make_tiny_model.py --out assets/tiny``.

As ``rlpost fetch tiny``, with seeds, layers and steps of the warm-up.
"""

from __future__ import annotations

import sys

from rlpost.cli.tiny_model import main

if __name__ == "__main__":
    sys.exit(main())
