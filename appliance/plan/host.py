"""Memory of the machine that the CPU engine runs on: what the kernel and the container allow."""

from __future__ import annotations

import os
from pathlib import Path

from healthchecks.facts import HostFacts

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Limit of the container, cgroup v2 and v1."""


def cpu_host(limits: tuple[Path, ...] = CGROUP_LIMITS) -> HostFacts:
    """Return the host's memory, at most what the container may take; no GPU is looked for."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return HostFacts(memory_total_bytes=total)
