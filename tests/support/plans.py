"""A plan made by hand, for parts that only read one."""

from __future__ import annotations

from appliance.plan.launch_plan import (
    ExecutionPlan,
    LaunchPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    RunPlan,
    ServerPlan,
)

TWO_GPUS = ("GPU-aaaa", "GPU-bbbb")


def make_plan() -> LaunchPlan:
    """A tensor-parallel plan for two V100s with everything on."""
    return LaunchPlan(
        config_path="/etc/appliance/appliance.yaml",
        config_sha256="0" * 64,
        model=ModelPlan(
            path="/models/quasar",
            served_name="quasar",
            format="nvfp4",
            producer="modelopt",
            quantization="nvfp4",
            architecture="Qwen3ForCausalLM",
            max_model_len=8192,
            trust_remote_code=False,
            chat_template=None,
            integrity="size",
            digest="1" * 64,
        ),
        parallel=ParallelPlan("tensor", 2, 1, TWO_GPUS, (0, 1)),
        memory=MemoryPlan(
            gpu_memory_utilization=0.92,
            shm_bytes=16 * 1024**3,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            kv_cache_dtype="auto",
            kv_bytes_per_token=65536,
            kv_cache_bytes=4 * 1024**3,
            kv_capacity_tokens=65536,
            ranks=(),
        ),
        execution=ExecutionPlan(
            device="cuda",
            dtype="float16",
            weights="fused",
            enforce_eager=False,
            custom_all_reduce=False,
            chunked_prefill=True,
            prefix_caching=True,
            block_size=16,
            attention_backend="CUSTOM",
            extra_args={},
        ),
        server=ServerPlan(
            host="127.0.0.1",
            port=8000,
            admin_host="127.0.0.1",
            admin_port=9400,
            api_keys_file=None,
            max_request_bytes=4096,
            max_concurrent_requests=4,
            requests_per_minute_per_key=0,
            drain_timeout_s=60.0,
        ),
        run=RunPlan(
            startup_timeout_s=1800.0,
            canary=True,
            ladder=True,
            on_gpu_fault="drain_exit",
            stall_s=120.0,
            sample_interval_s=15.0,
            restart_count=3,
            restart_per_s=3600.0,
            log_format="json",
            log_level="info",
        ),
        gate={"state_dir": "/var/lib/appliance"},
        decisions=(),
        warnings=(),
    )
