#!/usr/bin/env bash
# stop.sh DIR: ends the jobs and daemons that start.sh DIR started, by the process ids it wrote, and nothing else.
set -uo pipefail
dir=$(cd "$1" && pwd)
export SLURM_CONF=$dir/slurm.conf

if timeout 10 scontrol ping >/dev/null 2>&1; then
  timeout 10 squeue --noheader --format=%A | sort -u | while read -r job; do timeout 10 scancel "$job"; done
  for _ in $(seq 40); do
    [ -n "$(timeout 10 squeue --noheader)" ] || break
    sleep 0.5
  done
fi
for name in slurmd.n1 slurmd.n2 slurmctld munged; do
  [ -s "$dir/$name.pid" ] || continue
  pid=$(cat "$dir/$name.pid")
  kill "$pid" 2>/dev/null
  for _ in $(seq 40); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.25
  done
  kill -9 "$pid" 2>/dev/null
  rm -f "$dir/$name.pid"
done
exit 0
