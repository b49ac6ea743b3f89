"""The folder of one start of a run, and what the batch host writes into it. Python 3.6."""

import math
import os
import secrets
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, Iterable, Optional, Tuple

from common.attempt import LAUNCH_LOG, SECRET_FILE, create_attempt
from common.exit_codes import EXIT_PREEMPTED
from common.stop_file import StopMessage

SECRET_BYTES = 32


def start_attempt(run_folder: Path) -> Path:
    """Create the folder of this start and its secret; return it. Raises OSError."""
    folder = create_attempt(run_folder / "attempts")
    (folder / SECRET_FILE).write_text(secrets.token_hex(SECRET_BYTES))
    return folder


def stop_message(reason: str, end_time: Optional[float], signal_lead_s: int) -> StopMessage:
    """The content of a STOP file. ``end_time``: end of the job, as ``SlurmJob.end_time``."""
    now = int(time.time())
    is_known = end_time is not None and math.isfinite(end_time)
    return StopMessage(reason, now, end_time if is_known else now + signal_lead_s)


def get_image(
    image: str, cache: str, log: Path, should_wait: Callable[[], bool]
) -> Tuple[int, str]:
    """Import an image unless it is a file; return the exit code of ``slurm.image`` and the path.

    What the import says goes to the batch log and to ``log``.

    Args:
        should_wait: waits a moment; False: return EXIT_PREEMPTED without waiting for the import.
    """
    if image.startswith("/"):
        return 0, image
    command = [sys.executable, "-m", "slurm.image", image, "--cache", cache]
    importing = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert importing.stdout is not None and importing.stderr is not None
    # A thread reads what the import says, so that a signal ends the wait for it.
    copying = threading.Thread(target=_copy, args=(importing.stderr, log), daemon=True)
    copying.start()
    while importing.poll() is None:
        if not should_wait():
            return EXIT_PREEMPTED, ""
    copying.join()
    path = os.fsdecode(importing.stdout.read()).strip()  # one line, at the end
    return importing.returncode, path


def _copy(lines: Iterable[bytes], log: Path) -> None:
    for line in lines:
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()
        with suppress(OSError), log.open("ab") as file:  # a full disk must not block the import
            file.write(line)


def launch_log(attempt_dir: Path) -> Path:
    """Output of srun, preceded by that of the image import."""
    return attempt_dir / LAUNCH_LOG
