"""Reads the live machine: NVML, the kernel's files, and what CUDA does."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from healthchecks import sysfs
from healthchecks.facts import GpuFacts, HostFacts, PairFacts
from healthchecks.nvml import NvmlUnavailable, read_host
from healthchecks.probing import (
    has_torch,
    probe_collective,
    probe_gpu,
    probe_pair,
    probe_selftest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from healthchecks.plan import GatePlan
    from healthchecks.policy import Policy

FREE_STEP_S = 2.0
"""Time between two looks at free memory."""

FREE_TOLERANCE_BYTES = 64 * 1024**2
"""How much two looks may differ and still agree."""

PROBE_TIMEOUT_S = 15.0
"""Time for a context, 1 MiB there and back, and half a second of copies."""


@dataclass(frozen=True)
class Depth:
    """How deep to look.

    Attributes:
        cuda: Whether CUDA is touched: contexts, copies, all-reduces.
        wait_free_s: How long to wait for memory that another program is giving back.
        root: Root of the kernel's files.
        kernel_library: The kernels' library, whose self-test then runs on every GPU.
    """

    cuda: bool = True
    wait_free_s: float = 0.0
    root: Path = sysfs.ROOT
    kernel_library: Path | None = None


def collect(plan: GatePlan, depth: Depth | None = None) -> HostFacts:
    """Read everything the checks of a plan look at, in the time that its policy gives."""
    depth = depth or Depth()
    policy = plan.policy
    facts = _nvml(policy)
    if facts.nvml == "ok":
        facts = _wait_free(facts, plan, depth.wait_free_s)
    facts = _files(facts, plan, depth.root)
    if depth.cuda and facts.nvml == "ok" and not facts.wedged_pids:
        facts = _cuda(facts, plan, depth)
    return facts


def _nvml(policy: Policy) -> HostFacts:
    try:
        return read_host(timeout_s=policy.timeout_s, gpu_timeout_s=policy.gpu_timeout_s)
    except NvmlUnavailable as error:
        stuck = () if error.stuck_pid is None else (error.stuck_pid,)
        return HostFacts(nvml=error.kind, nvml_detail=error.detail, wedged_pids=stuck)


def _selected(facts: HostFacts, plan: GatePlan) -> list[GpuFacts]:
    return [gpu for gpu in facts.gpus if gpu.uuid in plan.uuids]


def _wait_free(facts: HostFacts, plan: GatePlan, wait_s: float) -> HostFacts:
    """Wait until every GPU of the plan has memory enough in two looks that agree."""
    deadline = time.monotonic() + wait_s
    while not _enough(facts, plan) and time.monotonic() + FREE_STEP_S < deadline:
        time.sleep(FREE_STEP_S)
        before, facts = facts, _nvml(plan.policy)
        if _enough(facts, plan) and not _agree(before, facts, plan):
            time.sleep(FREE_STEP_S)
            facts = _nvml(plan.policy)
    return facts


def _enough(facts: HostFacts, plan: GatePlan) -> bool:
    return all(
        gpu.memory_free_bytes is None
        or gpu.memory_total_bytes is None
        or gpu.memory_free_bytes >= (plan.utilization or 0.0) * gpu.memory_total_bytes
        for gpu in _selected(facts, plan)
    )


def _agree(before: HostFacts, after: HostFacts, plan: GatePlan) -> bool:
    pairs = zip(_selected(before, plan), _selected(after, plan), strict=False)
    return all(
        abs((a.memory_free_bytes or 0) - (b.memory_free_bytes or 0)) <= FREE_TOLERANCE_BYTES
        for a, b in pairs
    )


def _files(facts: HostFacts, plan: GatePlan, root: Path) -> HostFacts:
    memory = sysfs.host_memory(root)
    indexes = {gpu.bus_id: gpu.index for gpu in facts.gpus if gpu.bus_id}
    contained = sysfs.in_container(root)
    return replace(
        facts,
        gpus=tuple(_with_counters(gpu, root) for gpu in facts.gpus),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=memory.limit,
        shm_bytes=sysfs.shm_bytes(root),
        largest_shard_bytes=sysfs.largest_shard(plan.model_path),
        boot_id=sysfs.boot_id(root),
        in_container=contained,
        numa_node=sysfs.bound_node(root),
        uvm_node=sysfs.uvm_node(root),
        # A container may be given some of the host's GPUs only, and sees the whole bus.
        pci_gpus=None if contained else sysfs.pci_gpus(root),
        environment=sysfs.steering_variables(),
        shadowing_libcuda=sysfs.shadowing_libcuda(facts.driver_version, root),
        kernel=sysfs.kernel_facts(indexes, root),
    )


def _with_counters(gpu: GpuFacts, root: Path) -> GpuFacts:
    if gpu.bus_id is None:
        return gpu
    found = sysfs.link_counters(gpu.bus_id, root)
    pcie = replace(
        gpu.pcie,
        aer_correctable=found.correctable,
        aer_fatal=found.fatal,
        upstream_width=found.width_max,
    )
    return replace(gpu, pcie=pcie, numa_node=found.numa_node)


def _cuda(facts: HostFacts, plan: GatePlan, depth: Depth) -> HostFacts:
    """Prove each GPU, then each pair; a GPU that fails alone is not tried in a pair."""
    proven: dict[int, GpuFacts] = {gpu.index: gpu for gpu in facts.gpus}
    stuck = list(facts.wedged_pids)
    for gpu in _selected(facts, plan):
        found, pid = probe_gpu(gpu, PROBE_TIMEOUT_S)
        if depth.kernel_library is not None and found.alloc == "ok":
            found, pid = probe_selftest(found, depth.kernel_library, PROBE_TIMEOUT_S)
        proven[gpu.index] = _grown(gpu, found, depth.root)
        stuck += [pid] if pid else []
    facts = replace(
        facts, gpus=tuple(proven[gpu.index] for gpu in facts.gpus), wedged_pids=tuple(stuck)
    )
    if plan.kind == "single" or not plan.policy.functional_test or stuck:
        return facts
    working = [gpu for gpu in _selected(facts, plan) if gpu.alloc == "ok"]
    pairs = {(pair.a, pair.b): pair for pair in facts.pairs}
    for a, b in combinations(sorted(working, key=lambda gpu: gpu.index), 2):
        known = pairs.get((a.index, b.index), PairFacts(a.index, b.index))
        found_pair, pid = _pair(known, a, b, plan.policy)
        pairs[(a.index, b.index)] = found_pair
        stuck += [pid] if pid else []
    return replace(facts, pairs=tuple(pairs.values()), wedged_pids=tuple(stuck))


def _grown(before: GpuFacts, after: GpuFacts, root: Path) -> GpuFacts:
    """Count the corrected errors that came while data moved."""
    start = before.pcie.aer_correctable
    end = None if before.bus_id is None else sysfs.link_counters(before.bus_id, root).correctable
    if start is None or end is None:
        return after
    return replace(after, pcie=replace(after.pcie, aer_correctable_during_load=end - start))


def _pair(pair: PairFacts, a: GpuFacts, b: GpuFacts, policy: Policy) -> tuple[PairFacts, int]:
    if policy.p2p != "off":
        pair, pid = probe_pair(pair, a, b, policy.test_bytes, policy.test_timeout_s)
        if pid:
            return pair, pid
    if not has_torch() or a.uuid is None or b.uuid is None:
        return pair, 0
    return _collective(pair, (a.uuid, b.uuid), policy), 0


def _collective(pair: PairFacts, uuids: tuple[str, str], policy: Policy) -> PairFacts:
    """Run the all-reduce without P2P, which must always work, and with it where copies do."""
    without, detail = probe_collective(uuids, policy.test_timeout_s, p2p=False)
    if without == "unavailable":
        return pair
    pair = replace(pair, collective_no_p2p=without, collective_detail=detail)
    if policy.p2p == "off" or pair.functional != "ok" or without != "ok":
        return pair
    outcome, detail = probe_collective(uuids, policy.test_timeout_s, p2p=True)
    return replace(pair, collective=outcome, collective_detail=detail)
