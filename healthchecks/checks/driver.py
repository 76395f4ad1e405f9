"""Whether the driver is new enough, and whether its own library is the one that programs find."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from healthchecks.context import HARD, SOFT, Context
from healthchecks.policy import DRIVER_COMFORT, DRIVER_MIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the driver's version for the kernels and for the engine, and what hides its library."""
    if context.facts.nvml != "ok":
        return
    yield _minimum(context)
    yield from _engine(context)
    if context.facts.shadowing_libcuda:
        yield context.on_host("driver.libcuda", HARD, "sysfs").fails(
            context.facts.shadowing_libcuda,
            "the driver's own libcuda is found first",
            f"{context.facts.shadowing_libcuda} hides the driver's libcuda",
            remedy="take the compat folder out of ld.so.conf.d and LD_LIBRARY_PATH",
            scope="edit_config",
        )


def _minimum(context: Context) -> CheckResult:
    text = context.facts.driver_version
    wanted = f"at least {dotted(DRIVER_MIN)}"
    found = version(text)
    if found is None:
        return context.on_host("driver.min").missing("driver_version", wanted)
    if _older(found, DRIVER_MIN):
        return context.on_host("driver.min").fails(
            f"{text}",
            wanted,
            f"driver {text} cannot run CUDA 11.8 code",
            remedy="install driver 535 or 580 on the host",
            scope="reload_driver",
            fixed=True,
        )
    if _older(found, DRIVER_COMFORT):
        return context.on_host("driver.min", SOFT).fails(
            f"{text}",
            f"better {dotted(DRIVER_COMFORT)} or newer",
            f"driver {text} runs CUDA 11.8 by compatibility only",
            remedy="install driver 535 or 580 on the host",
            scope="reload_driver",
        )
    return context.on_host("driver.min").passes(f"{text}", wanted)


def _engine(context: Context) -> Iterator[CheckResult]:
    needed = context.plan.driver_min
    found = version(context.facts.driver_version)
    if needed is None or found is None:
        return
    wanted = f"at least {dotted(needed)}"
    text = f"{context.facts.driver_version}"
    if _older(found, needed):
        yield context.on_host("driver.engine").fails(
            text,
            wanted,
            f"driver {text} is older than the engine's CUDA libraries accept",
            remedy="install driver 535 or 580 on the host",
            scope="reload_driver",
            fixed=True,
        )
    else:
        yield context.on_host("driver.engine").passes(text, wanted)


def version(text: str | None) -> tuple[int, ...] | None:
    """Return the leading numbers of a driver version; `570.x` gives (570,)."""
    numbers = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else None


def dotted(numbers: tuple[int, ...]) -> str:
    """Return a version as drivers are named: `450.80.02`."""
    return ".".join(f"{number:02d}" for number in numbers)


def _older(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Compare as far as both are known, so that a bare major number is not called old."""
    length = min(len(found), len(wanted))
    return found[:length] < wanted[:length]
