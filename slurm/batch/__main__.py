"""``python3 -m slurm.batch VERB OPTIONS -- WORDS...``: what a batch file runs. Python 3.6.

    run OPTIONS -- AGENT... -- DRIVER... -- FLAGS...
    convert OPTIONS -- TOOL... -- FLAGS...
    doctor OPTIONS -- TOOL...
    engine OPTIONS -- AGENT...
    sandbox OPTIONS -- SERVER...
    watch requeue|cancel NUM_NODES

Outside a job, ``run`` and ``convert`` check the batch file and submit it (``slurm.login``). Exit
code 78: something is missing; a restart would not help.
"""

import os
import sys
from typing import Dict, List, Sequence

from common.attempt import job_name
from common.exit_codes import EXIT_CONFIG, EXIT_FAILED
from common.modes import become_private
from slurm import login
from slurm.batch import engine, once, run
from slurm.batch.host import End, Host
from slurm.batch.options import OptionError, Options, parse, split_groups
from slurm.batch.signals import Signals
from slurm.batch.slurm_job import is_task_of_array
from slurm.batch.watch import watch
from slurm.errors import SpecError
from slurm.late_flags import late_flags
from slurm.variables import (
    chosen_for_a_chain,
    job_environment,
    unknown_variables,
    without_array,
)

GROUPS = {"run": 3, "convert": 2, "doctor": 1, "engine": 1, "sandbox": 1}
"""Groups of words after the options, by verb."""
WHO = {"engine": "engine {}", "sandbox": "sandbox server {}"}
"""Prefixes of log lines, with the name of the task."""


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    verb = arguments[0] if arguments else ""
    if verb == "watch":
        watch(arguments[1], int(arguments[2]))
        return 0
    if verb not in GROUPS:
        print(__doc__, file=sys.stderr)
        return EXIT_CONFIG
    for line in unknown_variables(os.environ):
        print(line, file=sys.stderr)
    options_words, *groups = split_groups(arguments[1:], GROUPS[verb] + 1)
    try:
        options = parse(options_words)
        if options.script and not os.environ.get("SLURM_JOB_ID"):
            recipe = groups[1] if verb == "run" and not options.reads else []
            return login.submit(options, groups[0], recipe, flags=groups[-1])
        return _run_job(verb, options, groups)
    except (SpecError, OptionError) as error:
        for line in str(error).splitlines():
            print(line, file=sys.stderr)
        return EXIT_CONFIG


def _run_job(verb: str, options: Options, groups: List[List[str]]) -> int:
    """Run a job in its allocation; make its end final unless Slurm is to start it again."""
    if verb in ("run", "engine", "sandbox"):
        become_private()
    signals = Signals()
    chosen = chosen_for_a_chain(os.environ)
    environ = _environment()
    who = WHO.get(verb, "batch").format(job_name(environ))
    host = Host(who, environ, signals, chosen)
    host.read_record()
    end = End(EXIT_FAILED)
    try:
        if options.script:
            _refuse_late_flags(groups[-1])
        end = _act(verb, host, options, groups)
    except (SpecError, OSError) as error:
        for line in str(error).splitlines():
            host.log(line)
        # After TERM Slurm itself may have preempted the job, and requeues it.
        is_wrong = isinstance(error, SpecError)
        end = End(EXIT_CONFIG if is_wrong else EXIT_FAILED, is_wrong or not signals.terminated)
    if end.is_final:
        host.job.forbid_requeue()
    return end.code


def _act(verb: str, host: Host, options: Options, groups: List[List[str]]) -> End:
    if verb == "run":
        return run.run(host, options, run.Command(*groups))
    if verb == "convert":
        return once.convert(host, options, *groups)
    if verb == "doctor":
        return once.run_doctor(host, options, *groups)
    if verb == "engine":
        return engine.run_engine(host, options, *groups)
    return engine.run_sandbox_server(host, options, *groups)


def _environment() -> Dict[str, str]:
    """The environment of steps, also of this process, which reads it nowhere else."""
    environ = job_environment(os.environ)
    if not is_task_of_array(environ):
        environ = without_array(environ)
    environ["PYTHONPATH"] = environ["RLPOST_HOME"]
    os.environ.clear()
    os.environ.update(environ)
    return environ


def _refuse_late_flags(flags: Sequence[str]) -> None:
    problems = late_flags(flags)
    if problems:
        raise SpecError("\n".join(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
