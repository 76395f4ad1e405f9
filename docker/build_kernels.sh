#!/usr/bin/env bash
# build_kernels.sh JOBS: both kernel libraries and the quantizer, their host tests, and the proof that sm_70 is in.
# A compiler that the kernel killed is reported as such and not as an error in the source.
set -euo pipefail
jobs=$(docker/build_jobs.sh "$1")
echo "compiling with $jobs jobs"
cmake -S kernels -B kernels/build -G Ninja --log-level=NOTICE \
  -DNVFP4_CUDA=ON -DNVFP4_TESTS=ON -DCMAKE_BUILD_TYPE=Release
if ! cmake --build kernels/build --parallel "$jobs" 2>&1 | tee /tmp/compile.log; then
  if grep -qE 'Killed|signal 9|out of memory' /tmp/compile.log; then
    echo "error[BUILD_OOM] docker build: a compiler must not run out of memory, got one killed at $jobs jobs;" \
      "build again with IMAGE_JOBS=$((jobs > 1 ? jobs - 1 : 1))." >&2
  fi
  exit 1
fi
ctest --test-dir kernels/build --output-on-failure
ls -l appliance/lib
