"""LaunchPlan to the command line of vLLM 0.27.1, in a stable order, each item with its origin."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from appliance.config.flags import flag_name
from appliance.plan.adjustments import NO_ADJUSTMENTS, Adjustments
from appliance.render.origin import Origins

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.plan.launch_plan import LaunchPlan

ENGINE_MODULE = "vllm.entrypoints.openai.api_server"
GATEWAY = "appliance.serve.middleware.Gateway"
QUIET_PATHS = "/health,/metrics"
"""Asked every few seconds by probes; the access log leaves them out."""

OUR_OPS = ("rms_norm", "silu_and_mul", "rotary_embedding")
"""Layers that ask vLLM's extension, which the plugin stands for; all others stay torch's."""

NORM_OPS = {name: ["vllm_c", "native"] for name in ("rms_norm", "fused_add_rms_norm")}
"""`vllm_c` is vLLM's extension, and so the plugin; a norm that it cannot take stays torch's."""

COMPILATION_NONE = 0


@dataclass(frozen=True)
class Rendered:
    """One item of the command line.

    Attributes:
        words: The words, as they are handed to the process; no shell is between.
        origin: `config KEY`, `plan KEY: reason`, `policy: reason` or `gate: measurement`.
    """

    words: tuple[str, ...]
    origin: str


def vllm_argv(plan: LaunchPlan, adjustments: Adjustments = NO_ADJUSTMENTS) -> tuple[Rendered, ...]:
    """Return the flags of the API server, without the program itself.

    Args:
        plan: What to launch.
        adjustments: What the gate adds; a flag that is there already is not repeated.
    """
    origins = Origins(plan)
    items = [
        *_model(plan, origins),
        *_parallel(plan, origins),
        *_memory(plan, origins),
        *_execution(plan, origins),
        *_server(plan, origins),
        *_extra(plan),
    ]
    present = {word for item in items for word in item.words}
    origin = origins.gate(adjustments)
    items += [Rendered((word,), origin) for word in adjustments.args if word not in present]
    return tuple(items)


def engine_command(items: tuple[Rendered, ...], python: str = sys.executable) -> tuple[str, ...]:
    """Return the whole command line that starts the API server."""
    return (python, "-m", ENGINE_MODULE, *(word for item in items for word in item.words))


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the decode batches that get a CUDA graph: up to the limit, a third of padding at most.

    Up to 8 sequences one kernel serves a batch, so powers of two are enough there.
    """
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
    return (*takewhile(lambda size: size < max_num_seqs, steps), max_num_seqs)


