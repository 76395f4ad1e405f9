"""What was read of the machine: frozen values, None where a read gave no answer."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - codec.py resolves the annotations at run time
from dataclasses import dataclass, field

NOT_SHOWN = "not_shown"
"""Read status of a field that a recorded machine state does not carry."""


@dataclass(frozen=True)
class EccFacts:
    """Error correction of one GPU.

    Attributes:
        mode_current: Whether ECC is on now.
        mode_pending: Whether it is on after the next reboot.
        volatile_sbe: Corrected errors since the driver was loaded.
        volatile_dbe: Uncorrected errors since the driver was loaded.
        aggregate_sbe: Corrected errors over the card's life.
        aggregate_dbe: Uncorrected errors over the card's life.
        volatile_dbe_at: Uncorrected errors since driver load by location (`l1`, `l2`, `device`,
            `register`, `cbu`).
    """

    mode_current: bool | None = None
    mode_pending: bool | None = None
    volatile_sbe: int | None = None
    volatile_dbe: int | None = None
    aggregate_sbe: int | None = None
    aggregate_dbe: int | None = None
    volatile_dbe_at: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class RetiredFacts:
    """Retired pages by cause, and whether one still waits for the next attach of the GPU."""

    sbe: int | None = None
    dbe: int | None = None
    pending: bool | None = None
    pending_sbe: bool | None = None
    pending_dbe: bool | None = None


@dataclass(frozen=True)
class PcieFacts:
    """The GPU's link; `loaded_*` are the best of samples taken while data moved.

    Attributes:
        width: Lanes now.
        width_max: Lanes that device and slot allow together.
        generation: Generation now, which may sink at idle.
        generation_max: Generation that device and slot allow together.
        loaded_width: Best width under load.
        loaded_generation: Best generation under load.
        loaded_gb_s: Measured host-to-device rate in GB/s.
        replays: NVML's replay counter.
        replays_per_min: Growth of that counter a minute.
        replays_during_load: Growth of that counter while data moved.
        aer_correctable: Corrected errors of the endpoint and its root port (sysfs).
        aer_correctable_during_load: Growth of them while data moved.
        aer_fatal: Uncorrected errors, fatal and non-fatal, of the endpoint and its root port.
        upstream_width: Lanes that sysfs says the device itself could use.
    """

    width: int | None = None
    width_max: int | None = None
    generation: int | None = None
    generation_max: int | None = None
    loaded_width: int | None = None
    loaded_generation: int | None = None
    loaded_gb_s: float | None = None
    replays: int | None = None
    replays_per_min: float | None = None
    replays_during_load: int | None = None
    aer_correctable: int | None = None
    aer_correctable_during_load: int | None = None
    aer_fatal: int | None = None
    upstream_width: int | None = None


@dataclass(frozen=True)
class ThermalFacts:
    """Temperatures and their limits in degrees Celsius; `reasons` are the clock-limit reasons now.

    Attributes:
        gpu_c: Core temperature.
        hbm_c: Memory temperature.
        slowdown_c: Core temperature at which hardware slows down.
        shutdown_c: Core temperature at which hardware turns off.
        gpu_max_c: Highest core temperature for operation.
        hbm_max_c: Highest memory temperature for operation.
        reasons: Names such as `hw_thermal_slowdown`, None when not read.
    """

    gpu_c: int | None = None
    hbm_c: int | None = None
    slowdown_c: int | None = None
    shutdown_c: int | None = None
    gpu_max_c: int | None = None
    hbm_max_c: int | None = None
    reasons: tuple[str, ...] | None = None


@dataclass(frozen=True)
class PowerFacts:
    """Power in watts; `failed_reads` counts tries of the draw that gave no value, at most 3."""

    draw_w: float | None = None
    limit_w: float | None = None
    default_w: float | None = None
    min_w: float | None = None
    failed_reads: int = 0


@dataclass(frozen=True)
class LinkFacts:
    """One NVLink lane of a GPU; the error counters count since the driver was loaded."""

    link: int
    active: bool
    remote_bus_id: str | None = None
    crc_errors: int | None = None
    crc_per_s: float | None = None
    replays: int | None = None
    recoveries: int | None = None


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as NVML and sysfs describe it.

    Attributes:
        index: NVML index.
        uuid: `GPU-...`.
        bus_id: PCI bus id.
        name: Product name.
        serial: Board serial; stays out of reports and records.
        compute_capability: (major, minor).
        memory_total_bytes: Memory of the card.
        memory_free_bytes: Memory nobody holds.
        process_pids: Processes with a context on it, as this pid namespace names them; None when
            not read.
        persistence: Whether the driver stays loaded without clients.
        compute_mode: `default`, `exclusive_process`, `prohibited` or `exclusive_thread`.
        utilization_percent: Share of the last period in which a kernel ran.
        sm_clock_mhz: Core clock now.
        mem_clock_mhz: Memory clock now.
        inforom_valid: Whether the InfoROM's checksum is right.
        numa_node: Host memory node of its slot, None when the host has none or does not say.
        alloc: `ok`, or what CUDA said when a context and 1 MiB were asked for; None when not tried.
        selftest: `ok`, `wrong: ` with the first wrong value, or why it did not end; None: not run.
        ecc: Error correction.
        retired: Retired pages.
        pcie: Link.
        thermal: Temperatures.
        power: Power.
        links: NVLink lanes, None when not read, empty when the board has none.
        read_status: Field name to `ok`, `not_supported`, `function_not_found`, `timeout`,
            `gpu_is_lost`,
            `error:N` or `not_shown`.
    """

    index: int
    uuid: str | None = None
    bus_id: str | None = None
    name: str | None = None
    serial: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    process_pids: tuple[int, ...] | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    utilization_percent: int | None = None
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    inforom_valid: bool | None = None
    numa_node: int | None = None
    alloc: str | None = None
    selftest: str | None = None
    ecc: EccFacts = field(default_factory=EccFacts)
    retired: RetiredFacts = field(default_factory=RetiredFacts)
    pcie: PcieFacts = field(default_factory=PcieFacts)
    thermal: ThermalFacts = field(default_factory=ThermalFacts)
    power: PowerFacts = field(default_factory=PowerFacts)
    links: tuple[LinkFacts, ...] | None = None
    read_status: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class PairFacts:
    """What is known of the way between two GPUs; `a` and `b` are NVML indexes.

    Attributes:
        a: NVML index of the first GPU.
        b: NVML index of the second GPU.
        nvlink_lanes: Active NVLink lanes from one to the other.
        topology: `INTERNAL`, `PIX`, `PXB`, `PHB`, `NODE` or `SYS`.
        read_ab: `OK` or NVML's reason why `a` may not read of `b`; the other three alike.
        read_ba: The same for `b` reading of `a`.
        write_ab: The same for `a` writing to `b`.
        write_ba: The same for `b` writing to `a`.
        functional: `ok`, `mismatch`, `hang`, `crash`, `error` or `no_access`, None when the copy
            was not tried.
        functional_detail: What the copy saw: direction, offset, signal.
        functional_gb_s: Rate of the copy, the slower direction, in GB/s.
        collective: Outcome of the two-rank all-reduce with P2P as NCCL wants it; the same words.
        collective_detail: What it saw.
        collective_no_p2p: Outcome of the same with `NCCL_P2P_DISABLE=1`.
        custom_all_reduce_only: The recorded fault is one of vLLM's own all-reduce, not of plain
            transfers.
        read_status: Field name to read status, as in `GpuFacts`.
    """

    a: int
    b: int
    nvlink_lanes: int | None = None
    topology: str | None = None
    read_ab: str | None = None
    read_ba: str | None = None
    write_ab: str | None = None
    write_ba: str | None = None
    functional: str | None = None
    functional_detail: str = ""
    functional_gb_s: float | None = None
    collective: str | None = None
    collective_detail: str = ""
    collective_no_p2p: str | None = None
    custom_all_reduce_only: bool = False
    read_status: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class XidFacts:
    """Errors of one number on one GPU, as the kernel log or NVML events gave them.

    Attributes:
        xid: NVIDIA's number.
        gpu: NVML index, None when the line's bus id belongs to no GPU seen.
        count: How often since this boot.
        source: `kmsg` or `events`.
    """

    xid: int
    gpu: int | None
    count: int = 1
    source: str = "kmsg"


