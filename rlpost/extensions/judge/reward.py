"""The reward of --rm-type judge (``rlpost.tasks.reward.grader.ModelReward``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlpost.config.engine_groups import engine_groups, judge_group
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.tree import Config
from rlpost.engines.group_client import EngineClients
from rlpost.errors import ConfigError
from rlpost.extensions.judge.judge import REFUSED, UNPARSABLE, Judge
from rlpost.extensions.judge.judge_file import prompt_values, read_judge
from rlpost.extensions.judge.special_text import SpecialText
from rlpost.extensions.judge.verdicts import NoVerdict
from rlpost.tasks.reward.grader import NoReward
from rlpost.types import Prompt, Sample, refuse_images

JUDGE = "judge"
NO_VERDICT = "the judge gives no verdict (--judge: its template and grammar)"


class JudgeReward:
    """Rewards by the verdicts of a judge; an answer without one has none."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.compares_answers = judge.file.compares_answers

    async def rewards(
        self, prompt: Prompt, samples: Sequence[Sample]
    ) -> Sequence[float | NoReward]:
        """See ``ModelReward``. Raises ConfigError for a prompt with images."""
        refuse_images(prompt.images, "a judge")
        values = prompt_values(prompt.text, prompt.label, prompt.metadata)
        verdicts = await self._judge.rewards(values, [sample.text for sample in samples])
        return [_no_reward(one) if isinstance(one, NoVerdict) else one for one in verdicts]

    def counters(self) -> Mapping[str, float]:
        """See ``ModelReward``."""
        return self._judge.counters()


def _no_reward(verdict: NoVerdict) -> NoReward:
    metric = REFUSED if verdict.kind == "refused" else UNPARSABLE
    return NoReward(metric, f"{verdict.kind}: {verdict.why}", NO_VERDICT)


def judge_reward(config: Config, engines: EngineClients) -> JudgeReward | None:
    """Return the reward of --judge; None without a file or a model.

    Raises ConfigError as ``read_judge``.
    """
    settings = config.rollout
    name = judge_group(settings)
    if settings.judge is None or name is None:
        return None
    group = engine_groups(config)[name].settings
    of_policy = config.checkpoint.hf_checkpoint if group.follows_policy else None
    special = SpecialText.of_model(group.model or of_policy)
    return JudgeReward(Judge(read_judge(settings.judge), engines[name], special))


def check_judge(settings: RolloutConfig) -> None:
    """Check the settings of the judge and read its file.

    Raises:
        ConfigError: --rm-type judge without a file or an address; a file without a template, or
            with a mistake (``read_judge``).
    """
    is_judged = settings.rm_type == JUDGE
    if is_judged and settings.judge is None:
        raise ConfigError(
            f"--rm-type {JUDGE} needs the file with the judge's template and verdicts; add --judge FILE.toml "
            "(docs/rewards.md)"
        )
    if is_judged and judge_group(settings) is None:
        raise ConfigError(
            f"--rm-type {JUDGE} needs the model that judges; add --judge-engines NAME, a table [engines.NAME], or "
            "--judge-url http://HOST:PORT/v1"
        )
    if settings.judge_url is not None and settings.judge_engines is not None:
        raise ConfigError(
            f"--judge-engines {settings.judge_engines} and --judge-url name two models that judge; leave one of "
            "them out"
        )
    url = settings.judge_url
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--judge-url {url!r}: must start with http:// or https://")
    if settings.judge is not None:
        try:
            read_judge(settings.judge)
        except ConfigError as error:
            raise ConfigError(f"--judge {error}") from error
