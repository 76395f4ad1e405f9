#!/bin/sh
# build_jobs.sh WANTED: compiler processes to start: WANTED, or for 0 one a core and at most one per 4 GiB of memory.
set -eu
if [ "$1" -gt 0 ]; then
  echo "$1"
  exit
fi
memory=$(awk '/MemAvailable/ {print int($2 / 4194304)}' /proc/meminfo)
cores=$(nproc)
jobs=$((memory < cores ? memory : cores))
echo $((jobs > 0 ? jobs : 1))
