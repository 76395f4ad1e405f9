"""The progress rules on invented time."""

from __future__ import annotations

import pytest

from appliance.serve.progress import EngineSample, Health, Progress, parse_metrics

STALL_S = 100.0
IDLE = EngineSample(work=5.0, requests=0.0)
BUSY = EngineSample(work=5.0, requests=2.0)

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="quasar"} 3.0
vllm:num_requests_waiting{engine="0",model_name="quasar"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="quasar"} 100.0
vllm:generation_tokens_total{engine="0",model_name="quasar"} 20.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="quasar"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="quasar"} 7.0
vllm:iteration_tokens_total_sum{engine="0",model_name="quasar"} 1e+03
vllm:prompt_tokens_created{engine="0",model_name="quasar"} 1.7e+09
process_cpu_seconds_total 12.0
"""


def test_metrics_are_summed_from_the_counters_that_steps_move() -> None:
    assert parse_metrics(METRICS) == EngineSample(work=127.0, requests=5.0)


def test_metrics_of_another_program_are_no_work() -> None:
    assert parse_metrics("up 1\n<html>\n") == EngineSample(work=0.0, requests=0.0)


def test_idle_engine_is_moving_for_ever() -> None:
    progress = Progress(STALL_S, now=0.0)

    for now in range(1000):
        progress.scraped(IDLE, in_flight=0, now=float(now))

    assert progress.health(1000.0)[0] is Health.MOVING


@pytest.mark.parametrize(
    ("sample", "in_flight"), [(BUSY, 0), (IDLE, 1)], ids=["engine counts", "gateway counts"]
)
def test_pending_work_without_a_step_is_suspect_at_half_and_stalled_at_all_of_the_time(
    sample: EngineSample, in_flight: int
) -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.scraped(sample, in_flight=in_flight, now=1.0)

    verdicts = [progress.health(1.0 + waited)[0] for waited in (0.0, 49.9, 50.0, 99.9, 100.0)]

    assert verdicts == [
        Health.MOVING, Health.MOVING, Health.SUSPECT, Health.SUSPECT, Health.STALLED,
    ]  # fmt: skip


def test_busy_engine_that_moves_never_fails_however_slow() -> None:
    progress = Progress(STALL_S, now=0.0)

    for step in range(50):
        now = step * 45.0
        progress.scraped(EngineSample(work=step, requests=9.0), in_flight=9, now=now)
        assert progress.health(now)[0] is Health.MOVING


def test_missed_reads_count_only_while_nothing_moves_between_them() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.scraped(EngineSample(1.0, 1.0), in_flight=1, now=0.0)
    for now in range(10, 90, 10):
        progress.scrape_failed(reachable=True, now=float(now))
    suspect = progress.health(89.0)[0]

    progress.scraped(EngineSample(2.0, 1.0), in_flight=1, now=90.0)

    assert suspect is Health.SUSPECT
    assert progress.health(91.0)[0] is Health.MOVING


def test_silent_engine_is_stalled_even_without_requests() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.scrape_failed(reachable=True, now=10.0)

    health, waited_s, detail = progress.health(110.0)

    assert (health, waited_s, detail) == (Health.STALLED, 100.0, "no answer to anything")


def test_closed_port_is_suspect_at_once_and_gone_after_ten_seconds() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.scrape_failed(reachable=False, now=5.0)

    assert [progress.health(now)[0] for now in (5.0, 14.9, 15.0)] == [
        Health.SUSPECT, Health.SUSPECT, Health.GONE,
    ]  # fmt: skip


def test_canary_is_due_after_a_quarter_of_the_time_without_a_step() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.scraped(IDLE, in_flight=0, now=10.0)

    assert [progress.canary_due(now) for now in (24.9, 25.0)] == [False, True]


def test_unanswered_canary_stalls_an_idle_engine_and_a_later_answer_clears_it() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.canary_sent(30.0)
    progress.scraped(IDLE, in_flight=0, now=60.0)
    assert not progress.canary_due(60.0)
    suspect = progress.health(80.0)[0]
    stalled = progress.health(130.0)[0]

    progress.canary_done(answered=True, now=131.0)

    assert (suspect, stalled) == (Health.SUSPECT, Health.STALLED)
    assert progress.health(132.0)[0] is Health.MOVING


def test_answered_canary_clears_requests_whose_clients_do_not_read() -> None:
    progress = Progress(STALL_S, now=0.0)

    for now in range(0, 400, 25):
        progress.scraped(IDLE, in_flight=1, now=float(now))
        if progress.canary_due(float(now)):
            progress.canary_sent(float(now))
            progress.canary_done(answered=True, now=now + 1.0)
        assert progress.health(float(now))[0] is Health.MOVING


def test_idle_engine_that_answers_no_canary_stalls_although_its_counters_are_read() -> None:
    progress = Progress(STALL_S, now=0.0)
    progress.canary_sent(30.0)

    progress.canary_done(answered=False, now=80.0)
    for now in (81.0, 86.0, 91.0):
        progress.scraped(IDLE, in_flight=0, now=now)

    assert progress.canary_due(91.0)
    assert progress.health(129.0)[0] is Health.SUSPECT
    assert progress.health(130.0)[0] is Health.STALLED
    progress.scraped(EngineSample(work=6.0, requests=0.0), in_flight=0, now=131.0)
    progress.scraped(EngineSample(work=6.0, requests=0.0), in_flight=0, now=132.0)
    assert progress.health(133.0)[0] is Health.MOVING


def test_metrics_that_are_no_finite_numbers_are_left_out() -> None:
    text = "vllm:prompt_tokens_total NaN\nvllm:prompt_tokens_total x\nvllm:prompt_tokens_total 2\n"

    assert parse_metrics(text) == EngineSample(work=2.0, requests=0.0)
