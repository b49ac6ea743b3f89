"""``python -m rlpost VERB``; see ``rlpost.cli.main``."""

import sys

from rlpost.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
