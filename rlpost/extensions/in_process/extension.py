"""The row of runs in one process."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="in_process",
    public_names={"InProcessRun": "rlpost.extensions.in_process.run:InProcessRun"},
)
