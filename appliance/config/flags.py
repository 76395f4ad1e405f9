"""The flags of the pinned vLLM: which exist, which another key owns, which cannot be had here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

VLLM_VERSION = "0.27.1"

OWNED: Mapping[str, str] = {
    "additional-config": "execution.weights",
    "api-key": "server.api_keys_file",
    "attention-backend": "the plan, by the GPU's architecture",
    "attention-config": "the plan, by the GPU's architecture",
    "block-size": "execution.block_size",
    "chat-template": "model.chat_template",
    "compilation-config": "execution.enforce_eager",
    "cudagraph-capture-sizes": "execution.enforce_eager",
    "device-ids": "parallel.gpus",
    "disable-access-log-for-endpoints": "logging.level",
    "disable-custom-all-reduce": "execution.custom_all_reduce",
    "disable-log-stats": "runtime.stall, which reads the statistics",
    "distributed-executor-backend": "parallel.mode",
    "dtype": "execution.device: float16 on a GPU, float32 on the CPU engine",
    "enable-chunked-prefill": "execution.chunked_prefill",
    "enable-prefix-caching": "execution.prefix_caching",
    "enforce-eager": "execution.enforce_eager",
    "gpu-memory-utilization": "memory.gpu_memory_utilization",
    "host": "server.host",
    "ir-op-priority": "execution.device",
    "kernel-config": "execution.device",
    "kv-cache-dtype": "memory.kv_cache_dtype",
    "kv-cache-memory-bytes": "memory.kv_cache_size",
    "load-format": "model.format: only safetensors are loaded",
    "log-config-file": "logging.format",
    "max-cudagraph-capture-size": "execution.enforce_eager",
    "mamba-ssm-cache-dtype": "the plan, which counts four bytes of recurrent state",
    "max-model-len": "model.max_model_len",
    "max-num-batched-tokens": "memory.max_num_batched_tokens",
    "max-num-seqs": "memory.max_num_seqs",
    "middleware": "server.limits",
    "model": "model.path",
    "optimization-level": "execution.enforce_eager",
    "pipeline-parallel-size": "parallel.mode",
    "port": "server.port",
    "quantization": "model.format",
    "quantization-config": "model.format",
    "served-model-name": "model.served_name",
    "shutdown-timeout": "server.drain_timeout",
    "tensor-parallel-size": "parallel.mode",
    "tokenizer": "model.path",
    "trust-remote-code": "model.trust_remote_code",
    "uvicorn-log-level": "logging.level",
}
"""Flag to the key of the configuration that decides it."""

_HUB = "the checkpoint is a local directory and nothing is downloaded"
_ONE_SERVER = "the appliance runs one API server on one machine"
_BUDGET = "the memory plan has no share for it"
_TEXT = "the appliance serves text only"

UNSUPPORTED: Mapping[str, str] = {
    "api-server-count": _ONE_SERVER,
    "code-revision": _HUB,
    "config": "appliance.yaml is the only configuration file",
    "cpu-offload-gb": _BUDGET,
    "data-parallel-size": _ONE_SERVER,
    "decode-context-parallel-size": _BUDGET,
    "download-dir": _HUB,
    "enable-lora": _BUDGET,
    "grpc": "probes and clients speak HTTP",
    "headless": _ONE_SERVER,
    "hf-token": _HUB,
    "kv-offloading-size": _BUDGET,
    "language-model-only": _TEXT,
    "limit-mm-per-prompt": _TEXT,
    "lora-modules": _BUDGET,
    "master-addr": _ONE_SERVER,
    "master-port": _ONE_SERVER,
    "mm-encoder-only": _TEXT,
    "nnodes": _ONE_SERVER,
    "node-rank": _ONE_SERVER,
    "num-gpu-blocks-override": _BUDGET,
    "prefill-context-parallel-size": _BUDGET,
    "revision": _HUB,
    "spec-method": _BUDGET,
    "spec-model": _BUDGET,
    "spec-tokens": _BUDGET,
    "speculative-config": _BUDGET,
    "ssl-ca-certs": "TLS ends in front of the appliance",
    "ssl-certfile": "TLS ends in front of the appliance",
    "ssl-keyfile": "TLS ends in front of the appliance",
    "tokenizer-revision": _HUB,
    "uds": "probes and clients speak TCP",
}
"""Flag to the reason why it cannot be set here."""

GONE: Mapping[str, str] = {
    "chunked-prefill-size": "no vLLM has it; the step is memory.max_num_batched_tokens",
    "cuda-graph-sizes": "0.27.1 calls it cudagraph-capture-sizes, which the plan decides",
    "disable-log-requests": "request logging is off unless enable-log-requests is set",
    "guided-decoding-backend": "0.27.1 takes structured-outputs-config",
    "max-seq-len-to-capture": "graphs are captured by batch size only",
    "preemption-mode": "preempted requests are computed again",
    "swap-space": "vLLM 0.27.1 does not swap; lower memory.max_num_seqs or model.max_model_len",
}
"""Flags of other vLLM versions that operators carry over, and what to do instead."""


@dataclass(frozen=True)
class Flag:
    """One flag of vLLM.

    Attributes:
        name: Without dashes, words joined by `-`.
        kind: `switch` is there or not, `toggle` also has a `no-` form, `value` takes one value.
        type: `int` or `float` where the parser converts, else empty.
        choices: Allowed values, empty if any.
    """

    name: str
    kind: Literal["switch", "toggle", "value"]
    type: str = ""
    choices: tuple[str, ...] = ()


@cache
def known_flags() -> Mapping[str, Flag]:
    """Return the flags of the pinned vLLM, read from vllm_flags.json."""
    text = files("appliance.config").joinpath("vllm_flags.json").read_text(encoding="utf-8")
    rows = json.loads(text)["flags"]
    return {
        name: Flag(name, row["kind"], row.get("type", ""), tuple(row.get("choices", ())))
        for name, row in rows.items()
    }


def flag_name(key: str) -> str:
    """Return the flag a key of `execution.extra_args` means: `max_logprobs` is `max-logprobs`."""
    return key.replace("_", "-")
