"""``--num-epoch``: the number of steps from the number of prompts.

Input: settings as given. Output: the same with ``num_rollout``. A run keeps that number in
run.json, so that a requeued job trains as many steps as the first one.
"""

from __future__ import annotations

from rlpost.config.load import Loaded
from rlpost.config.wording import spelled, with_values
from rlpost.data.rows import num_rows
from rlpost.errors import ConfigError, DataError

NUM_ROLLOUT = "rollout.num_rollout"


def with_epochs(loaded: Loaded) -> Loaded:
    """Return the settings with the steps of ``--num-epoch``, if it is given.

    An epoch has as many steps as ``rollout_batch_size`` divides its rows into, rounded down, as in
    slime (``get_num_rollout_per_epoch``).

    Raises:
        ConfigError: the rows cannot be counted, have no epochs or fill no step; or --num-rollout is
            given and differs.
    """
    rollout = loaded.config.rollout
    if rollout.num_epoch is None:
        return loaded
    epochs = spelled(loaded.config, "num_epoch")
    if rollout.prompt_data_weights:
        raise ConfigError(
            f"{epochs}: with --prompt-data-weights the files have different epochs; use --num-rollout"
        )
    try:
        rows = sum(num_rows(source) for source in rollout.prompt_data)
    except DataError as error:
        raise ConfigError(
            f"{epochs} needs the number of prompts, but {error} (or give --num-rollout instead)"
        ) from error
    size = rollout.rollout_batch_size
    steps = rows // size * rollout.num_epoch
    if not steps:
        raise ConfigError(
            f"{epochs}: --prompt-data has {rows} rows, fewer than {spelled(loaded.config, 'rollout_batch_size')}; "
            "use a smaller --rollout-batch-size, or --num-rollout"
        )
    if NUM_ROLLOUT in loaded.origins and rollout.num_rollout != steps:
        raise ConfigError(
            f"{epochs} is {steps} steps ({rows} rows, {size} a step), but {spelled(loaded.config, 'num_rollout')} is "
            "given as well; leave one of them out"
        )
    config = with_values(loaded.config, num_rollout=steps)
    return Loaded(config, {**loaded.origins, NUM_ROLLOUT: "--num-epoch"})
