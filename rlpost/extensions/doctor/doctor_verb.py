"""``rlpost doctor``: run the agent's checks on this machine, or check an image with --image.

Input: flags of ``bootstrap.doctor.node`` or ``bootstrap.image.doctor``. Output: what these print, and
their exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from rlpost.config.keys import without_keys


def main(arguments: Sequence[str]) -> int:
    """Diagnose this machine, or an image. Raises ConfigError."""
    if "--image" in arguments:
        words = [word for word in arguments if word != "--image"]
        if any(word.partition("=")[0] == "--cluster" for word in words):
            from rlpost.extensions.doctor.image_job import main as look

            return look(words)
        if any(word.endswith(".toml") for word in words):
            from rlpost.extensions.doctor.image_job import words_of_recipes

            words = words_of_recipes(words)
        # In a separate process: an image without rlpost's dependencies can be checked too.
        return _run(["-m", "bootstrap.image.doctor", *words])
    return _run(["-m", "bootstrap.doctor.node", *arguments])


def _run(words: Sequence[str]) -> int:
    """Run Python in a separate process; return its exit code."""
    return subprocess.run([sys.executable, *words], env=without_keys(os.environ)).returncode
