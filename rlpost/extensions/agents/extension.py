"""The row of environments and sandboxes."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="agents",
    tables={
        "env": "rlpost.extensions.agents.env_table:EnvConfig",
        "sandbox": "rlpost.extensions.agents.sandbox_table:SandboxConfig",
    },
    checks=(
        "rlpost.extensions.agents.checks:agent_problems",
        "rlpost.extensions.agents.checks:sandbox_problems",
    ),
    public_names={
        name: f"rlpost.extensions.agents.environments.turns:{name}" for name in ("Step", "Turn")
    },
    on_node=("rlpost.extensions.agents.sandbox.settings:check_node",),
    answers="rlpost.extensions.agents.answers:episode_answers",
    job="rlpost.extensions.agents.sandbox.jobs:SANDBOX_JOBS",
    moved={
        "rlpost.agents": "rlpost.extensions.agents",
        **{
            f"rlpost.config.keys.{name}": f"rlpost.extensions.agents.references.{name}"
            for name in ("references", "resolve_references")
        },
        "rlpost.rollout.episode_results": "rlpost.extensions.agents.episode_results",
        "rlpost.rollout.turns": "rlpost.extensions.agents.environments.turns",
        "rlpost.observe.traces.EpisodeFile": "rlpost.extensions.agents.episode_file.EpisodeFile",
    },
)
