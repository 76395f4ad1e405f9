"""Log fixtures to diagnoses: the wording is that of the engine and of the libraries below it."""

# ruff: noqa: E501 - log lines are as long as the engine makes them

from __future__ import annotations

import pytest

from appliance.errors import ExitCode
from appliance.serve.diagnose import (
    Diagnosis,
    Observation,
    RankReading,
    diagnose,
    diagnose_hang,
    diagnose_start_timeout,
    gpu_fault_in,
    root_cause,
)

ENGINE = "(EngineCore pid=71) ERROR 11-29 19:22:33 [core.py:866] "
API = "(APIServer pid=12) "
GENERIC = API + "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}"
CAPTURING = "(Worker_TP0 pid=80) Capturing CUDA graphs (decode, FULL):  43%|####3     | 3/7"
OOM = ENGINE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.06 GiB. GPU 0 has"
KV_SHORT = ENGINE + (
    "ValueError: To serve at least one request with the model's max seq len (262144), (8.00 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (1.25 GiB). Based on the "
    "available memory, the estimated maximum model length is 40960. Try increasing"
)
BUSY = ENGINE + (
    "ValueError: Free memory on device cuda:0 (9.21/15.77 GiB) on startup is less than desired GPU "
    "memory utilization (0.92, 14.51 GiB). Decrease GPU memory utilization or reduce GPU memory"
)
WAIT = "(APIServer pid=12) INFO [shm_broadcast.py:501] No available shared memory broadcast block found"

QUEUE = (
    "RuntimeError: Insufficient space in /dev/shm: 160 MiB required, 64 MiB free. Increase "
    "/dev/shm (e.g. --shm-size or --ipc=host)."
)

