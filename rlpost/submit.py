"""``python -m rlpost.submit``; see ``rlpost.cli.submit``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlpost.cli.secret_file import hide_keys


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``python -m rlpost.submit``."""
    if arguments is None:
        hide_keys()
    # Imported late: loading the settings takes longer than a key may be visible in ``ps``.
    from rlpost.cli.submit import main as submit

    return submit(arguments)


if __name__ == "__main__":
    sys.exit(main())
