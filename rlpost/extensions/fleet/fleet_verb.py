"""``rlpost fleet``: engine jobs that join a run and leave it; see ``rlpost.extensions.fleet``.

Input: a run and what to do with the fleet of a group. Output: a table of the engines, or a job array that was
submitted, or orders in the run folder that agents and driver follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from common.fleet_name import GROUP, POLICY
from common.run_folder import RunFolder
from common.units import counted
from rlpost.cli.runs import add_run_options, find_run
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.load import files_of, read_dump, read_toml, unset_if_none
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_jobs import (
    PLACES,
    check_group,
    check_model,
    engine_settings,
    fleet_folders,
    fleet_spec,
    fleet_views,
    submit_engines,
)
from rlpost.extensions.fleet.fleet_view import EngineView, surplus, table
from slurm.client import cancel, is_available
from slurm.errors import JobError, SlurmError
from slurm.render import render_fleet
from slurm.states import JobState


def main(arguments: Sequence[str]) -> int:
    """Entry of ``rlpost fleet``. Raises ConfigError."""
    options = _parser().parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    try:
        return _act(run, options)
    except SlurmError as error:
        raise ConfigError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="rlpost fleet",
        description="Show the fleet of a run: engines on jobs that may come and go; or change it.",
    )
    add_run_options(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--engines", type=int, metavar="N", help="submit N more engine jobs")
    what.add_argument("--scale", type=int, metavar="N", help="have N engines: submit or drain")
    what.add_argument(
        "--drain", nargs="+", metavar="ENGINE", help="let these leave, as the table names them"
    )
    add_switch(what, "--stop", "let all of them leave")
    parser.add_argument(
        GROUP,
        metavar="NAME",
        help="the group [engines.NAME], which has fleet = true (default: the policy's engines)",
    )
    add_switch(parser, "--dry-run", "print the batch script and submit nothing")
    parser.add_argument("--cluster", metavar="PROFILE", help="profile of the engine jobs")
    for name in PLACES:
        action = "append" if name == "sbatch" else "store"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, metavar=name.upper(), action=action, help=f"{name} of the engine jobs"
        )
    return parser


def _act(run: RunFolder, options: argparse.Namespace) -> int:
    shown = [FleetFolder(run.root, options.group or POLICY)]
    if options.group is not None:
        check_group(_read_config(run), options.group)
    elif not options.stop:
        shown = fleet_folders(run) or shown
    options.group = options.group or POLICY
    if options.engines is not None:
        return _add(run, options, options.engines)
    if options.scale is not None:
        return _scale(run, options, fleet_views(run, options.group))
    if options.drain:
        return _drain(run, shown, options)
    if options.stop:
        views = fleet_views(run, options.group)
        return _let_go(shown[0], views, [one.engine for one in views], options)
    for folder in shown:
        title = "" if folder.group == POLICY else f"[engines.{folder.group}]"
        print(table(fleet_views(run, folder.group), folder.lease(), title, folder.command))
    return 0


def _scale(run: RunFolder, options: argparse.Namespace, found: Sequence[EngineView]) -> int:
    if options.scale < 0:
        raise ConfigError(f"--scale {options.scale}: use 0 or more engines")
    staying = [one for one in found if one.stays]
    if (missing := options.scale - len(staying)) > 0:
        return _add(run, options, missing)
    leaving = surplus(staying, options.scale)
    if not leaving:
        print(f"{run.root.name} has {counted(options.scale, 'engine')} already")
        return 0
    return _let_go(FleetFolder(run.root, options.group), found, leaving, options)


def _add(run: RunFolder, options: argparse.Namespace, number: int) -> int:
    """Submit engine jobs."""
    config = _settings(run, options)
    check_model(config, options.group, f"--engines {number}")
    spec = fleet_spec(run, config, number, group=options.group)
    if options.dry_run:
        print(render_fleet(spec), end="")
        return 0
    if not is_available():
        raise ConfigError(
            f"--engines {number}: there is no Slurm on this machine; call this where sbatch is"
        )
    if any(entry["event"] == "done" for entry in run.ledger.read()):
        raise ConfigError(f"{run.root.name} is done, so engines have nothing to do")
    array = submit_engines(spec, run)
    print(
        f"submitted {array}: {counted(number, 'engine')} for {run.root.name}; see rlpost fleet {run.root}"
    )
    return 0


def _drain(run: RunFolder, folders: Sequence[FleetFolder], options: argparse.Namespace) -> int:
    """Order engines to leave, by their names in any of the fleets. Raises ConfigError."""
    fleets = [(folder, fleet_views(run, folder.group)) for folder in folders]
    known = [one.engine for _, views in fleets for one in views]
    if unknown := [name for name in options.drain if name not in known]:
        raise ConfigError(
            f"--drain {unknown[0]}: no such engine; there are: {', '.join(known) or 'none'}"
        )
    for folder, views in fleets:
        members = {one.engine for one in views}
        names = [name for name in options.drain if name in members]
        if names:
            _let_go(folder, views, names, options)
    return 0


def _let_go(
    folder: FleetFolder,
    engines: Sequence[EngineView],
    names: Sequence[str],
    options: argparse.Namespace,
) -> int:
    """Order engines to leave, and cancel the jobs of those that wait in the queue."""
    known = {one.engine: one for one in engines}
    if not folder.exists():
        raise ConfigError(f"{folder.run.name} has no fleet; {folder.command} starts one")
    if options.dry_run:
        print(f"would leave: {', '.join(names) or 'no engine'}")
        return 0
    folder.order(drain=[] if options.stop else list(names), stop=True if options.stop else None)
    for name in names:
        if known[name].job_state is JobState.PENDING:
            try:
                cancel(known[name].job_id)
            except JobError as error:  # it may have started; its agent then follows the order
                print(f"note: {error}", file=sys.stderr)
    print(f"asked to leave: {', '.join(names) or 'no engine'}")
    return 0


def _settings(run: RunFolder, options: argparse.Namespace) -> Config:
    """Return the run's settings with those of the engine jobs in [cluster]."""
    changed: dict[str, Any] = {}
    if options.cluster is not None:
        for profile in files_of(None, options.cluster):
            changed |= read_toml(profile).get("cluster", {})
    changed |= {name: value for name in PLACES if (value := getattr(options, name)) is not None}
    changed = {name: unset_if_none("cluster", name, value) for name, value in changed.items()}
    return engine_settings(_read_config(run), changed)


def _read_config(run: RunFolder) -> Config:
    try:
        return read_dump(run.run_json.read_text())[0]
    except FileNotFoundError:
        raise ConfigError(f"{run.run_json}: no such file; has the run started?") from None
    except ValueError as error:
        raise ConfigError(f"{run.run_json}: cannot be read: {error}") from None
