"""A driver that only records its cluster: ``python -m bootstrap.simulated.driver FILE < CLUSTER``.

Input: the head's line. Output: the same line in ``FILE``; the attempt then ends as done.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.exit_codes import EXIT_DONE, EXIT_FAILED
from common.files import write_atomic


def main() -> int:
    """Record the line; ``EXIT_FAILED`` if the bring-up failed and there is none."""
    line = sys.stdin.readline()
    if not line:
        return EXIT_FAILED
    write_atomic(Path(sys.argv[1]), line)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
