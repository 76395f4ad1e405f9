"""Every check by its name; the name is the file in `checks/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthchecks.checks import (
    busy,
    capability,
    container,
    cuda,
    driver,
    ecc,
    environment,
    functional,
    inforom,
    latches,
    numa,
    nvlink,
    nvml,
    p2p,
    pages,
    pcie,
    persistence,
    power,
    presence,
    spin,
    thermal,
    topology,
    xid,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from healthchecks.context import Check, Context
    from healthchecks.result import CheckResult

CHECKS: Mapping[str, Check] = {
    "nvml": nvml.check,
    "presence": presence.check,
    "capability": capability.check,
    "driver": driver.check,
    "ecc": ecc.check,
    "pages": pages.check,
    "inforom": inforom.check,
    "xid": xid.check,
    "latches": latches.check,
    "pcie": pcie.check,
    "p2p": p2p.check,
    "functional": functional.check,
    "topology": topology.check,
    "nvlink": nvlink.check,
    "numa": numa.check,
    "thermal": thermal.check,
    "power": power.check,
    "persistence": persistence.check,
    "busy": busy.check,
    "cuda": cuda.check,
    "container": container.check,
    "environment": environment.check,
    "spin": spin.check,
}


def run_checks(context: Context, names: Iterable[str] = CHECKS) -> tuple[CheckResult, ...]:
    """Run the named checks in order and return every judgement."""
    return tuple(result for name in names for result in CHECKS[name](context))
