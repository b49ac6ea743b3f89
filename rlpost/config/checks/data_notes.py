"""Notes on data and sampling that are valid and probably unintended. Pure, but for symbolic links.

Input: a ``Config``. Output: one line for each: a file that is read twice, prompts that are both
trained and evaluated, several answers by greedy decoding.
"""

from __future__ import annotations

import os
from itertools import combinations

from rlpost.config.eval_sets import EvalSet, eval_sets
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.errors import ConfigError


def data_notes(config: Config) -> list[str]:
    """Notes on the files of prompts, and on greedy decoding."""
    try:
        sets = eval_sets(config.eval)
    except ConfigError:  # reported by another check
        sets = ()
    return [*_file_notes(config, sets), *_greedy_notes(config, sets)]


def _file_notes(config: Config, sets: tuple[EvalSet, ...]) -> list[str]:
    trained = config.rollout.prompt_data
    notes = [
        f"--prompt-data has {second} twice, so its prompts are trained twice per epoch; name it "
        "once, or use --prompt-data-weights"
        for first, second in combinations(trained, 2)
        if overlap(first, second)
    ]
    return notes + [
        f"the evaluation set {one.name} has prompts of --prompt-data {source}, so it measures what "
        "was trained; keep its prompts apart, for example by slices PATH@[A:B]"
        for one in sets
        for source in dict.fromkeys(trained)
        if overlap(one.path, source)
    ]


def overlap(first: str, second: str) -> bool:
    """Whether two sources surely share rows: of one file the same slice, or a slice and all.

    >>> overlap("a.jsonl", "a.jsonl@[0:9]"), overlap("a.jsonl@[0:9]", "a.jsonl@[9:]")
    (True, False)
    """
    (path, _, part), (other_path, _, other_part) = first.partition("@["), second.partition("@[")
    is_one = os.path.realpath(path) == os.path.realpath(other_path)
    return is_one and (not part or not other_part or part == other_part)


def _greedy_notes(config: Config, sets: tuple[EvalSet, ...]) -> list[str]:
    """Several greedy answers to a prompt are equal, unless an environment or function is random."""
    rollout, evaluation = config.rollout, config.eval
    if config.answers_are_episodes or rollout.custom_generate_function_path is not None:
        return []
    notes = []
    if config.generates and rollout.rollout_top_k == 1 and rollout.n_samples_per_prompt > 1:
        notes.append(
            f"{spelled(config, 'rollout_top_k')} is greedy decoding: the "
            f"{rollout.n_samples_per_prompt} responses to a prompt are equal, and comparing them "
            "gives no advantage; use --rollout-top-k -1"
        )
    for one in sets:
        count = one.n_samples_per_eval_prompt or evaluation.n_samples_per_eval_prompt
        if count > 1 and _is_greedy(one, config) and one.custom_generate_function_path is None:
            notes.append(
                f"--n-samples-per-eval-prompt {count}: the evaluation set {one.name} is decoded "
                f"greedily, so all answers to a prompt are equal and pass@{count} is pass@1; use "
                "--n-samples-per-eval-prompt 1, or --eval-temperature 0.6"
            )
    return notes


def _is_greedy(one: EvalSet, config: Config) -> bool:
    """Whether a set is sampled at temperature 0 or from one token."""
    rollout, evaluation = config.rollout, config.eval
    temperatures = (one.temperature, evaluation.eval_temperature, rollout.rollout_temperature)
    top_ks = (one.top_k, evaluation.eval_top_k, rollout.rollout_top_k)
    temperature = next(value for value in temperatures if value is not None)
    return temperature == 0.0 or next(value for value in top_ks if value is not None) == 1
