"""offline.py with what an engine on GPUs chooses: packed weights, and the attention CUSTOM.

The same plugin code then calls the reference library through the same C interface.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import held
import offline
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.scheduler import Scheduler

from appliance.nvfp4.library import Library
from appliance.vllm_plugin import config, hybrid_layers, registration
from appliance.vllm_plugin.route import WeightRoute

CALLS: Counter[str] = Counter()


def counted(call: Any) -> Any:
    """Count the calls of the library by name."""

    def counting(self: Library, name: str, *arguments: object) -> None:
        CALLS[name] += 1
        call(self, name, *arguments)

    return counting


def preempting(preempt: Any) -> Any:
    """Count the sequences that lose their place in the cache."""

    def counting(self: Scheduler, *arguments: Any, **named: Any) -> None:
        CALLS["preempted"] += 1
        preempt(self, *arguments, **named)

    return counting


def choose() -> None:
    """Choose in this process as on a GPU."""
    config.choose_route = lambda *_: WeightRoute.FUSED
    hybrid_layers.runs_on_library = lambda: True
    CpuPlatform.get_attn_backend_cls = classmethod(lambda *_, **__: registration.ATTENTION)


def main() -> None:
    """Choose as on a GPU, run the jobs, and say what the library was called for."""
    os.environ[held.CHOICE] = Path(
        __file__
    ).stem  # ranks that are processes of their own choose too
    choose()
    Library.call = counted(Library.call)
    Scheduler._preempt_request = preempting(Scheduler._preempt_request)
    offline.main()
    sys.stderr.write(f"calls {sorted(CALLS)}\n")


if __name__ == "__main__":
    main()
