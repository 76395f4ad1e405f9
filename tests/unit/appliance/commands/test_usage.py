"""What `bench` and `drain` take as an address and as a duration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "localhost:8000", "ftp://host", "http://", "http://host:x", ""]
)
def test_bench_address_without_its_scheme_or_host_is_a_usage_error(
    appliance: Run, url: str
) -> None:
    ended = appliance("bench", f"--url={url}")

    assert ended.code == 2
    assert f"--url: must be http://host:port, got {url!r}" in ended.err


@pytest.mark.parametrize("wait", ["3s", "2m", "250ms", "20", "0.5"])
def test_drain_takes_a_wait_with_a_unit_and_bare_seconds(appliance: Run, wait: str) -> None:
    ended = appliance("drain", "--port", "1", f"--wait={wait}")

    assert (ended.code, ended.err.split()[0]) == (41, "error[NOT_RUNNING]")


@pytest.mark.parametrize("wait", ["3x", "", "-3", "nan", "3 seconds"])
def test_drain_wait_that_is_no_duration_is_a_usage_error(appliance: Run, wait: str) -> None:
    ended = appliance("drain", "--port", "1", f"--wait={wait}")

    assert ended.code == 2
    assert f"--wait: must be a duration with a unit (ms, s, m, h, d) such as 30s, got {wait!r}" in (
        ended.err
    )
