"""The adapter for tau2-bench, from its repository (sierra-research/tau2-bench, Python 3.12).

    --env tau2:DOMAIN           airline, retail, telecom, mock, ...

Its orchestrator runs a conversation of the policy, a simulated user and the tools of a domain; the
policy is reached through the gateway. Arguments (--env-args): ``user_llm`` and ``user_llm_args``,
model and arguments of the simulated user as litellm takes them; or ``agent`` = "llm_agent_solo",
without a user.

The package ``tau2`` of PyPI is another project (magnetic relaxation rates).

A prompt names its task by ``task`` in the metadata, an id of tau2 or a position; without it, the
prompt id modulo the number of tasks that can be played (``refusal_of``). A simulation that ended
because of the user's model or of infrastructure has no reward: it is started again, then left out.

tau2 has no way to continue a simulation. After an interruption one without a user is replayed in
the domains REPLAYED: their tools compute on a database that is loaded for each simulation, so the
same answers of the policy give the same requests. In other domains it begins again (in telecom a
tool draws an id), and with a user, whose model samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.protocol import Episode, Outcome

INSTALL = (
    "pip install 'tau2 @ git+https://github.com/sierra-research/tau2-bench' with Python 3.12, and TAU2_DATA_DIR "
    "for its data folder (the package tau2 of PyPI is another project)"
)
NOT_THE_AGENT = ("user_error", "infrastructure_error", "unexpected_error", "timeout")
"""Reasons for the end of a simulation that no agent caused."""
SOLO = "llm_agent_solo"
ANY_ANSWER: Mapping[str, object] = {"extra_body": {"tool_choice": "auto"}}
"""For litellm, in place of the ``required`` that the agent without a user asks for: a policy is
sampled without constraints, and an answer without a call is its own fault."""
WITHOUT_CALL = "LLMSoloAgent only supports tool calls"
"""Begin of the ValueError of the agent without a user for an answer without a call. Every other
error of its turn, such as a damaged HTTP answer, is not the policy's."""
REPLAYED = ("airline", "mock", "retail")
"""Domains whose tools use neither a clock nor a random number (read in tau2-bench 1.0.1)."""


