"""When a drain is over."""

from __future__ import annotations

import pytest

from appliance.serve.drain import Drain, DrainOutcome, terminate_s


def test_drain_is_over_when_two_readings_in_a_row_are_empty() -> None:
    drain = Drain(timeout_s=10.0, now=0.0)

    outcomes = [
        drain.observe(count, now) for now, count in ((0.0, 0), (0.1, 1), (0.2, 0), (0.3, 0))
    ]

    assert outcomes == [DrainOutcome.WAITING] * 3 + [DrainOutcome.DRAINED]


def test_drain_times_out_with_requests_in_flight_only() -> None:
    busy, late = Drain(timeout_s=10.0, now=0.0), Drain(timeout_s=10.0, now=0.0)

    assert busy.observe(1, 9.9) is DrainOutcome.WAITING
    assert busy.observe(1, 10.0) is DrainOutcome.TIMED_OUT
    assert late.observe(0, 10.0) is DrainOutcome.WAITING
    assert late.observe(0, 10.1) is DrainOutcome.DRAINED


@pytest.mark.parametrize(("in_flight", "seconds"), [(0, 20.0), (1, 3.0), (64, 3.0)])
def test_engine_that_would_wait_for_given_up_requests_gets_less_time(
    in_flight: int, seconds: float
) -> None:
    assert terminate_s(in_flight) == seconds
