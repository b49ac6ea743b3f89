"""From the settings of a run to what the reader of prompts takes, and the check of its files.

Input: the table [rollout], of a run or as an evaluation set changes it. Output: the keys of a row, how long a
prompt may be, or an error for the first file that cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.config.groups.rollout import RolloutConfig
from rlpost.data.prompts import PromptFields, check_prompt_file
from rlpost.errors import ConfigError


def prompt_fields(rollout: RolloutConfig) -> PromptFields:
    """The keys of prompt, label, metadata and tools."""
    return PromptFields(rollout.input_key, rollout.label_key, rollout.metadata_key, rollout.tool_key)


def longest_prompt(rollout: RolloutConfig) -> int | None:
    """Tokens of the longest prompt that is asked, with room for an answer of one token; None without a bound."""
    context = rollout.rollout_max_context_len
    bounds = (rollout.rollout_max_prompt_len, None if context is None else context - 1)
    return min((bound for bound in bounds if bound is not None), default=None)


def check_prompts(sources: Sequence[str], rollout: RolloutConfig) -> None:
    """Read the files as a run would, up to the tokenizer.

    Raises:
        ConfigError: --prompt-data-weights does not go with the files.
        DataError: a file cannot be read, or a row is bad and those are not skipped.
    """
    weights = rollout.prompt_data_weights
    if weights and tuple(sources) == rollout.prompt_data and len(weights) != len(sources):
        raise ConfigError(
            f"--prompt-data-weights {' '.join(f'{weight:g}' for weight in weights)}: {len(weights)} weights for "
            f"{len(rollout.prompt_data)} --prompt-data; "
            "give one for each, in their order, or none"
        )
    for source in sources:
        check_prompt_file(
            source,
            prompt_fields(rollout),
            apply_chat_template=rollout.apply_chat_template,
            skip_bad=rollout.bad_prompts == "skip",
        )
