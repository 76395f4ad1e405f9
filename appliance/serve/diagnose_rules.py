"""What the engine's log lines mean: one rule a known fault, the more telling ones first.

The wording is vLLM 0.27.1's, PyTorch's, Triton's and the CUDA driver's; a rule names the cause that
a reader can act on, never the line that only reports that something went wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rule:
    """One known fault.

    Attributes:
        code: Name of the diagnosis.
        what: The cause in a few words.
        fix: What to do now.
        pattern: What one line of the log must hold, None if the exit status alone decides.
        after: What an earlier line must hold as well.
        returncodes: Exit statuses (negative: signals) that this needs; empty for any.
        gpu_fault: The hardware is at fault: the container ends with 42.
        facts: Named groups of `pattern` that the ladder or the reader needs.
    """

    code: str
    what: str
    fix: str
    pattern: re.Pattern[str] | None
    after: re.Pattern[str] | None = None
    returncodes: frozenset[int] = field(default_factory=frozenset[int])
    gpu_fault: bool = False


def _re(text: str) -> re.Pattern[str]:
    return re.compile(text)


_SHM_SMALL = "the container's shared memory is too small"
OUT_OF_MEMORY = r"torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"

RULES: tuple[Rule, ...] = (
    Rule(
        "GPU_ECC",
        "a GPU reported an uncorrectable memory error",
        "reset the GPU or reboot the host, then run `appliance gate`; this is no memory shortage",
        _re(r"uncorrectable ECC error"),
        gpu_fault=True,
    ),
    Rule(
        "GPU_LOST",
        "a GPU no longer answers the driver",
        "read the kernel log for its Xid, then power the host off and on",
        _re(
            r"GPU is lost|fallen off the bus|GPU_IS_LOST"
            r"|all CUDA-capable devices are busy or unavailable"
        ),
        gpu_fault=True,
    ),
    Rule(
        "GPU_XID",
        "the driver logged a hardware error",
        "look the Xid up in `appliance gate`, then reset the GPU or reboot the host",
        _re(r"NVRM: Xid .*?: (?P<xid>48|62|63|64|74|79|92|94|95)\b"),
        gpu_fault=True,
    ),
    Rule(
        "QUANTIZATION_UNKNOWN",
        "the engine knows no such quantization method: the appliance's plugin was not loaded",
        "install the appliance into the engine's Python; VLLM_PLUGINS must name nvfp4",
        _re(r"Unknown quantization method|Cannot find the config file for nvfp4"),
    ),
    Rule(
        "QUANTIZATION_UNSUPPORTED",
        "the quantization method refuses this GPU",
        "serve the checkpoint through the method nvfp4",
        _re(r"quantization method .* is not supported for the current GPU"),
    ),
    Rule(
        "ENGINE_ARGUMENT",
        "the engine does not know an argument or refuses its value",
        "correct execution.extra_args; `appliance render --explain` names each argument's origin",
        _re(r"error: (?:unrecognized arguments:|argument) (?P<argument>.+)"),
    ),
    Rule(
        "ARCHITECTURE_UNKNOWN",
        "the engine has no such model architecture",
        "serve another checkpoint or an engine that knows this architecture",
        _re(r"Model architectures .* are not supported|does not recognize this architecture"),
    ),
    Rule(
        "REMOTE_CODE",
        "the checkpoint needs Python code that it ships",
        "read that code, then set model.trust_remote_code: true",
        _re(r"trust_remote_code=True"),
    ),
    Rule(
        "NO_KERNEL_IMAGE",
        "a library holds no code for this GPU",
        "use an image whose audit lists sm_70 for every library",
        _re(r"no kernel image is available"),
    ),
    Rule(
        "DRIVER_MISMATCH",
        "driver and user-space CUDA do not fit",
        "install a driver >= 525.60.13 on the host, and no cuda-compat in the container",
        _re(r"Error 803|CUDA driver version is insufficient|forward compatibility was attempted"),
    ),
    Rule(
        "NO_CUDA_DEVICE",
        "CUDA finds no GPU in this container",
        "check the GPU reservation of the container and that /dev/nvidia-uvm exists",
        _re(r"Failed to infer device type|No CUDA GPUs are available|CUDA unknown error"),
    ),
    Rule(
        "TRITON_VOLTA_LOWERING",
        "Triton cannot compile an attention kernel for sm_70",
        "set execution.prefix_caching and execution.chunked_prefill to false",
        _re(
            r"mma -> mma layout conversion|Unsupported conversion from f16 to f16"
            r"|fp8e4nv not supported"
        ),
    ),
    Rule(
        "NO_C_COMPILER",
        "a kernel must be compiled at run time and there is no C compiler",
        "use an image with gcc and the Python headers",
        _re(r"Failed to find C compiler"),
    ),
    Rule(
        "BFLOAT16",
        "bfloat16 was asked for, which this GPU does not have",
        "let the plan choose float16",
        _re(r"Bfloat16 is only supported on GPUs"),
    ),
    Rule(
        "KV_TOO_SMALL",
        "the KV cache cannot hold one request of model.max_model_len",
        "lower model.max_model_len",
        _re(
            r"larger than the available KV cache memory"
            r"(.*estimated maximum model length is (?P<estimated_max_model_len>\d+))?"
        ),
    ),
    Rule(
        "NO_KV_MEMORY",
        "weights and activations leave no memory for the KV cache",
        "lower memory.max_num_batched_tokens, turn graphs off, or use more GPUs",
        _re(r"No available memory for the cache blocks"),
    ),
    Rule(
        "GPU_BUSY",
        "somebody else holds memory of the GPU",
        "free the GPU or lower memory.gpu_memory_utilization",
        _re(
            r"Free memory on device .*\((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\) "
            r"on startup is less than desired"
        ),
    ),
    Rule(
        "GRAPH_OOM",
        "memory ran out while CUDA graphs were captured",
        "set execution.enforce_eager: true or lower memory.gpu_memory_utilization",
        _re(OUT_OF_MEMORY),
        after=_re(r"Capturing"),
    ),
    Rule(
        "CUDA_OOM",
        "GPU memory ran out",
        "lower memory.gpu_memory_utilization, then model.max_model_len, then "
        "memory.max_num_batched_tokens",
        _re(OUT_OF_MEMORY),
    ),
    Rule(
        "GRAPH_CAPTURE",
        "capturing CUDA graphs failed",
        "set execution.enforce_eager: true",
        _re(
            r"operation not permitted when stream is capturing|cudaErrorStreamCapture"
            r"|CUDAGraph.*failed"
        ),
    ),
    Rule(
        "HOST_OOM",
        "the host or the container's limit ran out of memory; GPU memory is not the cause",
        "raise the container's memory limit or free host memory",
        _re(r"DefaultCPUAllocator: can't allocate memory|MemoryError|Cannot allocate memory"),
    ),
    Rule(
        "SHM_TOO_SMALL",
        _SHM_SMALL,
        "set memory.shm_size to 16GiB and recreate the container with `appliance up`",
        _re(
            r"Insufficient space in /dev/shm: (?P<required_mib>\d+) MiB\s+required, "
            r"(?P<free_mib>\d+) MiB free"
            r"|Bus error|unable to (open|allocate) shared memory"
            r"|No space left on device.*/dev/shm|/dev/shm.*No space left"
        ),
    ),
    Rule(
        "DISK_FULL",
        "a file system is full",
        "free space on the cache or state volume",
        _re(r"No space left on device"),
    ),
    Rule(
        "CHECKPOINT_CORRUPT",
        "a checkpoint file is not whole",
        "run `appliance model verify` and fetch the file again",
        _re(r"SafetensorError|HeaderTooLarge|InvalidHeaderDeserialization|incomplete metadata"),
    ),
    Rule(
        "NCCL",
        "the GPUs cannot talk to each other",
        "run `appliance gate`; set gate.p2p.policy: off to start without peer access",
        _re(r"NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError"),
    ),
    Rule(
        "DEVICE_ASSERT",
        "a kernel found an index out of range",
        "verify the checkpoint with `appliance model verify`; report the log if it is whole",
        _re(r"device-side assert triggered"),
    ),
    Rule(
        "ILLEGAL_ACCESS",
        "a kernel touched memory that is not its own",
        "start with execution.enforce_eager: true; report the log",
        _re(r"illegal memory access"),
    ),
    Rule(
        "LAUNCH_FAILURE",
        "a kernel died on the GPU",
        "read the kernel log for an Xid and run `appliance gate`",
        _re(r"unspecified launch failure"),
    ),
    Rule(
        "ENGINE_PORT",
        "the API port was taken while the engine loaded",
        "find the other listener (`ss -ltnp`) or set server.port",
        _re(r"[Aa]ddress already in use"),
    ),
    Rule(
        "PERMISSION",
        "the engine may not read or write a file",
        "give the container's user access to the checkpoint and the cache directories",
        _re(r"PermissionError|Permission denied"),
    ),
    Rule(
        "SHM_TOO_SMALL",
        "the engine died of SIGBUS, which is what a full /dev/shm does",
        "set memory.shm_size to 16GiB and recreate the container with `appliance up`",
        None,
        returncodes=frozenset({-7, 135}),
    ),
    Rule(
        "NCCL_SEGFAULT",
        "the engine died of SIGSEGV while the GPUs were being connected",
        "try gate.p2p.policy: off, then NCCL_CUMEM_ENABLE=0, then another NCCL",
        _re(r"NCCL|ncclCommInitRank|pynccl"),
        returncodes=frozenset({-11, 139}),
    ),
    Rule(
        "WORKER_DEAD",
        "a process of the engine died",
        "read the lines before its death; `dmesg` tells whether the kernel killed it",
        _re(r"died unexpectedly|EngineDeadError|[Ww]orker.*exit code"),
    ),
)

BROADCAST_WAIT = _re(r"No available shared memory broadcast block")
CAPTURE_MARK = _re(r"Capturing CUDA graph")
GENERIC = _re(r"Engine core initialization failed|EngineDeadError|See root cause above")
NOISE = _re(
    r'resource_tracker|"(?:GET|POST|HEAD|PUT|DELETE|OPTIONS) \S+ HTTP/|^\s*warnings\.warn\('
    r"|Avg prompt throughput|destroy_process_group"
)
EXCEPTION = _re(r"(?:^|[\s\]])(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Fault): .+)$")