class Tau2Harness:
    """All episodes of one domain."""

    def __init__(
        self,
        domain: str,
        *,
        agent: str = "llm_agent",
        user_llm: str | None = None,
        user_llm_args: Mapping[str, object] | None = None,
        split: str | None = "base",
        max_turns: int = 16,
        max_steps: int | None = None,
        evaluation: str = "all",
    ) -> None:
        """
        Args:
            split: which tasks of the domain; None for all.
            max_steps: of the conversation; messages of the user and of tools count. Default: four
                for each of ``max_turns``.
            evaluation: tau2's name of the kind of evaluation.

        Raises:
            ConfigError: tau2-bench is not installed, has no such domain or no task to play, or there is
                no user.
        """
        try:
            from tau2.agent.llm_agent import LLMSoloAgent
            from tau2.data_model.simulation import TextRunConfig
            from tau2.evaluator.evaluator import EvaluationType
            from tau2.orchestrator.orchestrator import Orchestrator
            from tau2.runner import (
                build_agent,
                build_environment,
                build_text_orchestrator,
                get_tasks,
                run_simulation,
            )
            from tau2.user.user_simulator import DummyUser
        except ImportError as error:
            raise ConfigError(f"--env tau2:{domain}: {error}; {INSTALL}") from error
        if agent != SOLO and user_llm is None:
            raise ConfigError(
                f'--env tau2:{domain}: who plays the user? Add --env-args with "user_llm" and "user_llm_args" (as '
                f'for litellm: "openai/MODEL", {{"api_base": "http://HOST:PORT/v1"}}), or "agent": "{SOLO}"'
            )
        self._config_class, self._build = TextRunConfig, build_text_orchestrator
        self._parts = (build_environment, build_agent, DummyUser, Orchestrator)
        self._run = run_simulation
        try:
            self._evaluation = EvaluationType(evaluation)
            self.tasks = list(get_tasks(domain, task_split_name=split))
        except Exception as error:
            raise ConfigError(f"--env tau2:{domain}: {type(error).__name__}: {error}") from error
        self._domain, self._agent = domain, agent
        self._is_valid_for_solo = LLMSoloAgent.check_valid_task
        self._playable = [task for task in self.tasks if not self.refusal_of(task)]
        if not self._playable:
            raise ConfigError(
                f"--env tau2:{domain}: none of its {len(self.tasks)} tasks can be played; the first: "
                f"{self.refusal_of(self.tasks[0]) if self.tasks else 'there is none'}"
            )
        self.deterministic = agent == SOLO and domain in REPLAYED
        self._user_llm, self._user_llm_args = user_llm, dict(user_llm_args or {})
        self._max_steps = max_steps or 4 * max_turns

    def run(self, episode: Episode) -> Outcome:
        """Run a task, in a thread.

        Raises:
            DataError: the prompt names a task that does not exist, or has no criteria.
            GradingLost: the simulation ended for a reason outside the agent, or was not evaluated.
        """
        task = self.task_of(episode)
        without_call: list[str] = []
        orchestrator = self._orchestrator(episode, task, without_call)
        try:
            simulation = self._run(orchestrator, evaluation_type=self._evaluation)
        except ValueError:
            if not without_call:
                raise
            return Outcome(0.0, info={"task": str(task.id), "stop": without_call[0]})
        reason = getattr(simulation.termination_reason, "value", simulation.termination_reason)
        if reason in NOT_THE_AGENT or simulation.reward_info is None:
            raise GradingLost(f"tau2: the simulation of task {task.id} ended by {reason}")
        error = (getattr(simulation.reward_info, "info", None) or {}).get("error")
        if error:  # with reward 0
            raise GradingLost(f"tau2: the evaluation of task {task.id} failed: {error}"[:2000])
        return Outcome(
            float(simulation.reward_info.reward),
            info={"task": str(task.id), "stop": str(reason), "messages": len(simulation.messages)},
        )

    def _orchestrator(self, episode: Episode, task: object, without_call: list[str]) -> object:
        """Return the conversation of an episode, before its first message.

        ``without_call`` gets why an agent without a user cannot go on, before it raises ValueError.
        """
        model = f"openai/{episode.model}"
        arguments = {
            "api_base": episode.base_url,
            "api_key": episode.api_key,
            "num_retries": 0,  # the gateway retries, and a refused key stays refused
            **episode.sampling,
        }
        seed = episode.prompt.prompt_id
        if self._agent == SOLO:
            return self._solo(task, model, {**arguments, **ANY_ANSWER}, seed, without_call)
        config = self._config_class(
            domain=self._domain,
            agent=self._agent,
            llm_agent=model,
            llm_args_agent=arguments,
            llm_user=self._user_llm,
            llm_args_user=self._user_llm_args,
            max_steps=self._max_steps,
        )
        return self._build(config, task, seed=seed)

    def _solo(
        self,
        task: object,
        model: str,
        arguments: dict[str, object],
        seed: int,
        without_call: list[str],
    ) -> object:
        """Return the conversation without a user, built from its parts.

        tau2's own builder passes arguments to its silent user that ``DummyUser`` does not take
        (version 1.0.1, TypeError).
        """
        build_environment, build_agent, silent_user, orchestrator = self._parts
        environment = build_environment(self._domain, solo_mode=True)
        agent = build_agent(
            SOLO, environment, llm=model, llm_args=arguments, task=task, solo_mode=True
        )
        answer = agent.generate_next_message

        def noted(*inputs: Any, **named: Any) -> Any:
            try:
                return answer(*inputs, **named)
            except ValueError as error:  # tau2 has no class for it, but others subclass ValueError
                if type(error) is ValueError and str(error).startswith(WITHOUT_CALL):
                    without_call.append(str(error))
                raise

        agent.generate_next_message = noted
        return orchestrator(
            self._domain,
            agent,
            silent_user(),
            environment,
            task,
            max_steps=self._max_steps,
            seed=seed,
            solo_mode=True,
        )

    def refusal_of(self, task: Any) -> str:
        """Return why a task cannot be played; '' if it can."""
        if getattr(task, "evaluation_criteria", True) is None:
            return "it has no evaluation criteria, and tau2 rewards every answer to it with 1"
        if self._agent == SOLO and not self._is_valid_for_solo(task):
            return f"tau2's agent {SOLO} refuses it; it takes tasks with a ticket and actions"
        return ""

    def task_of(self, episode: Episode) -> Any:
        """Return the task of an episode's prompt. Raises DataError."""
        prompt = episode.prompt
        if "task" not in prompt.metadata:
            return self._playable[prompt.prompt_id % len(self._playable)]
        named = prompt.metadata["task"]
        for number, task in enumerate(self.tasks):
            if named in (number, task.id):
                if refusal := self.refusal_of(task):
                    raise DataError(
                        f"prompt {prompt.prompt_id}: task {task.id} of tau2:{self._domain} cannot be "
                        f"played: {refusal}; leave it out of the prompts"
                    )
                return task
        raise DataError(
            f"prompt {prompt.prompt_id}: 'task' in its metadata is {named!r}; tau2:{self._domain} has "
            f"{len(self.tasks)} tasks, such as {self.tasks[0].id!r}"
        )
