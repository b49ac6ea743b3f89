"""The row of environments and sandboxes."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="agents",
    tables={
        "env": "rlpost.config.groups.env:EnvConfig",
        "sandbox": "rlpost.config.groups.sandbox:SandboxConfig",
    },
    checks=(
        "rlpost.config.checks.agents:agent_problems",
        "rlpost.config.checks.agents:sandbox_problems",
    ),
    on_node=("rlpost.agents.sandbox.settings:check_node",),
    answers="rlpost.agents.answers:episode_answers",
    job="rlpost.cli.sandboxes:SANDBOX_JOBS",
)
