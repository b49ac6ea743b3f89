# shellcheck shell=bash disable=SC2013,SC2034
# Functions of the enroot_*.sh scripts, for one node, outside the container. Source this file.
# A raw enroot container is named rlpost_JOB_RESTART_NODE, because nodes may share ENROOT_DATA_PATH.
node=${SLURMD_NODENAME:-$(hostname)}

# process_of CONTAINER: pid of its oldest process, which is the agent; empty if none runs on this node.
# "enroot list -f" does not recognise running containers if ENROOT_DATA_PATH is a bind mount. In the mountinfo
# of a process, the source of its root ends with the container's name in both cases.
process_of() {
  local file pid stat fields oldest='' since=''
  for file in $(grep -lsE "^[0-9]+ [0-9]+ [0-9]+:[0-9]+ ([^ ]*/)?${1//./[.]} / " /proc/[0-9]*/mountinfo); do
    pid=${file#/proc/} pid=${pid%/mountinfo}
    { stat=$(<"/proc/$pid/stat"); } 2>/dev/null || continue # has ended
    read -ra fields <<<"${stat##*) }"
    # Field 22 of proc(5), here without pid and command: start time in ticks since boot. Pids may wrap.
    [ -n "$since" ] && [ "${fields[19]}" -ge "$since" ] && continue
    oldest=$pid since=${fields[19]}
  done
  echo "$oldest"
}

# has_container CONTAINER: whether it exists, running or not.
has_container() { enroot list 2>/dev/null | grep -qxF -- "$1"; }

# jobs_in_queue JOB...: the jobs that Slurm knows; fails if squeue gives no reliable answer.
jobs_in_queue() {
  local known ids
  # Query this job as well: an answer without it is incomplete.
  ids=$(IFS=,; echo "$SLURM_JOB_ID,$*")
  known=$(timeout 10 squeue -h -j "$ids" -o %A 2>/dev/null) || return 1
  grep -qx "$SLURM_JOB_ID" <<<"$known" || return 1
  echo "$known"
}

# remove_stale PATTERN: remove this node's stale containers. PATTERN is a regular expression for the name, with the
# job as its first group. A container is stale if it has no process and belongs to an earlier start of this job or
# to a job that has left the queue. In doubt a container stays; this function never fails.
remove_stale() {
  local name job known
  local -A job_of=()
  for name in $(enroot list 2>/dev/null); do
    [[ $name =~ ^$1$ ]] && job_of[$name]=${BASH_REMATCH[1]}
  done
  for name in "${!job_of[@]}"; do
    job=${job_of[$name]}
    if [ "$job" != "$SLURM_JOB_ID" ]; then
      [ -n "${known-}" ] || known=$(jobs_in_queue "${job_of[@]}") || known=unknown
      if [ "$known" = unknown ] || grep -qx "$job" <<<"$known"; then
        continue
      fi
    fi
    [ -z "$(process_of "$name")" ] || continue
    echo "removing the container $name of an earlier start"
    enroot remove --force -- "$name" || true
  done
}
