"""The tables [engines.NAME] of a recipe: groups of engines beside those of the policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from common.fleet_name import POLICY
from rlpost.config.groups.base import (
    FilePath,
    Group,
    Positive,
    PositiveNumber,
    path_keys,
    several,
)
from rlpost.config.groups.sglang import ServerArgs

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _url(given: str) -> str:
    if not given.startswith(("http://", "https://")):
        raise ValueError(f"{given!r} must start with http:// or https://")
    return given.rstrip("/")


class EngineGroup(ServerArgs):
    """One group: SGLang engines that the job or the fleet's jobs start, or servers that exist (url).
    Further keys sglang_X are passed to SGLang's ServerArgs as X."""

    model: FilePath | None = None
    """Hugging Face folder of the model. Default with follows_policy: --hf-checkpoint."""
    engines: Annotated[int, Field(ge=0)] = 1
    """Engines of the group. With fleet: the jobs that `rlpost submit` submits together with the
    run, which may be 0."""
    fleet: bool = False
    """Let the engines join from separate jobs, which may be preempted and start again at any
    time (docs/fleet.md). `rlpost fleet RUN --group NAME` adds and removes them."""
    gpus: Positive | None = None
    """GPUs of each engine, its tensor-parallel size. Default: 1, or those of its nodes."""
    nodes: Positive | None = None
    """Whole nodes of each engine, instead of gpus."""
    follows_policy: bool = False
    """Give the engines weights of the policy, as an evaluation beside training needs them
    (--eval-engines). Without it they keep those of model."""
    url: Annotated[tuple[Annotated[str, AfterValidator(_url)], ...], BeforeValidator(several)] = ()
    """URLs of servers that exist, such as http://HOST:PORT, instead of engines that the job starts;
    a request goes to the least busy one."""
    served_model: str | None = None
    """Name of the model in chat requests to these servers. Default: default, which SGLang accepts."""
    api_key_env: str | None = None
    """Environment variable with the key of these servers, where the run is submitted."""
    api_key_file: FilePath | None = None
    """File with the key of these servers, readable by you alone and on the driver's node."""
    concurrency: Positive = 64
    """Requests in flight on one engine; further ones wait in the driver."""
    timeout_s: PositiveNumber = 300.0
    """Seconds of one request with its retries, not counting waits for an engine that serves. Then
    the answer that it judges is left out of its group."""
    cache_mib: Annotated[int, Field(ge=0)] = 64
    """Host memory for replies, in MiB, by the content of the request: equal requests at temperature
    0, and equal texts to score, are sent once. 0: none."""

    @property
    def is_started(self) -> bool:
        """Whether the engines are started for the run: by its job, or by jobs of its fleet."""
        return not self.url

    @property
    def num_placed(self) -> int:
        """Engines of the group in the run's own job."""
        return 0 if self.url or self.fleet else self.engines

    def gpus_per_engine(self, per_node: int) -> int:
        """GPUs of each engine, on nodes of ``per_node``."""
        if self.nodes is not None:
            return self.nodes * per_node
        return self.gpus or 1


class EnginesConfig(Group):
    """Groups of engines beside those of the policy, one table [engines.NAME] each: judges, reward
    models, teachers, evaluation (docs/engines.md)."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)
    __pydantic_extra__: dict[str, EngineGroup] = Field(init=False)

    @property
    def groups(self) -> Mapping[str, EngineGroup]:
        return self.__pydantic_extra__ or {}

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Each path in a group, with its key as messages spell it."""
        return [
            (f"{key} of [engines.{name}]", str(path))
            for name, group in self.groups.items()
            for key in path_keys(EngineGroup)
            if (path := getattr(group, key)) is not None
        ]

    @property
    def started(self) -> dict[str, EngineGroup]:
        """The groups whose engines are started for the run."""
        return {name: group for name, group in self.groups.items() if group.is_started}

    @model_validator(mode="after")
    def _names(self) -> EnginesConfig:
        for name in self.groups:
            if name == POLICY:
                raise ValueError(
                    f"[engines.{POLICY}]: the policy's engines are those of [cluster] and [sglang]; "
                    "use another name"
                )
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"[engines.{name}]: a name has lower-case letters, digits and _, and begins "
                    "with a letter"
                )
        return self
