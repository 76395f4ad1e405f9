"""The kernel's files, read from a copied tree."""

from __future__ import annotations

import pytest

from healthchecks import sysfs

GIB = 1024**3
BUS = "00000000:3B:00.0"


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path):
    """Return the root of a machine with one GPU below one root port."""
    port = "sys/devices/pci0000:3a/0000:3a:00.0"
    gpu = f"{port}/0000:3b:00.0"
    write(tmp_path, f"{port}/aer_dev_correctable", "RxErr 1\nTOTAL_ERR_COR 5\n")
    write(tmp_path, f"{port}/aer_dev_fatal", "TOTAL_ERR_FATAL 0\n")
    write(tmp_path, f"{gpu}/aer_dev_correctable", "TOTAL_ERR_COR 2\n")
    write(tmp_path, f"{gpu}/aer_dev_fatal", "TOTAL_ERR_FATAL 1\n")
    write(tmp_path, f"{gpu}/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 3\n")
    write(tmp_path, f"{gpu}/max_link_width", "16\n")
    write(tmp_path, f"{gpu}/numa_node", "1\n")
    write(tmp_path, f"{gpu}/vendor", "0x10de\n")
    write(tmp_path, f"{gpu}/class", "0x030200\n")
    links = tmp_path / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:3b:00.0").symlink_to(tmp_path / gpu)
    (links / "0000:3a:00.0").symlink_to(tmp_path / port)
    return tmp_path


def test_link_counters_add_the_ports_above(tree):
    found = sysfs.link_counters(BUS, tree)

    assert (found.correctable, found.fatal, found.width_max, found.numa_node) == (7, 4, 16, 1)


def test_link_counters_without_files_are_unknown(tmp_path):
    found = sysfs.link_counters(BUS, tmp_path)

    assert found == sysfs.LinkCounters(None, None, None, None)


def test_node_minus_one_means_no_node(tree):
    write(tree, "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/numa_node", "-1\n")

    assert sysfs.link_counters(BUS, tree).numa_node is None


def test_pci_gpus_are_counted_and_none_without_a_bus(tree, tmp_path):
    assert sysfs.pci_gpus(tree) == 1
    assert sysfs.pci_gpus(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("files", "available", "limit"),
    [
        ({}, 50 * GIB, None),
        ({"memory.max": "max\n"}, 50 * GIB, None),
        (
            {
                "memory.max": f"{8 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"inactive_file {GIB}\n",
            },
            6 * GIB,
            8 * GIB,
        ),
        (
            {
                "memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            7 * GIB,
            8 * GIB,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 50 * GIB, None),
    ],
    ids=["host", "v2-none", "v2", "v1", "v1-none"],
)
def test_host_memory_heeds_the_containers_limit(tmp_path, files, available, limit):
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {50 * GIB // 1024} kB\n",
    )
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)

    found = sysfs.host_memory(tmp_path)

    assert (found.total, found.available, found.limit) == (64 * GIB, available, limit)


def test_host_memory_without_meminfo_is_unknown(tmp_path):
    assert sysfs.host_memory(tmp_path) == sysfs.HostMemory(None, None, None)


def test_shm_of_this_machine_is_measured():
    assert sysfs.shm_bytes() > 0


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_container_leaves_a_mark(tmp_path, mark):
    assert not sysfs.in_container(tmp_path)

    write(tmp_path, mark, "")

    assert sysfs.in_container(tmp_path)


@pytest.mark.parametrize(("allowed", "node"), [("1", 1), ("0-1", None), ("0,2", None)])
def test_bound_node_is_known_when_it_is_one(tmp_path, allowed, node):
    write(tmp_path, "proc/self/status", f"Name: x\nMems_allowed_list:\t{allowed}\n")

    assert sysfs.bound_node(tmp_path) == node


def test_kernel_facts_name_the_gpu_and_leave_foreign_ones(tree):
    write(
        tree,
        "dev/kmsg",
        "NVRM: Xid (PCI:0000:3b:00): 63, pid=1\nNVRM: Xid (PCI:0000:af:00): 79, pid=1\n"
        + "".join(
            f"pcieport 0000:{bus}:00.0: PCIe Bus Error: severity=Uncorrected (Fatal),"
            " type=Transaction Layer, (id)\n"
            for bus in ("3a", "99")
        ),
    )

    facts = sysfs.kernel_facts({BUS: 0}, tree)

    assert facts.log == "read"
    assert {(event.xid, event.gpu) for event in facts.xids} == {(63, 0), (79, -1)}
    assert facts.aer_fatal == ("Transaction Layer at 3a:00",)


def test_kernel_log_that_cannot_be_read_is_unavailable(tmp_path):
    assert sysfs.kernel_facts({BUS: 0}, tmp_path).log == "unavailable"


def test_shadowing_libcuda_is_found_by_the_loaders_order(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    write(tmp_path, "etc/ld.so.conf.d/compat.conf", "# CUDA\n/usr/local/cuda/compat\n")
    folder = write(tmp_path, "usr/local/cuda/compat/libcuda.so.520.61.05", "").parent
    (folder / "libcuda.so.1").symlink_to("libcuda.so.520.61.05")

    assert (
        sysfs.shadowing_libcuda("580.95.05", tmp_path)
        == "/usr/local/cuda/compat/libcuda.so.520.61.05"
    )
    assert sysfs.shadowing_libcuda("520.61.05", tmp_path) is None
    assert sysfs.shadowing_libcuda(None, tmp_path) is None


def test_steering_variables_are_those_of_nccl_cuda_and_the_engine():
    found = sysfs.steering_variables(
        {"NCCL_P2P_DISABLE": "1", "HOME": "/", "VLLM_PORT": "1", "CUDA_X": "2"}
    )

    assert list(found) == ["CUDA_X", "NCCL_P2P_DISABLE", "VLLM_PORT"]


def test_largest_shard_is_that_of_the_weight_files(tmp_path):
    write(tmp_path, "a.safetensors", "12345")
    write(tmp_path, "tokenizer.json", "1234567890")

    assert sysfs.largest_shard(str(tmp_path)) == 5
    assert sysfs.largest_shard("") is None
