"""Where modules and names of 0.2 and later are now, for recipes and programs with the old ones."""

from __future__ import annotations

MOVED = {
    "rlpost.agents": "rlpost.extensions.agents",
    "rlpost.cli.attach": "rlpost.extensions.attach.attach_verbs",
    **{
        f"rlpost.cli.follow.{name}": f"rlpost.cli.outcome.{name}"
        for name in ("conclude", "ENDING_POLL_S", "EXIT_CODES", "latest_attempt", "summary")
    },
    "rlpost.cli.run_status.AGAIN": "rlpost.cli.runs.AGAIN",
    **{
        f"rlpost.cli.{name}": f"rlpost.extensions.watching.{name}"
        for name in ("field_types", "follow", "log_lines", "run_status", "startup_notes", "watch")
    },
    **{
        f"rlpost.cli.{name}": f"rlpost.extensions.watching.{name}_verb"
        for name in ("journal", "list", "logs", "status")
    },
    "rlpost.cli.compare": "rlpost.extensions.watching.report.compare_verb",
    "rlpost.cli.completion": "rlpost.extensions.completing.completion_verb",
    **{
        f"rlpost.cli.{name}": f"rlpost.extensions.converting.{name}"
        for name in ("convert", "convert_job")
    },
    "rlpost.cli.evaluate": "rlpost.extensions.evaluating.evaluate_verb",
    "rlpost.cli.fetch": "rlpost.extensions.fetching.fetch_verb",
    "rlpost.cli.fleet": "rlpost.extensions.fleet.fleet_verb",
    **{
        f"rlpost.cli.fleet_jobs.{name}": f"rlpost.cli.job.{name}" for name in ("PROJECT", "code_of")
    },
    **{
        f"rlpost.cli.{name}": f"rlpost.extensions.fleet.{name}"
        for name in ("fleet_jobs", "fleet_view")
    },
    "rlpost.cli.image_doctor": "rlpost.extensions.doctor.image_job",
    "rlpost.cli.plan": "rlpost.extensions.planning.plan_verb",
    "rlpost.cli.report": "rlpost.extensions.watching.report.report_verb",
    "rlpost.cli.sweep": "rlpost.extensions.sweep.sweep_verb",
    **{
        f"rlpost.cli.{name}": f"rlpost.extensions.fetching.{name}"
        for name in ("arithmetic_data", "assets", "tiny_model", "tiny_squares")
    },
    "rlpost.assets": "rlpost.extensions.fetching.assets",
    "rlpost.compat.slime": "rlpost.extensions.slime",
    "rlpost.compat": "rlpost.extensions.slime",
    "rlpost.config.plan.estimate.RESERVE": "rlpost.config.plan.cards.RESERVE",
    "rlpost.config.checks.fleet": "rlpost.extensions.fleet.fleet_checks",
    "rlpost.config.groups.fleet": "rlpost.extensions.fleet.fleet_table",
    "rlpost.driver.fleet": "rlpost.extensions.fleet",
    "rlpost.engines.fleet": "rlpost.extensions.fleet",
    **{
        f"rlpost.{name}": "rlpost.extensions.watching.joined_use"
        for name in (
            *("observe.fleet_use", "observe.report.fleet_use", "observe.joined_use"),
            "extensions.fleet.fleet_use",
        )
    },
    **{
        f"rlpost.config.plan.{name}": f"rlpost.extensions.planning.{name}"
        for name in (
            *("activations", "adapters", "engine_memory", "estimate", "nccl_memory"),
            *("planned_slices", "rank_memory", "save_interval", "shortages", "update_weights"),
        )
    },
    "rlpost.driver.in_process.InProcessRun": "rlpost.InProcessRun",
    "rlpost.driver.in_process.TrainedStep": "rlpost.extensions.in_process.run.TrainedStep",
    "rlpost.driver.in_process": "rlpost.extensions.in_process",
    "rlpost.engines.cpu_memory": "rlpost.extensions.on_cpu.engine_memory",
    "rlpost.trainer.megatron_on_cpu": "rlpost.extensions.on_cpu.megatron",
    **{
        f"rlpost.config.keys.{name}": f"rlpost.extensions.agents.references.{name}"
        for name in ("references", "resolve_references")
    },
    **{
        f"rlpost.observe.evaluation_answers.{name}": f"rlpost.extensions.evaluating.set_results.{name}"
        for name in ("Estimate", "SetResult", "estimate", "read_results", "result_of")
    },
    "rlpost.rollout.episode_results": "rlpost.extensions.agents.episode_results",
    "rlpost.rollout.turns": "rlpost.extensions.agents.environments.turns",
    "rlpost.observe.earlier_runs": "rlpost.extensions.planning.earlier_runs",
    **{
        f"rlpost.observe.report.{name}": f"rlpost.extensions.watching.{name}"
        for name in ("goodput", "gpu_layout", "series", "timeline")
    },
    **{
        f"rlpost.observe.report.write.{name}": f"rlpost.observe.reporter.{name}"
        for name in ("Reporter", "try_to_write_report")
    },
    "rlpost.observe.report": "rlpost.extensions.watching.report",
    **{
        f"rlpost.observe.{name}": f"rlpost.extensions.tracking.{name}"
        for name in ("prometheus", "wandb")
    },
    "rlpost.observe.mirrors.TensorBoardWriter": "rlpost.extensions.tracking.tensorboard.TensorBoardWriter",
    "rlpost.observe.traces.EpisodeFile": "rlpost.extensions.agents.episode_file.EpisodeFile",
    "rlpost.observe.traces": "rlpost.extensions.watching.report.episodes",
    "rlpost.rehearsal": "rlpost.extensions.rehearsal.all_ranks",
    **{
        f"rlpost.{package}.{name}": f"rlpost.extensions.rewards.{name}"
        for package in ("reward", "tasks.reward")
        for name in ("dapo", "deepscaler", "f1", "gpqa", "gsm8k", "ifeval", "mathverify")
    },
    "rlpost.reward.answers": "rlpost.tasks.reward.answer_extraction",
    "rlpost.reward.remote": "rlpost.tasks.reward.engine_reward",
    "rlpost.reward": "rlpost.tasks.reward",
    "rlpost.tasks.reward.answer_form": "rlpost.extensions.rewards.answer_form",
    **{
        f"rlpost.tasks.reward.answer_extraction.{name}": f"rlpost.extensions.rewards.answer_form.{name}"
        for name in ("answer_after_thinking", "has_box")
    },
    "rlpost.tasks.reward.registry.toss": "rlpost.extensions.rewards.toss.toss",
    "rlpost.tasks.supervised": "rlpost.extensions.supervised.tokenizer",
    "rlpost.trainer.conversion": "rlpost.extensions.converting.conversion",
    "rlpost.tasks.judge": "rlpost.extensions.judge",
}
"""Modules and names of 0.2 and later, and where they are; the first row that fits counts."""
