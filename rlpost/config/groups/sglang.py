"""The table [sglang] of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from rlpost.config.groups.base import Group, Positive
from rlpost.config.server_arg_values import typed_args


class SglangConfig(Group):
    """Engines and router. Any other --sglang-X goes to SGLang's own ServerArgs under the name X."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    sglang_server_concurrency: Positive = 512
    """Requests under way at one engine."""
    router_policy: Literal["cache_aware", "round_robin", "random"] = "cache_aware"
    """How the router chooses an engine."""
    rollout_external_engine_addrs: tuple[str, ...] = ()
    """HOST:PORT of engines that somebody else runs, in place of our own; their key is in SGLANG_API_KEY."""
    rollout_health_check_interval: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds between two looks at the engines; one that is dead or hangs is restarted."""
    rollout_health_check_timeout: Annotated[float, Field(gt=0.0)] = 30.0
    """Seconds after which an engine that does not answer counts as hung."""

    @property
    def given_server_args(self) -> dict[str, Any]:
        """The pass-through settings as they were given, without the prefix."""
        return {key.removeprefix("sglang_"): value for key, value in (self.model_extra or {}).items()}

    @property
    def server_args(self) -> dict[str, Any]:
        """The pass-through settings by the names of SGLang's ServerArgs, typed as it types them.

        One that is unset is left out. A value that SGLang does not take stays as it was given; ``check`` refuses it.
        """
        return typed_args(self.given_server_args)

    @property
    def shares_attention(self) -> bool:
        """Whether attention is data-parallel inside an engine."""
        return bool(self.server_args.get("enable_dp_attention"))

    @model_validator(mode="after")
    def _only_sglang_names(self) -> SglangConfig:
        for key in self.model_extra or {}:
            if not key.startswith("sglang_"):
                raise ValueError(f"unknown key '{key}'; options for SGLang itself begin with 'sglang_'")
        return self
