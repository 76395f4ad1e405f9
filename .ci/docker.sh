#!/usr/bin/env bash
# What the tests of images need, from Debian's archives alone: a Docker engine, Compose, a base image, the images.
# Pulls nothing. Run as root from the root of the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
base=debian:bookworm-slim # the name that both Dockerfiles default to, there with a digest
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The Debian archive that this machine uses, whichever form its list has.
archive() {
  local found
  found=$(sed -nE 's/^URIs: *//p; s/^deb +(\[[^]]*\] +)?([^ ]+).*/\2/p' \
    /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
  if [ -z "$found" ]; then
    echo "error[APT_ARCHIVE] /etc/apt: a Debian archive is needed, got none; add it to the package sources." >&2
    exit 1
  fi
  echo "$found"
}

install_engine() {
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      docker.io iptables debootstrap >/dev/null
  fi
}

# Debian 12 has no living Compose; that of Debian 13 runs on it. Its lists are kept apart from apt's own.
install_compose() {
  if docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; then return; fi
  local mirror options
  mirror=$(archive)
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  cat >"$work/trixie.sources" <<SOURCE
Types: deb
URIs: $mirror
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCE
  options=(-o "Dir::State::Lists=$work/lists" -o "Dir::Etc::SourceList=$work/trixie.sources"
    -o Dir::Etc::SourceParts=/dev/null -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update -qq
  (cd "$work" && apt-get "${options[@]}" download -qq docker-compose docker-buildx)
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "$work"/docker-compose_*.deb "$work"/docker-buildx_*.deb >/dev/null
}

start_engine() {
  if docker info >/dev/null 2>&1; then return; fi
  # An engine that was killed leaves its pid file, and another process may have that number by now.
  if ! pidof dockerd >/dev/null; then rm -f /var/run/docker.pid; fi
  # Without a service manager the engine is started by hand and stays for the tests.
  nohup dockerd >/var/log/dockerd-ci.log 2>&1 &
  for _ in $(seq 60); do
    if docker info >/dev/null 2>&1; then return; fi
    sleep 1
  done
  tail -n 20 /var/log/dockerd-ci.log >&2
  echo "error[DOCKER_UNAVAILABLE] .ci/docker.sh: dockerd must answer within 60 s, got no answer; see the lines above." >&2
  exit 1
}

make_base() {
  if docker image inspect "$base" >/dev/null 2>&1; then return; fi
  local mirror
  mirror=$(archive)
  debootstrap --variant=minbase bookworm "$work/root" "$mirror" >/dev/null
  # The host's way to the archive, where it needs one; most need none, and grep then ends in 1.
  { grep -rliE 'proxy' /etc/apt/apt.conf.d 2>/dev/null || true; } | xargs -r cp -t "$work/root/etc/apt/apt.conf.d/"
  tar -C "$work/root" --exclude=./usr/share/doc/* --exclude=./usr/share/locale/* --exclude=./usr/share/man/* \
    --exclude=./var/lib/apt/lists/* --exclude=./var/cache/apt/* --exclude=./dev/* -c . | docker import - "$base" >/dev/null
}

# A torch wheel that this machine's pip is pointed at (its CPU build lies on no index) goes into the build context.
fill_wheelhouse() {
  local folder python=python3
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
  for folder in $("$python" -m pip config get global.find-links 2>/dev/null || true) ${PIP_FIND_LINKS:-}; do
    cp -n "${folder#file://}"/torch-2.13.0*cp311*x86_64.whl wheelhouse/ 2>/dev/null || true
  done
}

# Images and stages of earlier sources are tens of GB after a few builds.
drop_what_is_old() {
  docker image prune --force >/dev/null
  docker builder prune --force --keep-storage 12GB >/dev/null
}

install_engine
install_compose
start_engine
drop_what_is_old
make_base
fill_wheelhouse

# The base was made here, so it has no digest to be pinned to.
arguments=(CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt)
base_arguments="--build-arg DEBIAN_IMAGE=$base --build-arg DEBIAN_DIGEST="
time make image-cpu "${arguments[@]}" BUILD_ARGS="$base_arguments"
# torch for CUDA 12.6 has an index of its own, and PyPI's is several GB. What the gpu image adds to it (patched vLLM,
# sm_70 library, Triton with a compiler, audits) is proved on the CPU build of the same version, with the Triton that
# torch 2.13.0 asks for.
if ls wheelhouse/torch-2.13.0+cpu-*.whl >/dev/null 2>&1; then
  echo "gpu image: torch==2.13.0+cpu stands in for torch==2.13.0+cu126, so this image is proved and not for use"
  stand_in="--build-arg TORCH=torch==2.13.0+cpu --build-arg TRITON=triton==3.7.1 --build-arg TORCH_INDEX="
  time make image "${arguments[@]}" BUILD_ARGS="$base_arguments $stand_in"
else
  echo "gpu image: not built here, since no torch for it is at hand"
fi
drop_what_is_old
