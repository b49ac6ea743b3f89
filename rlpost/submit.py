"""``python -m rlpost.submit``; see ``rlpost.cli.submit``."""

import sys

from rlpost.cli.submit import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
