#!/usr/bin/env bash
# install.sh: the Debian packages of a local SLURM and of the shell linter, where they are missing. Needs root.
set -euo pipefail
packages=()
for name in slurmctld slurmd slurm-client munge shellcheck; do
  dpkg-query --show --showformat='${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || packages+=("$name")
done
[ ${#packages[@]} = 0 ] && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Containers have no init; the daemons are started by start.sh, not by the packages.
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
