"""Runs the appliance and kills it with SIGKILL just before it touches the file system.

python kill_at.py N PATH WORDS...: at the N-th event on a path that holds PATH; prints how many
there were if it lives to the end.
"""

from __future__ import annotations

import os
import signal
import sys

from appliance.cli import main

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate"}


def run() -> int:
    """Count events, die at the chosen one."""
    limit, path, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and any(path in str(each) for each in arguments):
            seen += 1
            if seen == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = main(words)
    sys.stderr.write(f"events={seen}\n")
    return code


if __name__ == "__main__":
    sys.exit(run())
