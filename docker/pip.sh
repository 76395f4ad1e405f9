#!/bin/sh
# pip-install VENV [--download DIR] ARGS...: pip of one environment, with the build's extra certificate authority when
# the secret `ca` was given, and with the local wheels where a stage copied some.
set -eu
venv=$1
shift
verb="install"
if [ "$1" = --download ]; then
  verb="download --dest $2"
  shift 2
fi
if [ -d /wheelhouse ]; then set -- "$@" --find-links /wheelhouse; fi
if [ -f /run/secrets/ca ]; then set -- "$@" --cert /run/secrets/ca; fi
# shellcheck disable=SC2086 # the verb may carry its own option
exec "$venv/bin/python" -m pip $verb --quiet "$@"
