"""The row of what a person reads of runs."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="watching",
    verbs={
        "status": Verb(
            "rlpost.extensions.watching.status_verb:main",
            "status of a run (--watch: live)",
            after="convert",
        ),
        "list": Verb(
            "rlpost.extensions.watching.list_verb:main",
            "all runs, the newest first",
            after="status",
        ),
        "logs": Verb(
            "rlpost.extensions.watching.logs_verb:main",
            "the log of the driver, or of any other process (-f, --of NAME, --level, --grep, --since)",
            after="list",
        ),
        "report": Verb(
            "rlpost.extensions.watching.report.report_verb:main",
            "a run as a page with plots, answers, recipe, and as text",
            after="evaluate",
        ),
        "journal": Verb(
            "rlpost.extensions.watching.journal_verb:main",
            "what a run would resume from after a crash (--records: every record)",
            after="report",
        ),
        "compare": Verb(
            "rlpost.extensions.watching.report.compare_verb:main",
            "compare several runs on one page",
            after="journal",
        ),
    },
    follow="rlpost.extensions.watching.follow:follow",
    report="rlpost.extensions.watching.report.write:write_report",
    moved={
        **{
            f"rlpost.cli.{name}": f"rlpost.extensions.watching.{name}"
            for name in (
                "field_types",
                "follow",
                "log_lines",
                "run_status",
                "startup_notes",
                "watch",
            )
        },
        "rlpost.cli.journal": "rlpost.extensions.watching.journal_verb",
        "rlpost.cli.list": "rlpost.extensions.watching.list_verb",
        "rlpost.cli.logs": "rlpost.extensions.watching.logs_verb",
        "rlpost.cli.status": "rlpost.extensions.watching.status_verb",
        "rlpost.cli.compare": "rlpost.extensions.watching.report.compare_verb",
        "rlpost.cli.report": "rlpost.extensions.watching.report.report_verb",
        "rlpost.observe.fleet_use": "rlpost.extensions.watching.joined_use",
        "rlpost.observe.report.fleet_use": "rlpost.extensions.watching.joined_use",
        **{
            f"rlpost.observe.{name}": f"rlpost.extensions.watching.{name}"
            for name in ("joined_use", "report")
        },
        **{
            f"rlpost.observe.report.{name}": f"rlpost.extensions.watching.{name}"
            for name in ("goodput", "gpu_layout", "series", "timeline")
        },
        "rlpost.observe.traces": "rlpost.extensions.watching.report.episodes",
    },
)
