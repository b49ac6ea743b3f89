"""What the jobs of this package share on their batch host: log, bounded commands, srun.

Python 3.6.
"""

import math
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import IO, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.attempt import NO_END
from common.exit_codes import EXIT_PREEMPTED
from common.files import write_atomic
from slurm.batch.attempt import get_image
from slurm.batch.options import Options
from slurm.batch.place import Place, find_place
from slurm.batch.signals import Signals
from slurm.batch.slurm_job import REQUEUED, Record, SlurmJob, seconds_to_query
from slurm.batch.steps import removal_step, stale_removal_step
from slurm.errors import SpecError
from slurm.variables import login_variables

POLL_S = 1.0
REMOVAL_S = 60
KILL_AFTER_S = 1.0
NOT_IMPORTED = ("none", "command")
"""Containers whose image this package neither imports nor extracts nor removes."""


class End(NamedTuple):
    """How a job ends: with ``code``; ``is_final`` forbids Slurm to start it again."""

    code: int
    is_final: bool = True


class Host:
    """This batch host and its job.

    Attributes:
        who: prefix of the log's lines.
        environ: the environment of steps and of Slurm's commands.
        chosen: variables with which the next job of a chain is submitted like this one.
        record: what Slurm has recorded of the job, as of ``read_record``.
    """

    def __init__(
        self,
        who: str,
        environ: Mapping[str, str],
        signals: Signals,
        chosen: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.who = who
        self.environ = dict(environ)
        self.signals = signals
        self.chosen = dict(chosen)
        self.job = SlurmJob(environ)
        self.record = Record()
        self._query_at = 0.0
        self._term_is_logged = False

    def log(self, text: str) -> None:
        """Write a line into the batch log."""
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.who}: {text}", flush=True)

    def find_place(self, options: Options, words: Sequence[str], run_folder: str) -> Place:
        """``place.find_place``; logs the choice of the container. Raises SpecError."""
        place, why = find_place(options, words, run_folder, self.environ)
        if place.container == "command":
            self.environ = {**login_variables(), **self.environ}
        if why:
            self.log(f"container: {why}")
        return place

    def read_record(self) -> None:
        """Ask Slurm about the job; correct the number of its restarts in the environment.

        Slurm sets SLURM_RESTART_COUNT from the first restart on. On the first start it is that of a
        job in which sbatch was called.
        """
        self.record = self.job.record()
        if self.record.num_restarts is not None:
            self.environ["SLURM_RESTART_COUNT"] = str(self.record.num_restarts)

    def refuse_short_limit(self, signal_lead_s: int) -> None:
        """Raise SpecError if the signal to save is due when the job starts."""
        limit_s = self.record.limit_s
        if limit_s is not None and limit_s <= signal_lead_s:
            raise SpecError(
                f"the time limit of this job is {limit_s} s, and --signal-lead-s {signal_lead_s} "
                "asks for the signal to save that long before its end, so nothing can run; ask for "
                "more --time (the partition, a plugin of the site or --time-min may have cut it), "
                "or use a smaller --signal-lead-s"
            )

    def note_end_time(self, signal_lead_s: int, file: Optional[Path] = None) -> None:
        """Set SLURM_JOB_END_TIME for the steps, and recognise a USR2 from before its handler.

        Args:
            file: where agents read the end of the job; containers have no squeue.
        """
        end_time = self.job.end_time()
        known = "" if end_time is None or math.isinf(end_time) else str(int(end_time))
        self.environ["SLURM_JOB_END_TIME"] = known
        now = time.time()
        self._query_at = now + seconds_to_query(now, end_time, signal_lead_s)
        if end_time is None:
            return
        if end_time - now <= signal_lead_s:
            self.signals.request_stop(
                f"the job ends in {max(0, int(end_time - now))} s (--signal-lead-s {signal_lead_s})"
            )
        if file is not None:
            try:
                write_atomic(file, f"{known or NO_END}\n")
            except OSError as error:
                self.log(f"the end of the job cannot be written for the agents: {error}")

    def refresh_end_time(self, signal_lead_s: int, file: Path) -> None:
        """``note_end_time`` when it is due again, until a stop request."""
        if time.time() >= self._query_at and not self.signals.stopped:
            self.note_end_time(signal_lead_s, file)

    def import_image(
        self, options: Options, place: Place, log: Path, *, leaves_on_stop: bool = False
    ) -> Tuple[int, Place]:
        """Import the image unless it is a file; return ``slurm.image``'s exit code and the place.

        Args:
            log: of the import.
            leaves_on_stop: after a stop request return EXIT_PREEMPTED at once. The import may take
                longer than the job has, and a job at its time limit cannot be requeued; Slurm ends
                the import with the job.
        """
        if place.container in NOT_IMPORTED:
            return 0, place
        default = self.environ.get("RLPOST_IMAGE_CACHE") or f"{place.home}/runs/images"

        def should_wait() -> bool:
            self.wait()
            return not (leaves_on_stop and self.signals.stopped)

        code, path = get_image(place.image, options.image_cache or default, log, should_wait)
        if code == EXIT_PREEMPTED:
            self.log("a stop request during the import of the image: not waiting for it")
        elif code:
            self.log("no image; see above")
        return shell_code(code), place._replace(image=path)

    def log_start(self) -> None:
        """Log where a task of an array starts."""
        start = self.environ.get("SLURM_RESTART_COUNT") or "0"
        nodes = self.environ.get("SLURM_JOB_NODELIST", "")
        self.log(f"job {self.environ['SLURM_JOB_ID']}, start {start} on {nodes}")

    def start_step(self, argv: Sequence[str], errors: Path) -> "subprocess.Popen[bytes]":
        """Start srun; its messages about the tasks are appended to ``errors``."""
        with errors.open("ab") as file:
            return self._popen(argv, file)

    def wait(self) -> None:
        """Wait for POLL_S, a signal, or the end of a child; log TERM once."""
        self.signals.wait(POLL_S)
        if self.signals.terminated and not self._term_is_logged:
            self._term_is_logged = True
            self.log("TERM: cancelled, or grace time over")

    def wait_for(self, step: "subprocess.Popen[bytes]", on_stop: Callable[[], bool]) -> int:
        """Wait for a step; return its exit code as a shell reports it.

        ``on_stop`` is called after a stop request until it returns True.
        """
        is_stopped = False
        while step.poll() is None:
            if self.signals.stopped and not is_stopped:
                is_stopped = on_stop()
            self.wait()
        return shell_code(step.returncode)

    def prepare_nodes(self, place: Place) -> None:
        """Before the agents' step: free the space of earlier containers, say what follows."""
        if place.container in NOT_IMPORTED:
            return
        if place.container == "pyxis":
            self.run_bounded(stale_removal_step(place), self.job.seconds_within(REMOVAL_S))
        self.log("each node extracts the image, which takes a while")

    def remove_container(self, place: Place, folder: str = "") -> None:
        """Remove the container of this start from every node, within the time of the job."""
        if place.container in NOT_IMPORTED:
            return
        if self.signals.terminated and not self.job.is_running():
            self.log(
                "no step can start: a container may be left on a node; the next run there "
                "removes it"
            )
            return
        argv = removal_step(place, folder)
        if not self.run_bounded(argv, self.job.seconds_within(REMOVAL_S)):
            self.log("a container may be left on a node; the next run there removes it")

    def may_requeue(self, state: str) -> bool:
        """Whether this process may requeue its job, which is in this state; logs why not."""
        if state in REQUEUED:
            self.log(f"Slurm requeues the job itself (its state is {state})")
        elif state != "RUNNING":
            self.log(f"not requeued: job state is {state or 'unknown'}")
        elif self.signals.terminated:
            self.log("not requeued by the batch script, which got TERM")
        return state == "RUNNING" and not self.signals.terminated

    def run_bounded(self, argv: Sequence[str], seconds: float) -> bool:
        """Run a command; after ``seconds`` end it with TERM, then KILL. Whether it succeeded."""
        try:
            running = self._popen(argv, None)
        except OSError:
            return False
        deadline = time.monotonic() + seconds
        while running.poll() is None and time.monotonic() < deadline:
            self.signals.wait(deadline - time.monotonic())
        if running.poll() is not None:
            return running.returncode == 0
        running.terminate()  # srun passes it on as KILL
        try:
            running.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            running.kill()
        return False

    def _popen(self, argv: Sequence[str], errors: Optional[IO[bytes]]) -> "subprocess.Popen[bytes]":
        sys.stdout.flush()
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=errors, env=self.environ)


def shell_code(code: int) -> int:
    """Exit code of a process as a shell reports it: 128 + N after signal N."""
    return code if code >= 0 else 128 - code
