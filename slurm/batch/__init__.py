"""What runs on the batch host of a job: from the allocation to the exit code or the requeue.

A batch file (``slurm.render``) ends in ``exec python3 -m slurm.batch VERB ...``; this package does
the rest with the standard library of Python 3.6, that of RHEL 8, because batch hosts run the
system's Python. ``run`` is a run, ``engine`` a task of a fleet, ``sandbox`` a server of sandboxes,
``convert`` and ``doctor`` are jobs of one step, ``watch`` is a step of ``run`` itself.

``run`` starts one agent per node under one ``srun``, turns Slurm's signals into the STOP file, and
passes the agents' verdict (``common/attempt.py``) to ``slurm.supervise``, which decides whether to
requeue. Constraints that only the batch host can handle:

- Only this process receives USR2 (time limit near, or preemption where the site sends the job's
  signal). The batch file ignores USR2 until this process handles it; a request in that time is
  recognised by the end of the job, which is nearer than the signal's lead. USR2 before the agents
  were started, also during the import of the image, requeues the job without them: an import and
  the extraction of an image could take all the time that is left.
- Preemptions and operators move the end of the job. squeue reports it, but a container may have no
  squeue: this process keeps it in a file of the attempt. If squeue does not answer at USR2, the
  signal's lead is assumed to be all the time left.
- By default USR1, HUP, INT and XCPU would end this process without a decision: they are stop
  requests too.
- TERM means that the job was cancelled, or that its grace time is over and Slurm requeues it. A
  cancelled job must not be requeued, so after TERM this process never requeues.
- Slurm's commands read options from the environment. The submitting shell may itself run in a job
  and export that job's options, and ``sbatch --export=NONE`` would hide our variables from the
  agents: ``slurm.variables`` keeps those that this job set.
- srun's messages about the tasks (``launch.log``) are the only record of a node whose agent never
  started. With SLURM_SRUN_REDUCE_TASK_EXIT_MSG set, srun would report only the first of several
  nodes.
- srun turns TERM into KILL for all its tasks (slurm, src/srun/signals.c): srun is never signalled.
- After a node failure srun waits until Slurm detects it (SlurmdTimeout, minutes): the verdict ends
  the step.
- The controller may be restarting or busy when the agents end: squeue and the requeue are repeated,
  and the job is not requeued if its state stays unknown.
- The run folder may be on a file system that answers with errors for a moment (ESTALE, EIO): no
  check of a file ends the job.
- The verdict may be written ten seconds before the end of the job, and a job at its time limit
  cannot be requeued: waiting for srun and for container cleanup is bounded by the end of the job.
- Slurm 22.05 does not requeue a preempted job that exits within its grace time: this process must.
- Slurm 24.05 to 25.11 requeues a job that was preempted once even after it ended with exit code 0,
  unless its record forbids a requeue. Users may not be allowed to change that: the ledger decides
  at the start.
- sbatch may fail after Slurm has accepted the next job: ``slurm.submissions``.
- With spare nodes a lost node must not end the job: ``--no-kill`` for job and step, without which
  Slurm kills the whole step and requeues the job when it sets the node DOWN. Slurm then removes the
  node from the job: a requeued job would ask for one node less, so that is set again. If that node
  is the batch host, no process is left to requeue: ``watch`` does it on other nodes.
- The list of excluded hosts can be changed only while the job is pending: after the requeue, which
  sends TERM.
- Where requeueing is forbidden, a new job resumes the run in the same folder. It waits for this one
  through its name (``--dependency=singleton``), which ``executor.completed`` makes unique to the
  run. It gets the account and the place of this one, see ``slurm.variables``.
- After TERM srun can start no step: a container is left to the next start on that node.
- Each task of a job array has a separate id in SLURM_JOB_ID, but the last one has that of the
  array: Slurm's commands get ``ARRAY_TASK``.
"""
