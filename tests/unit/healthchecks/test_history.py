"""What is remembered between runs: baselines, latches, acknowledgements."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from healthchecks.facts import EccFacts, KernelFacts, LinkFacts, PcieFacts, RetiredFacts, XidFacts
from healthchecks.history import AckError, acknowledge, advance, refresh
from healthchecks.state import State

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def host_with(machine, **changes):
    return machine.host(machine.gpu(0, **changes), machine.gpu(1))


def ecc(dbe: int, *, sbe: int = 0, volatile: int = 0) -> EccFacts:
    return EccFacts(True, True, 0, volatile, sbe, dbe)


def xid(number: int) -> KernelFacts:
    return KernelFacts("read", (XidFacts(number, 0),))


def test_first_run_takes_history_as_baseline_and_only_warns(machine):
    host = host_with(machine, ecc=ecc(3))
    state = advance(State(), host, NOW)

    found = machine.judge("ecc", host, machine.plan("single"), state=state)

    assert state.gpus["GPU-0"].baseline_dbe == 3
    assert found["ecc.dbe.history"] == "warn"
    assert "fail" not in found.values()


def test_growth_refuses_until_it_is_acknowledged(machine):
    plan, grown = machine.plan("single"), host_with(machine, ecc=ecc(4))
    state = advance(advance(State(), host_with(machine, ecc=ecc(3)), NOW), grown, NOW)

    assert machine.judge("ecc", grown, plan, state=state)["ecc.dbe.growth"] == "fail"

    state = acknowledge(state, "ecc.dbe.growth", "GPU-0", by="ops", reason="page retired", now=NOW)

    assert machine.judge("ecc", grown, plan, state=state)["ecc.dbe.history"] == "warn"
    assert state.gpus["GPU-0"].acks[-1].baseline == {"dbe": 4}


def test_cleared_counter_is_noticed_and_the_peak_stays(machine):
    state = advance(State(), host_with(machine, ecc=ecc(9)), NOW)
    cleared = host_with(machine, ecc=ecc(0))

    assert (
        machine.judge("ecc", cleared, machine.plan("single"), state=state)["ecc.counters"] == "warn"
    )

    state = advance(state, cleared, NOW)
    grown = machine.judge(
        "ecc", host_with(machine, ecc=ecc(1)), machine.plan("single"), state=state
    )

    assert state.gpus["GPU-0"].peak_dbe == 9
    assert grown["ecc.dbe.growth"] == "fail"


@pytest.mark.parametrize(("more", "wanted"), [(2000, "pass"), (2001, "warn")])
def test_corrected_errors_a_day_warn_above_the_limit(machine, more, wanted):
    state = advance(State(), host_with(machine, ecc=ecc(0, sbe=10)), NOW - timedelta(days=2))
    later = host_with(machine, ecc=ecc(0, sbe=10 + more))

    assert (
        machine.judge("ecc", later, machine.plan("single"), state=state)["ecc.sbe.rate"] == wanted
    )


@pytest.mark.parametrize(
    ("before", "now", "days", "wanted"),
    [
        (14, 16, 3, "fail"),
        (13, 15, 3, "warn"),
        (15, 16, 3, "warn"),
        (14, 16, 8, "fail"),
        (16, 16, 3, "pass"),
    ],
)
def test_retired_pages_that_grow_within_a_week(machine, before, now, days, wanted):
    first = host_with(machine, retired=RetiredFacts(0, before, False))
    state = advance(State(), first, NOW - timedelta(days=days))
    host = host_with(machine, retired=RetiredFacts(0, now, False))

    found = machine.judge("pages", host, machine.plan("single"), state=state)

    assert found["mem.retired_growth"] == wanted


@pytest.mark.parametrize(
    ("changes", "kernel", "check", "clears"),
    [
        ({"ecc": ecc(1, volatile=1)}, KernelFacts("read"), "ecc.dbe.volatile", "reload"),
        ({}, xid(48), "xid.48", "reload"),
        ({}, xid(62), "xid.62", "boot"),
        ({}, xid(79), "xid.79", "boot"),
        ({}, xid(64), "xid.64", "ack"),
        ({"read_status": {"uuid": "gpu_is_lost"}}, KernelFacts("read"), "gpu.present", "boot"),
    ],
)
def test_latch_clears_on_its_own_event_only(machine, changes, kernel, check, clears):
    sick = replace(host_with(machine, **changes), kernel=kernel)
    state = advance(State(), sick, NOW)
    same_boot, next_boot = machine.host(), machine.host(boot_id="b2")
    waiting = host_with(machine, retired=RetiredFacts(0, 1, True, False, True))

    def holds(host):
        return [latch.check for latch in refresh(state, host).gpus["GPU-0"].latched] == [check]

    assert holds(waiting)
    assert holds(same_boot) == (clears != "reload")
    assert holds(next_boot) == (clears == "ack")


def test_latch_of_an_earlier_run_refuses(machine):
    state = advance(State(), machine.host(kernel=xid(62)), NOW)

    found = machine.judge(
        "latches", machine.host(), machine.plan("single"), state=refresh(state, machine.host())
    )

    assert found == {"xid.62": "fail"}


def test_latch_that_the_log_still_shows_is_judged_once(machine):
    host = machine.host(kernel=xid(62))
    state = advance(State(), host, NOW)

    assert machine.judge("latches", host, machine.plan("single"), state=state) == {}


@pytest.mark.parametrize(("days", "held"), [(29, True), (31, False)])
def test_bus_loss_twice_in_thirty_days_stays_until_acknowledged(machine, days, held):
    state = advance(State(), machine.host(kernel=xid(79), boot_id="b0"), NOW - timedelta(days=days))
    state = advance(refresh(state, machine.host(boot_id="b1")), machine.host(kernel=xid(79)), NOW)

    after_boot = refresh(state, machine.host(boot_id="b2"))

    assert bool(after_boot.gpus["GPU-0"].latched) is held
    if held:
        cleared = acknowledge(after_boot, "xid.79", "GPU-0", by="ops", reason="new supply", now=NOW)
        assert cleared.gpus["GPU-0"].latched == ()


@pytest.mark.parametrize(
    ("check", "uuid"), [("xid.64", "GPU-0"), ("ecc.dbe.growth", "GPU-0"), ("xid.64", "GPU-9")]
)
def test_acknowledge_of_nothing_is_refused(machine, check, uuid):
    state = advance(State(), machine.host(), NOW)

    with pytest.raises(AckError):
        acknowledge(state, check, uuid, by="ops", reason="nothing there", now=NOW)


def test_width_below_the_best_seen_refuses_tensor_parallelism(machine):
    state = advance(State(), machine.host(), NOW)
    narrow = host_with(machine, pcie=PcieFacts(8, 8, 3, 3))

    assert (
        machine.judge("pcie", narrow, machine.plan("tp2"), state=state)["pcie.width_degraded"]
        == "fail"
    )


def test_lanes_below_the_best_seen_warn(machine):
    links = tuple(LinkFacts(lane, active=True) for lane in range(2))
    gpus = (machine.gpu(0, links=links), machine.gpu(1, links=links))
    state = advance(State(), machine.host(*gpus, pairs=(machine.pair(nvlink_lanes=2),)), NOW)
    host = machine.host(*gpus, pairs=(machine.pair(nvlink_lanes=1),))

    assert machine.judge("nvlink", host, machine.plan("tp2"), state=state)["pair.nvlink"] == "warn"


def test_uncorrected_pcie_errors_of_earlier_runs_do_not_count_again(machine):
    host = host_with(machine, pcie=PcieFacts(16, 16, 3, 3, aer_fatal=4))
    state = advance(State(), host, NOW)

    assert machine.judge("pcie", host, machine.plan("single"), state=state)["pcie.aer"] == "pass"


def test_moved_card_keeps_its_history_and_an_absent_one_is_kept(machine):
    state = advance(State(), host_with(machine, ecc=ecc(2)), NOW)
    moved = machine.host(machine.gpu(1, uuid="GPU-0", ecc=ecc(2)), pairs=())

    state = advance(state, moved, NOW)

    assert state.gpus["GPU-0"].bus_id == "00000000:11:00.0"
    assert state.gpus["GPU-0"].baseline_dbe == 2
    assert "GPU-1" in state.gpus


@pytest.mark.parametrize(("days", "wanted"), [(6.9, "fail"), (7.1, "pass")])
def test_retired_pages_of_the_last_week_count_together(machine, days, wanted):
    old, new = (host_with(machine, retired=RetiredFacts(0, pages, False)) for pages in (14, 16))
    state = advance(State(), old, NOW - timedelta(days=days))
    state = advance(state, new, NOW - timedelta(days=1))

    found = machine.judge("pages", new, machine.plan("single"), state=state)

    assert found["mem.retired_growth"] == wanted
