"""Exit codes of the driver and of a job. Python 3.6 and later."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CRASHED = 70  # EX_SOFTWARE: an error that the driver did not expect
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: the state is committed; requeue
EXIT_CONFIG = 78  # EX_CONFIG: a restart cannot help
