"""The row of runs in one process."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="in_process",
    public_names={"InProcessRun": "rlpost.extensions.in_process.run:InProcessRun"},
    moved={
        "rlpost.driver.in_process.InProcessRun": "rlpost.InProcessRun",
        "rlpost.driver.in_process.TrainedStep": "rlpost.extensions.in_process.run.TrainedStep",
        "rlpost.driver.in_process": "rlpost.extensions.in_process",
    },
)
