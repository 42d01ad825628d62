#!/usr/bin/env bash
# start.sh DIR [PORT [VENV]]: starts munge, slurmctld and the nodes n1 and n2 on this host, all state below DIR; needs root and the
# packages of install.sh. Writes DIR/cluster.yaml for `pivotrl launch --cluster`, with VENV (the checkout's .venv) for programs, and prints
# the one line that SLURM's own commands need: export SLURM_CONF=... Refuses a DIR where they run already. Uses PORT to PORT+2.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
port=${2:-16817}
root=$(cd "$here/../.." && pwd)
venv=${3:-$root/.venv}
host=$(hostname -s)

for pid in "$dir"/*.pid; do
  if [ -e "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then
    echo "start.sh: $pid is alive; stop.sh $dir first" >&2
    exit 2
  fi
done
[ "$(id -u)" = 0 ] || { echo "start.sh: slurmd and munged are started as root here; run as root" >&2; exit 2; }

mkdir -p "$dir/state" "$dir/spool.n1" "$dir/spool.n2"
# By itself nproc says what OMP_NUM_THREADS does.
cpus=$(env --unset=OMP_NUM_THREADS --unset=OMP_THREAD_LIMIT nproc)
memory_mib=$(($(awk '/^MemTotal/ {print $2}' /proc/meminfo) / 1024))
nodes="NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cpus RealMemory=$memory_mib State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cpus RealMemory=$memory_mib State=UNKNOWN"
config=$(cat "$here/slurm.conf.in")
config=${config//@DIR@/$dir}
config=${config//@HOST@/$host}
config=${config//@PORT@/$port}
config=${config//@FIRST_JOB@/$((port % 1000 * 100 + 1))}
printf '%s\n' "${config//@NODES@/$nodes}" >"$dir/slurm.conf"
export SLURM_CONF=$dir/slurm.conf
printf 'extends: %s\nslurm_conf: %s\nvenv: %s\n' "$root/launch/clusters/local.yaml" "$SLURM_CONF" "$venv" >"$dir/cluster.yaml"

# munged wants directories that nobody else can write to; below a world-writable /tmp only --force lets it start.
head -c 1024 /dev/urandom >"$dir/munge.key"
chmod 400 "$dir/munge.key"
munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
slurmctld
slurmd -N n1
slurmd -N n2
for _ in $(seq 60); do
  if [ "$(sinfo --noheader --partition=main --states=idle --format=%D 2>/dev/null)" = 2 ]; then
    echo "export SLURM_CONF=$SLURM_CONF"
    exit 0
  fi
  sleep 0.5
done
echo "start.sh: the two nodes did not become idle within 30 s; see $dir/*.log" >&2
tail -n 5 "$dir"/*.log >&2
exit 1
