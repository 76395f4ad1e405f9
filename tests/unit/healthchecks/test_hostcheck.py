"""The host before a container is started: driver, toolkit, CDI, nodes, bus, memory."""

from __future__ import annotations

import json
import struct

import pytest

from healthchecks.__main__ import main
from healthchecks.host.bus import redirects_peers, saves_power
from healthchecks.hostcheck import findings_of

GIB = 1024**3
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2026\n"
CDI = """cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits: {}
- name: all
containerEdits:
  mounts:
  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
    containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
"""
INFO = {"Runtimes": {"runc": {}, "nvidia": {}}, "CgroupDriver": "cgroupfs"}
INFO_TEXT = json.dumps(INFO)


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def config_space(*, acs: int | None = 0, aspm: int = 0) -> bytes:
    """Return a bridge's 4 KiB configuration space; without `acs` it lacks that capability."""
    space = bytearray(4096)
    space[0x34] = 0x40
    space[0x40] = 0x10
    struct.pack_into("<H", space, 0x50, aspm)
    if acs is not None:
        struct.pack_into("<I", space, 0x100, 0x0001 | (0x148 << 20))
        struct.pack_into("<I", space, 0x148, 0x000D)
        struct.pack_into("<H", space, 0x148 + 6, acs)
    return bytes(space)


