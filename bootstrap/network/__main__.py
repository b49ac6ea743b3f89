"""``python -m bootstrap.network``: the command of ``bootstrap.network.here``."""

import sys

from bootstrap.network.here import main

if __name__ == "__main__":
    sys.exit(main())
