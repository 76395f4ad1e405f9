"""What watches while serving: NVML events and the sampler, on the fake library."""

from __future__ import annotations

import os
import time

from waiting import zombies

from appliance.gate.defaults import plain_section
from healthchecks.events import Ear
from healthchecks.sampler import Sampler


def test_events_are_heard_by_uuid(lab):
    lab.machine(
        lab.healthy()
        | {"events": [{"gpu": 1, "type": 8, "data": 79}, {"gpu": 0, "type": 2, "data": 0}]}
    )
    ear = Ear(["GPU-0", "GPU-1"])
    heard: list[tuple[str, int]] = []

    deadline = time.monotonic() + 10.0
    while not heard and time.monotonic() < deadline:
        heard += ear.heard()
        os.sched_yield()
    ear.close()

    assert heard == [("GPU-1", 79)]
    assert zombies() == []


def test_events_that_are_refused_end_the_ear_quietly(lab):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlDeviceRegisterEvents", "return": 3}]})
    ear = Ear(["GPU-0"])

    deadline = time.monotonic() + 10.0
    while ear._child is not None and time.monotonic() < deadline:
        assert ear.heard() == []

    assert ear._child is None


def test_sampler_answers_at_once_while_nvml_hangs(lab):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlInitWithFlags", "hang_ms": -1}]})
    section = {**plain_section(), "state_dir": str(lab.tmp / "state"), "timeout": 1.0}
    sampler = Sampler(section, ("GPU-0",), 1.0, listen=Ear)
    sampler.start()

    slowest = 0.0
    deadline = time.monotonic() + 20.0
    while sampler.latest().samples < 2 and time.monotonic() < deadline:
        started = time.monotonic()
        sampler.latest()
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.01)
    verdict = sampler.latest()
    sampler.stop()

    assert slowest < 0.150
    assert (verdict.ready, verdict.nvml_lost) == (False, False)
    assert verdict.reason.startswith("nvml.timeout")
    assert zombies() == []