@dataclass(frozen=True)
class KernelFacts:
    """What the kernel log of this boot said; `log` is `read`, `unavailable` or `not_asked`."""

    log: str = "not_asked"
    xids: tuple[XidFacts, ...] = ()
    aer_fatal: tuple[str, ...] = ()
    aer_corrected: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """The whole machine.

    Attributes:
        gpus: GPUs that NVML lists.
        pairs: Ways between them.
        driver_version: NVML's driver version.
        memory_total_bytes: Host memory.
        memory_available_bytes: Host memory that can be had without swapping, inside this
            container's limit.
        memory_limit_bytes: The container's limit, None without one.
        shm_bytes: Size of /dev/shm.
        largest_shard_bytes: Largest file of the checkpoint, None when its folder is not there.
        nvml: `ok`, or why NVML did not open: `driver_not_loaded`, `library_not_found`, `timeout`,
            `no_permission`,
            `unknown_error` or `version_mismatch`.
        nvml_detail: NVML's own words on that.
        nvml_version: Version of the library.
        boot_id: Changes with each boot of the host.
        in_container: Whether this process runs in a container.
        gpus_expected: GPUs that a recorded machine should have shown.
        gpus_visible: GPUs that a recorded machine did show; live, `gpus` is the answer.
        numa_node: Host memory node this process is bound to, None when it may use several.
        uvm_node: Whether /dev/nvidia-uvm exists.
        wedged_pids: Processes that hang in the driver and cannot be killed.
        pci_gpus: NVIDIA GPUs on the PCI bus, whether the driver took them or not.
        environment: Inherited variables that steer NCCL and the engine.
        shadowing_libcuda: Path of a libcuda that hides the driver's own.
        stalled_s: Seconds without a token while requests wait, None when none wait or nobody says.
        host_action: What someone must do on the host before another start, from the state volume.
        holders: UUID to the other appliance that holds the GPU.
        kernel: Kernel log.
    """

    gpus: tuple[GpuFacts, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    driver_version: str | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    largest_shard_bytes: int | None = None
    nvml: str = "ok"
    nvml_detail: str = ""
    nvml_version: str | None = None
    boot_id: str | None = None
    in_container: bool | None = None
    gpus_expected: int | None = None
    gpus_visible: int | None = None
    numa_node: int | None = None
    uvm_node: bool | None = None
    wedged_pids: tuple[int, ...] = ()
    pci_gpus: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    shadowing_libcuda: str | None = None
    stalled_s: float | None = None
    host_action: str | None = None
    holders: Mapping[str, str] = field(default_factory=dict[str, str])
    kernel: KernelFacts = field(default_factory=KernelFacts)
