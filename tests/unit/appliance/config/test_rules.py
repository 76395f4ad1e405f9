"""Rules across keys: each broken once, and its nearest unbroken neighbour."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.config.load import LoadedConfig
from appliance.errors import Fault

OnlyFault = Callable[..., Fault]
Load = Callable[..., LoadedConfig]

OVERRIDE = "{{check: a, gpu: g, reason: long enough, by: b, until: {day}, bound: 1}}"


@pytest.mark.parametrize(
    ("text", "code", "key"),
    [
        ("server: {host: 0.0.0.0}", "API_WITHOUT_KEYS", "server.host"),
        ("server: {host: '::'}", "API_WITHOUT_KEYS", "server.host"),
        ("server: {host: 192.168.1.5}", "API_WITHOUT_KEYS", "server.host"),
        ("server: {admin_port: 8000}", "PORTS_EQUAL", "server.admin_port"),
        ("memory: {max_num_batched_tokens: 64, max_num_seqs: 65}", "CONFIG_CONFLICT",
         "memory.max_num_batched_tokens"),
        ("execution: {chunked_prefill: false}\nmodel: {path: /m, max_model_len: 2049}",
         "CONFIG_CONFLICT", "memory.max_num_batched_tokens"),
        ("parallel: {gpus: []}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("parallel: {mode: single, gpus: [0, 1]}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("parallel: {mode: tensor, gpus: [0]}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("parallel: {mode: pipeline, gpus: [GPU-1234]}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("parallel: {gpus: [1, 1]}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("parallel: {cpu_ranks: 2}", "CONFIG_CONFLICT", "parallel.cpu_ranks"),
        ("memory: {kv_cache_size: 2GiB}", "CONFIG_CONFLICT", "memory.kv_cache_size"),
        ("execution: {device: cpu}\nmemory: {gpu_memory_utilization: 0.5}", "CONFIG_CONFLICT",
         "memory.gpu_memory_utilization"),
        ("execution: {device: cpu}\nparallel: {gpus: [0]}", "CONFIG_CONFLICT", "parallel.gpus"),
        ("execution: {device: cpu, custom_all_reduce: true}", "CONFIG_CONFLICT",
         "execution.custom_all_reduce"),
        ("execution: {device: cpu}\nparallel: {mode: pipeline, cpu_ranks: 2}", "CONFIG_CONFLICT",
         "parallel.mode"),
        ("execution: {device: cpu}\nparallel: {mode: single, cpu_ranks: 2}", "CONFIG_CONFLICT",
         "parallel.mode"),
        ("execution: {device: cpu}\nparallel: {mode: tensor}", "CONFIG_CONFLICT", "parallel.mode"),
        ("execution: {device: cpu}\nmemory: {kv_cache_size: 1536MiB}", "CONFIG_CONFLICT",
         "memory.kv_cache_size"),
        ("execution: {device: cpu}\nparallel: {cpu_ranks: 2}\nmemory: {kv_cache_size: 3GiB}",
         "CONFIG_CONFLICT", "memory.kv_cache_size"),
        ("gate: {ecc: {retired_pages_warn: 61}}", "CONFIG_CONFLICT",
         "gate.ecc.retired_pages_warn"),
        ("gate: {pcie: {tensor_rate_fail: 15.5}}", "CONFIG_CONFLICT",
         "gate.pcie.tensor_rate_fail"),
        ("gate: {pcie: {pipeline_rate_fail: 8}}", "CONFIG_CONFLICT",
         "gate.pcie.pipeline_rate_fail"),
        ("gate: {thermal: {gpu_warn_c: 88}}", "CONFIG_CONFLICT", "gate.thermal.gpu_warn_c"),
        ("runtime: {thermal: {leave_gpu_c: 83}}", "CONFIG_CONFLICT",
         "runtime.thermal.leave_gpu_c"),
        ("runtime: {thermal: {leave_hbm_margin_c: 7}}", "CONFIG_CONFLICT",
         "gate.thermal.hbm_margin_warn_c"),
        ("gate: {timeout: 2s}", "CONFIG_CONFLICT", "gate.gpu_timeout"),
        (f"gate: {{overrides: [{OVERRIDE.format(day='2026-12-30')}]}}", "OVERRIDE_TOO_LONG",
         "gate.overrides[0].until"),
    ],
)  # fmt: skip
def test_rule_broken_is_one_fault_at_its_key(
    only_fault: OnlyFault, text: str, code: str, key: str
) -> None:
    base = "version: 1\n" if "model:" in text else "version: 1\nmodel: {path: /m}\n"

    fault = only_fault(f"{text}\n", base=base)

    assert (fault.code, fault.where.split()[1]) == (code, key)
    assert fault.fix


@pytest.mark.parametrize(
    "text",
    [
        "server: {host: 0.0.0.0, api_keys_file: /k}",
        "server: {host: 127.8.0.1}",
        "server: {host: '::1'}",
        "server: {host: localhost}",
        "memory: {max_num_batched_tokens: 64, max_num_seqs: 64}",
        "execution: {chunked_prefill: false}\nmodel: {path: /m, max_model_len: 2048}",
        "execution: {chunked_prefill: false}",
        "parallel: {mode: tensor, gpus: [0, 1]}",
        "parallel: {mode: single, gpus: [1]}",
        "execution: {device: cpu}\nparallel: {mode: tensor, cpu_ranks: 2}",
        "execution: {device: cpu}\nparallel: {cpu_ranks: 2}\nmemory: {kv_cache_size: 4GiB}",
        "gate: {ecc: {retired_pages_warn: 60}}",
        f"gate: {{overrides: [{OVERRIDE.format(day='2026-12-29')}]}}",
        f"gate: {{overrides: [{OVERRIDE.format(day='2020-01-01')}]}}",
    ],
)
def test_rule_kept_is_no_fault(load: Load, text: str) -> None:
    base = "version: 1\n" if "model:" in text else "version: 1\nmodel: {path: /m}\n"

    assert load(f"{text}\n", base=base).config.version == 1
