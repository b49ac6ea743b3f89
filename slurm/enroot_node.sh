# shellcheck shell=bash disable=SC2013,SC2034
# Functions of the enroot_*.sh scripts, for one node, outside the container. To be sourced.
# A container of raw enroot is called rlpost_JOB_RESTART_NODE: ENROOT_DATA_PATH may be shared by the nodes.
node=${SLURMD_NODENAME:-$(hostname)}

# process_of CONTAINER: id of its oldest process, which is the agent's; nothing where none runs here.
# Not "enroot list -f": where ENROOT_DATA_PATH is a bind mount, it takes running containers for unknown ones. In a
# process's own list of mounts the source of its root ends with the container's name in both cases.
process_of() {
  local file pid stat fields oldest='' since=''
  for file in $(grep -lsE "^[0-9]+ [0-9]+ [0-9]+:[0-9]+ ([^ ]*/)?${1//./[.]} / " /proc/[0-9]*/mountinfo); do
    pid=${file#/proc/} pid=${pid%/mountinfo}
    { stat=$(<"/proc/$pid/stat"); } 2>/dev/null || continue # has ended
    read -ra fields <<<"${stat##*) }"
    # Field 22 of proc(5), without pid and command: ticks since boot. Numbers of processes wrap.
    [ -n "$since" ] && [ "${fields[19]}" -ge "$since" ] && continue
    oldest=$pid since=${fields[19]}
  done
  echo "$oldest"
}

# has_container CONTAINER: whether it is there, running or not.
has_container() { enroot list 2>/dev/null | grep -qxF -- "$1"; }

# jobs_in_queue JOB...: those of them that Slurm knows; fails where it gives no answer that can be trusted.
jobs_in_queue() {
  local known ids
  # This job's own id is asked for as well: an answer without it says nothing about the others.
  ids=$(IFS=,; echo "$SLURM_JOB_ID,$*")
  known=$(timeout 10 squeue -h -j "$ids" -o %A 2>/dev/null) || return 1
  grep -qx "$SLURM_JOB_ID" <<<"$known" || return 1
  echo "$known"
}

# remove_stale PATTERN: removes this node's containers without a process whose names match PATTERN, a regular expression
# with the job as its first group, if they are of an earlier start of this job or of a job that has left the queue.
# Whatever it cannot find out or remove stays; it never fails.
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
