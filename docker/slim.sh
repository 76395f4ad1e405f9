#!/bin/sh
# slim.sh VENV: removes what serving never reads from an environment (pip, tests of torch, static libraries, headers) and
# compiles the rest once, so that a start on a read-only root does not do it again.
set -eu
site=$(echo "$1"/lib/python3*/site-packages)
rm -rf "$site"/pip "$site"/pip-*.dist-info "$1"/bin/pip* "$1"/bin/activate* "$1"/bin/Activate*
find "$site"/torch -depth -type d \( -name tests -o -name test \) -exec rm -rf {} +
find "$site" -depth -type d -name __pycache__ -exec rm -rf {} +
find "$site" -name '*.a' -delete
rm -rf "$site"/torch/include "$site"/torch/share
# unchecked-hash: the byte code carries no time stamp, so that two builds give the same files.
"$1"/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$site" >/tmp/compileall.log || true
du -sh "$1"
