"""Xids as they happen: a child that waits on NVML's events, and the ear of its parent.

`python -m healthchecks.events UUID...` is the child; NVML tells nothing from before it registered.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from healthchecks.children import ChildTimeoutError, LineChild, child_environment, module_argv
from healthchecks.nvml import binding
from healthchecks.nvml_read import error_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from healthchecks.nvml_read import Binding

XID_EVENT = 0x8
WAIT_MS = 1000
AGAIN_S = 60.0
"""Time before a child that ended is started again."""


class Ear:
    """Listens to the Xids of some GPUs; never blocks its caller."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Start the listening child."""
        self._uuids = tuple(uuids)
        self._child: LineChild | None = None
        self._started = 0.0
        self._start()

    def heard(self) -> list[tuple[str, int]]:
        """Return (UUID, Xid) of everything since the last call; restarts a child that ended."""
        found: list[tuple[str, int]] = []
        while self._child is not None:
            try:
                line = self._child.next_line(0.0)
            except ChildTimeoutError:
                return found
            if line is None:
                self.close()
                break
            step = json.loads(line)
            if "xid" in step:
                found.append((str(step["uuid"]), int(step["xid"])))
        if self._child is None and time.monotonic() - self._started > AGAIN_S:
            self._start()
        return found

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _start(self) -> None:
        self._started = time.monotonic()
        argv = module_argv("healthchecks.events", *self._uuids)
        self._child = LineChild(argv, child_environment())


def main(uuids: Sequence[str]) -> int:
    """Write one line an Xid until the parent is gone."""
    nvml, parent = binding(), os.getppid()
    try:
        nvml.nvmlInit()
        events = nvml.nvmlEventSetCreate()
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids}
        for handle in handles.values():
            nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
    except nvml.NVMLError as error:
        _say({"error": error_name(int(error.value))})
        return 1
    while os.getppid() == parent:
        _wait(nvml, events)
    return 0


def _wait(nvml: Binding, events: object) -> None:
    try:
        event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        uuid = nvml.nvmlDeviceGetUUID(event.device)
    except nvml.NVMLError as error:
        if error_name(int(error.value)) != "timeout":
            _say({"error": error_name(int(error.value))})
            time.sleep(WAIT_MS / 1000)
        return
    if event.eventType == XID_EVENT:
        _say(
            {"uuid": uuid if isinstance(uuid, str) else uuid.decode(), "xid": int(event.eventData)}
        )


def _say(step: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
