"""Episodes as the answers of a run (``rlpost.rollout.answer_source``)."""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.durable.daemon_threads import in_daemon
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.make import make_environments
from rlpost.extensions.agents.episode_file import EpisodeFile
from rlpost.extensions.agents.gateway import Gateway
from rlpost.rollout.answer_source import AnswerParts


class EpisodeAnswers:
    """The environments of a run, the gateway that their harnesses need, and records of episodes."""

    def __init__(
        self,
        environments: EnvironmentSet,
        gateway: Gateway | None,
        *,
        seed: int,
        file: EpisodeFile | None,
    ) -> None:
        self._environments, self._gateway = environments, gateway
        self._seed, self._file = seed, file
        self._training = self._function(None)

    def function(self, evaluation: str | None = None) -> Episodes:
        """See ``AnswerSource``."""
        return self._training if evaluation is None else self._function(evaluation)

    def _function(self, evaluation: str | None) -> Episodes:
        return Episodes(
            self._environments,
            seed=self._seed,
            record=None if self._file is None else self._file.write,
            evaluation=evaluation,
        )

    def counters(self) -> dict[str, float]:
        """See ``AnswerSource``."""
        return self._training.counters()

    async def __aenter__(self) -> None:
        """Open the gateway."""
        if self._gateway is not None:
            await self._gateway.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        """Close the environments, which may ask the gateway, and then the gateway."""
        try:
            await self._environments.close()
        finally:
            if self._gateway is not None:
                await self._gateway.__aexit__(None, None, None)

    async def close(self) -> None:
        """Wait for pending records."""
        if self._file is not None:
            await in_daemon(self._file.close)


def episode_answers(config: Config, parts: AnswerParts) -> EpisodeAnswers | None:
    """Return the answers of --env; None without it. Raises as ``make_environments``."""
    settings = config.table(EnvConfig)
    if not settings.env:
        return None
    environments, gateway = make_environments(config, parts.run_folder, parts.engines)
    file = None
    if parts.record is not None and settings.env_traces:
        file = EpisodeFile(parts.record, check=parts.check)
    return EpisodeAnswers(environments, gateway, seed=config.rollout.rollout_seed, file=file)
