"""Where modules and names of the core in 0.2 and later are now."""

from __future__ import annotations

MOVED = {
    **{
        f"rlpost.cli.follow.{name}": f"rlpost.cli.outcome.{name}"
        for name in ("conclude", "ENDING_POLL_S", "EXIT_CODES", "latest_attempt", "summary")
    },
    "rlpost.cli.run_status.AGAIN": "rlpost.cli.runs.AGAIN",
    **{
        f"rlpost.cli.fleet_jobs.{name}": f"rlpost.cli.job.{name}" for name in ("PROJECT", "code_of")
    },
    "rlpost.config.plan.estimate.RESERVE": "rlpost.config.plan.cards.RESERVE",
    **{
        f"rlpost.observe.report.write.{name}": f"rlpost.observe.reporter.{name}"
        for name in ("Reporter", "try_to_write_report")
    },
    "rlpost.reward.answers": "rlpost.tasks.reward.answer_extraction",
    "rlpost.reward.remote": "rlpost.tasks.reward.engine_reward",
    "rlpost.reward": "rlpost.tasks.reward",
}
"""Modules and names of 0.2 and later, and where they are; extensions have others (``Extension.moved``)."""