LOGS: dict[str, tuple[str, list[str], int | None]] = {
    "argument": ("ENGINE_ARGUMENT", ["api_server.py: error: unrecognized arguments: --swap-space=4"], 2),
    "value": ("ENGINE_ARGUMENT", ["api_server.py: error: argument --block-size: invalid choice"], 2),
    "quantization": (
        "QUANTIZATION_UNKNOWN",
        [API + "ValueError: Unknown quantization method: nvfp4. Must be one of ['awq', 'fp8']."],
        1,
    ),
    "capability": (
        "QUANTIZATION_UNSUPPORTED",
        [ENGINE + "ValueError: The quantization method modelopt_fp4 is not supported for the current "
         "GPU. Minimum capability: 75. Current capability: 70."],
        1,
    ),
    "graphs": ("GRAPH_OOM", [CAPTURING, OOM, GENERIC], 1),
    "load": ("CUDA_OOM", [OOM, GENERIC], 1),
    "kv": ("KV_TOO_SMALL", [KV_SHORT, GENERIC], 1),
    "no kv": (
        "NO_KV_MEMORY",
        [ENGINE + "ValueError: No available memory for the cache blocks. Try increasing "
         "`gpu_memory_utilization` when initializing the engine", GENERIC],
        1,
    ),
    "busy": ("GPU_BUSY", [BUSY, GENERIC], 1),
    "ecc looks like oom": (
        "GPU_ECC", [OOM, ENGINE + "torch.AcceleratorError: CUDA error: uncorrectable ECC error "
                    "encountered", GENERIC], 0,
    ),
    "lost": ("GPU_LOST", [ENGINE + "RuntimeError: NVML: GPU is lost"], 1),
    "xid": ("GPU_XID", ["[ 12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen"], None),
    "kernel": ("NO_KERNEL_IMAGE", [ENGINE + "RuntimeError: CUDA error: no kernel image is available"], 1),
    "compat": ("DRIVER_MISMATCH", ["RuntimeError: Error 803: system has unsupported display driver"], 1),
    "device": ("NO_CUDA_DEVICE", ["RuntimeError: Failed to infer device type, please set VLLM"], 1),
    "mma": (
        "TRITON_VOLTA_LOWERING",
        ["Assertion `!(isMma) && \"mma -> mma layout conversion is only supported on Ampere\"' failed."],
        -6,
    ),
    "compiler": ("NO_C_COMPILER", ["RuntimeError: Failed to find C compiler. Please specify via CC"], 1),
    "bf16": ("BFLOAT16", ["ValueError: Bfloat16 is only supported on GPUs with compute capability"], 1),
    "shm full": ("SHM_TOO_SMALL", ["OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"], 1),
    "shm of docker": ("SHM_TOO_SMALL", [ENGINE + QUEUE, GENERIC], 1),
    "sigbus": ("SHM_TOO_SMALL", ["nothing special"], -7),
    "disk": ("DISK_FULL", ["OSError: [Errno 28] No space left on device"], 1),
    "file": ("CHECKPOINT_CORRUPT", ["safetensors_rust.SafetensorError: Error while deserializing header"], 1),
    "nccl": ("NCCL", [ENGINE + "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG"], 1),
    "segfault": ("NCCL_SEGFAULT", ["(Worker_TP0 pid=9) INFO [pynccl.py:111] vLLM is using nccl"], -11),
    "assert": ("DEVICE_ASSERT", ["RuntimeError: CUDA error: device-side assert triggered"], 1),
    "port": ("ENGINE_PORT", ["OSError: [Errno 98] Address already in use"], 1),
    "worker": ("WORKER_DEAD", ["ERROR Worker proc VllmWorker-1 died unexpectedly, shutting down"], 0),
    "host": ("HOST_OOM", ["RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried"], 1),
    "unknown": ("ENGINE_FAILED", [ENGINE + "AssertionError: no such thing", GENERIC], 1),
    "silent": ("ENGINE_FAILED", [], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_log_names_its_cause(name: str) -> None:
    code, lines, returncode = LOGS[name]

    diagnosis = diagnose(["INFO start", *lines], returncode=returncode)

    assert diagnosis.code == code
    assert diagnosis.evidence
    assert diagnosis.fix


@pytest.mark.parametrize(("name", "fault"), [("ecc looks like oom", True), ("load", False)])
def test_only_hardware_faults_end_with_42(name: str, fault: bool) -> None:
    diagnosis = diagnose(LOGS[name][1])

    code = diagnosis.exit_code(ExitCode.ENGINE_DIED)

    assert diagnosis.gpu_fault == fault
    assert code is (ExitCode.GPU_FAULT if fault else ExitCode.ENGINE_DIED)


def test_memory_fault_before_capture_is_not_one_of_graphs() -> None:
    assert diagnose([OOM, CAPTURING]).code == "CUDA_OOM"


def test_numbers_in_the_evidence_are_facts() -> None:
    assert diagnose([KV_SHORT]).facts == {"estimated_max_model_len": "40960"}
    assert diagnose([QUEUE]).facts == {"required_mib": "160", "free_mib": "64"}
    assert diagnose([BUSY]).facts == {"free_gib": "9.21", "total_gib": "15.77"}


@pytest.mark.parametrize(("kills", "code"), [(1, "HOST_OOM"), (0, "ENGINE_FAILED")])
def test_sigkill_is_the_hosts_memory_only_when_the_kernel_counted_one(
    kills: int, code: str
) -> None:
    assert diagnose(["Loading shards 40%"], returncode=-9, oom_kills=kills).code == code


def test_root_cause_is_the_first_exception_that_is_not_news_of_another() -> None:
    lines = [
        ENGINE + "Traceback (most recent call last):",
        ENGINE + "ValueError: the real one",
        ENGINE + "TypeError: on the way out",
        GENERIC,
    ]

    assert root_cause(lines) == "ValueError: the real one"
    assert root_cause([GENERIC]) == GENERIC.removeprefix(API)
    assert root_cause(["all is well"]) is None


def test_fault_is_one_line_with_cause_evidence_and_remedy() -> None:
    text = str(diagnose([BUSY]).fault("engine"))

    assert text.startswith("error[GPU_BUSY] engine: somebody else holds memory of the GPU, got ")
    assert "9.21/15.77" in text
    assert "\n" not in text


HOT = RankReading(0, alive=True, utilization_percent=100, power_share=0.19)
COLD_BUSY = (HOT, RankReading(1, alive=True, utilization_percent=99, power_share=0.19))
WORKING = tuple(RankReading(r, alive=True, utilization_percent=95, power_share=0.8) for r in (0, 1))
ONE_BUSY = (HOT, RankReading(1, alive=True, utilization_percent=0, power_share=0.1))
DEAD = (HOT, RankReading(1, alive=False))


@pytest.mark.parametrize(
    ("observation", "code"),
    [
        (Observation(DEAD), "WORKER_DEAD"),
        (Observation(COLD_BUSY, compiler="ptxas"), "COMPILING"),
        (Observation(COLD_BUSY), "STALLED_COLLECTIVE"),
        (Observation(ONE_BUSY), "STUCK_KERNEL"),
        (Observation(WORKING), "UNKNOWN"),
        (Observation((HOT,)), "UNKNOWN"),
        (Observation(), "UNKNOWN"),
    ],
)
def test_rc_011_the_same_notice_is_told_apart_by_what_is_seen(
    observation: Observation, code: str
) -> None:
    diagnosis = diagnose_hang(["INFO x", WAIT, "INFO y"], observation)

    assert diagnosis.code == code
    assert diagnosis.evidence[0] == WAIT


@pytest.mark.parametrize(
    ("lines", "observation", "code"),
    [
        (["Loading shards 64%"], Observation(), "START_TIMEOUT"),
        ([CAPTURING], Observation(), "GRAPH_CAPTURE"),
        ([CAPTURING, "Application startup"], Observation(), "START_TIMEOUT"),
        ([WAIT], Observation(COLD_BUSY), "STALLED_COLLECTIVE"),
        ([], Observation(), "START_TIMEOUT"),
    ],
)
def test_late_start_is_told_apart(lines: list[str], observation: Observation, code: str) -> None:
    assert diagnose_start_timeout(lines, observation).code == code


def test_gpu_fault_is_seen_in_one_line() -> None:
    fault = gpu_fault_in("CUDA error: uncorrectable ECC error encountered")

    assert isinstance(fault, Diagnosis)
    assert fault.code == "GPU_ECC"
    assert gpu_fault_in(OOM) is None
