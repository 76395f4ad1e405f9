#!/usr/bin/env bash
# Renews the locks: hashes of every file, no address. torch comes from the engine list by hand, because its CPU build
# lies on an index of its own.
set -euo pipefail
cd "$(dirname "$0")"
compile=(uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11)
torch=$(sed -n '/^torch==/{N;p}' engine-cpu.lock)
"${compile[@]}" --universal --no-deps engine-cpu.in -o engine-cpu.lock.new
{
  printf '%s\n' "$torch"
  cat engine-cpu.lock.new
} >engine-cpu.lock
rm engine-cpu.lock.new
"${compile[@]}" --no-deps demo.in -o demo.lock
"${compile[@]}" --universal --no-deps engine-gpu.in -o engine-gpu.lock
for name in engine-build wheel-build sbom; do
  "${compile[@]}" "$name.in" -o "$name.lock"
done
for name in runtime dev; do
  "${compile[@]}" --universal -c engine-cpu.in "$name.in" -o "$name.lock"
done