def _model(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    model = plan.model
    yield _item("model", model.path, origins.key("model.path"))
    yield _item("served-model-name", model.served_name, origins.key("model.served_name"))
    yield _item("load-format", "safetensors", origins.policy("no other format is loaded"))
    if model.quantization == "nvfp4":
        yield _item("quantization", "nvfp4", origins.key("model.format"))
    dtype = origins.policy("Volta has no bfloat16")
    if plan.execution.device == "cpu":
        dtype = origins.policy("the CPU engine computes in FP32")
    yield _item("dtype", plan.execution.dtype, dtype)
    yield _item("max-model-len", str(model.max_model_len), origins.key("model.max_model_len"))
    text_only = origins.policy("text only: no memory is planned for images")
    yield Rendered(("--language-model-only",), text_only)
    if model.recurrent:
        state = origins.policy("a recurrent state in FP16 drifts; the plan counts four bytes")
        yield _item("mamba-ssm-cache-dtype", "float32", state)
    if model.trust_remote_code:
        yield Rendered(("--trust-remote-code",), origins.key("model.trust_remote_code"))
    if model.chat_template is not None:
        yield _item("chat-template", model.chat_template, origins.key("model.chat_template"))


def _parallel(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    parallel, mode = plan.parallel, origins.key("parallel.mode")
    yield _item("tensor-parallel-size", str(parallel.tensor_parallel), mode)
    yield _item("pipeline-parallel-size", str(parallel.pipeline_parallel), mode)
    if parallel.ranks > 1:
        one_machine = origins.policy("ranks are processes of one machine")
        yield _item("distributed-executor-backend", "mp", one_machine)


def _memory(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    memory = plan.memory
    if plan.execution.device == "cuda":
        key = "memory.gpu_memory_utilization"
        yield _item(
            "gpu-memory-utilization", f"{memory.gpu_memory_utilization:g}", origins.key(key)
        )
    for flag, value in (
        ("max-num-seqs", str(memory.max_num_seqs)),
        ("max-num-batched-tokens", str(memory.max_num_batched_tokens)),
        ("kv-cache-dtype", memory.kv_cache_dtype),
    ):
        yield _item(flag, value, origins.key(f"memory.{flag.replace('-', '_')}"))


def _execution(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    execution = plan.execution
    yield _item("block-size", str(execution.block_size), origins.key("execution.block_size"))
    chunked, cached = execution.chunked_prefill, execution.prefix_caching
    yield _toggle("enable-chunked-prefill", chunked, origins.key("execution.chunked_prefill"))
    yield _toggle("enable-prefix-caching", cached, origins.key("execution.prefix_caching"))
    if execution.enforce_eager:
        yield Rendered(("--enforce-eager",), origins.key("execution.enforce_eager"))
    if execution.device == "cuda":
        yield from _cuda(plan, origins)
    else:
        yield from _plugin(plan, origins)


def _plugin(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    """What only the plugin reads: one object, since the flag stands once."""
    if plan.model.quantization != "nvfp4":
        return
    settings: dict[str, str] = {}
    keys: list[str] = []
    if plan.execution.device == "cuda":
        settings["weights"] = plan.execution.weights
        keys.append("execution.weights")
    if plan.model.lenient != "none":
        settings["lenient"] = plan.model.lenient
        keys.append("model.lenient")
    if settings:
        origin = "; ".join(origins.key(key) for key in keys)
        yield _item("additional-config", _json({"nvfp4": settings}), origin)


def _cuda(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    execution = plan.execution
    compilation: dict[str, object] = {
        "mode": COMPILATION_NONE,
        "custom_ops": ["none", *(f"+{name}" for name in OUR_OPS)],
    }
    if execution.enforce_eager:
        compilation["cudagraph_mode"] = "NONE"
    else:
        compilation["cudagraph_mode"] = "FULL_DECODE_ONLY"
        compilation["cudagraph_capture_sizes"] = list(capture_sizes(plan.memory.max_num_seqs))
    no_compiler = "torch.compile is off on sm_70; decode graphs follow execution.enforce_eager"
    yield _item("compilation-config", _json(compilation), origins.policy(no_compiler))
    extension = origins.policy("the plugin's operations stand for vLLM's own CUDA extension")
    yield _item("ir-op-priority", _json(NORM_OPS), extension)
    yield from _plugin(plan, origins)
    if execution.attention_backend is not None:
        # The decision names the backend, not a key of the file: none chooses it.
        origin = origins.key("execution.attention_backend").replace("config ", "plan ")
        yield _item("attention-backend", execution.attention_backend, origin)
    if not execution.custom_all_reduce:
        origin = origins.key("execution.custom_all_reduce")
        yield Rendered(("--disable-custom-all-reduce",), origin)


def _server(plan: LaunchPlan, origins: Origins) -> Iterator[Rendered]:
    yield _item("host", plan.server.listen_host, origins.key("server.host"))
    yield _item("port", str(plan.server.port), origins.key("server.port"))
    gateway = origins.policy("keys, limits and draining happen inside the API server")
    yield _item("middleware", GATEWAY, gateway)
    yield _item("uvicorn-log-level", plan.run.log_level, origins.key("logging.level"))
    quiet = origins.policy("probes do not fill the access log")
    yield _item("disable-access-log-for-endpoints", QUIET_PATHS, quiet)


def _extra(plan: LaunchPlan) -> Iterator[Rendered]:
    for name, value in plan.execution.extra_args.items():
        origin = f"config execution.extra_args.{name}"
        if isinstance(value, bool):
            yield _toggle(flag_name(name), value, origin)
        else:
            yield _item(flag_name(name), str(value), origin)


def _item(flag: str, value: str, origin: str) -> Rendered:
    """Join flag and value, so that a value beginning with a dash stays a value."""
    return Rendered((f"--{flag}={value}",), origin)


def _toggle(flag: str, on: bool, origin: str) -> Rendered:
    return Rendered((f"--{flag}" if on else f"--no-{flag}",), origin)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