@pytest.fixture
def host(tmp_path):
    """Return the root of a host with nothing wrong."""
    write(tmp_path, "proc/driver/nvidia/version", DRIVER)
    write(tmp_path, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05", "")
    write(tmp_path, "usr/bin/nvidia-ctk", "")
    write(tmp_path, "etc/cdi/nvidia.yaml", CDI)
    write(tmp_path, "dev/nvidia-uvm", "")
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {50 * GIB // 1024} kB\n",
    )
    write(tmp_path, "proc/cmdline", "quiet intel_iommu=on")
    write(tmp_path, "docker-info.json", json.dumps(INFO))
    port = "sys/devices/pci0000:3a/0000:3a:00.0"
    write(tmp_path, f"{port}/config", config_space())
    write(tmp_path, f"{port}/0000:3b:00.0/config", config_space(acs=None))
    write(tmp_path, f"{port}/0000:3b:00.0/vendor", "0x10de")
    write(tmp_path, f"{port}/0000:3b:00.0/class", "0x030200")
    links = tmp_path / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:3b:00.0").symlink_to(tmp_path / port / "0000:3b:00.0")
    return tmp_path


def codes(host, info=INFO_TEXT, facts=None, cdi=(), ram=8 * GIB):
    found = findings_of(host, info, facts, cdi_devices=cdi, ram_bytes=ram, disk=host, disk_bytes=1)
    return {finding.code: finding.status.value for finding in found}


def bad(host, **options):
    return {code: status for code, status in codes(host, **options).items() if status != "pass"}


def test_host_with_nothing_wrong_passes(host, capsys):
    assert bad(host) == {}
    assert (
        main(["hostcheck", "--json", "--root", str(host), "--disk", str(host), "--disk-gib", "0"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["exit_code"] == 0


def test_rc_001_driver_toolkit_and_daemon_are_three_different_reasons(host):
    (host / "etc/cdi/nvidia.yaml").unlink()
    bare = json.dumps({"Runtimes": {"runc": {}}})
    write(host, "etc/docker/daemon.json", '{"runtimes": {"nvidia": {}}}')

    assert bad(host, info=bare) == {"DAEMON_NOT_RELOADED": "fail"}
    (host / "etc/docker/daemon.json").unlink()
    assert bad(host, info=bare) == {"NO_GPU_RUNTIME": "fail"}
    (host / "usr/bin/nvidia-ctk").unlink()
    assert bad(host, info=bare) == {"TOOLKIT_ABSENT": "fail"}
    (host / "proc/driver/nvidia/version").unlink()
    assert "DRIVER_ABSENT" in bad(host, info=bare)


def test_docker_that_does_not_answer_is_unknown(host):
    assert bad(host, info=None) == {"DOCKER_ABSENT": "unknown"}


def test_rc_030_library_of_another_version_than_the_module_fails(host):
    (host / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05").rename(
        host / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.01"
    )

    assert bad(host) == {"DRIVER_MISMATCH": "fail"}


def test_rc_002_cdi_specification_of_another_driver_or_without_the_name_fails(host):
    assert codes(host, cdi=["all", "0"])["CDI"] == "pass"
    assert bad(host, cdi=["GPU-123"]) == {"CDI_MISSING": "fail"}

    write(host, "etc/cdi/nvidia.yaml", CDI.replace("580.95.05", "570.86.10"))

    assert bad(host) == {"CDI_STALE": "fail"}


def test_rc_032_legacy_runtime_with_systemd_cgroups_warns(host):
    (host / "etc/cdi/nvidia.yaml").unlink()

    assert bad(host, info=json.dumps(INFO | {"CgroupDriver": "systemd"})) == {"CGROUP_LOSS": "warn"}


def test_rc_003_uvm_node_that_is_absent_fails(host):
    (host / "dev/nvidia-uvm").unlink()

    assert bad(host) == {"UVM_MISSING": "fail"}


@pytest.mark.parametrize(
    ("control", "wanted"), [(0x04, True), (0x08, True), (0x0C, True), (0x13, False), (0, False)]
)
def test_acs_redirects_by_its_two_bits(control, wanted):
    assert redirects_peers(config_space(acs=control)) is wanted


def test_acs_without_the_capability_or_without_root():
    assert redirects_peers(config_space(acs=None)) is False
    assert redirects_peers(config_space()[:256]) is None
    assert saves_power(b"") is None


def test_rc_006_acs_on_the_path_warns_and_unreadable_bridges_are_unknown(host):
    port = "sys/devices/pci0000:3a/0000:3a:00.0/config"
    write(host, port, config_space(acs=0x0C))
    assert bad(host) == {"ACS_ON_PATH": "warn"}

    write(host, port, config_space()[:64])

    assert bad(host)["ACS_UNREAD"] == "unknown"


def test_rc_025_aspm_warns_unless_the_kernel_keeps_links_awake(host):
    write(host, "sys/devices/pci0000:3a/0000:3a:00.0/config", config_space(aspm=2))
    assert bad(host) == {"ASPM_ON": "warn"}

    write(host, "sys/module/pcie_aspm/parameters/policy", "default [performance] powersave")

    assert bad(host) == {}


def test_persistence_that_is_off_warns(host, machine):
    facts = machine.host(machine.gpu(0, persistence=False), machine.gpu(1))

    assert bad(host, facts=facts) == {"PERSISTENCE_OFF": "warn"}


@pytest.mark.parametrize(
    ("state", "name", "wanted"),
    [("D", "vllm", True), ("D", "kworker", False), ("S", "vllm", False)],
)
def test_rc_024_process_that_hangs_in_the_driver_fails(host, state, name, wanted):
    write(host, "proc/4711/stat", f"4711 ({name}) {state} 1 1")

    assert ("D_STATE" in bad(host)) is wanted


def test_process_that_hangs_with_a_gpu_open_fails_whatever_its_name(host):
    write(host, "proc/4711/stat", "4711 (x) D 1 1")
    (host / "proc/4711/fd").mkdir()
    (host / "proc/4711/fd/3").symlink_to("/dev/nvidia0")

    assert bad(host) == {"D_STATE": "fail"}


def test_memory_below_the_need_fails_and_unreadable_memory_is_unknown(host):
    assert bad(host, ram=51 * GIB) == {"HOST_RAM": "fail"}

    (host / "proc/meminfo").unlink()

    assert bad(host) == {"RAM_UNREAD": "unknown"}


@pytest.mark.parametrize(("remove", "code"), [("dev/nvidia-uvm", 1), ("docker-info.json", 2)])
def test_exit_code_of_a_host_that_fails_or_is_unknown(host, capsys, remove, code):
    (host / remove).unlink()

    assert main(["hostcheck", "--root", str(host), "--disk", str(host), "--disk-gib", "0"]) == code
    assert capsys.readouterr().out.count("\n") > 3


def test_disk_below_the_need_fails(host):
    assert main(["hostcheck", "--root", str(host), "--disk", str(host), "--disk-gib", "1e9"]) == 1
