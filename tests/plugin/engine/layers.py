"""Loads tensors into real layers of the engine, one rank, no model; prints results as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import appliance.vllm_plugin

IMPORTED_EARLY = sorted({"torch", "vllm", "numpy"} & set(sys.modules))

import torch  # noqa: E402 - after the look at what the plugin imports by itself
import vllm  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.linear import (  # noqa: E402
    WEIGHT_LOADER_V2_SUPPORTED,
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.quantization import (  # noqa: E402
    QUANTIZATION_METHODS,
    get_quantization_config,
)

from appliance.checkpoint.rules import Rules  # noqa: E402
from appliance.errors import ApplianceError  # noqa: E402
from appliance.vllm_plugin import inventory, linear  # noqa: E402
from appliance.vllm_plugin.config import Nvfp4Config  # noqa: E402
from appliance.vllm_plugin.names import NameSpace  # noqa: E402

ONE, HALF = 0x38, 0x30  # E4M3 codes of 1.0 and 0.5


def register_twice() -> dict[str, Any]:
    """Register the method twice, and once under a vLLM of another series."""
    appliance.vllm_plugin.register()
    appliance.vllm_plugin.register()
    version, vllm.__version__ = vllm.__version__, "0.10.1.1+cpu"
    refused = message_of(appliance.vllm_plugin.register)
    vllm.__version__ = version
    return {
        "imported_early": IMPORTED_EARLY,
        "methods": QUANTIZATION_METHODS.count("nvfp4"),
        "loaders": WEIGHT_LOADER_V2_SUPPORTED.count("Nvfp4LinearMethod"),
        "class": get_quantization_config("nvfp4").__name__,
        "capability": get_quantization_config("nvfp4").get_min_capability(),
        "files": get_quantization_config("nvfp4").get_config_filenames(),
        "refused": refused,
    }


def message_of(action: Callable[[], object]) -> str:
    """Return the message of the error that an action ends in."""
    try:
        action()
    except ApplianceError as error:
        return str(error)
    return "no error"


def config_for(**modules: dict[str, inventory.Found]) -> Nvfp4Config:
    """Return the method for a checkpoint of ModelOpt without metadata."""
    config = Nvfp4Config()
    config.rules = Rules("none", "nowhere", "nothing")
    config.modules = dict(modules)
    config.names = NameSpace(modules)
    return config


def found(rows: int, columns: int) -> dict[str, inventory.Found]:
    """Return the headers of one NVFP4 matrix in ModelOpt's names."""
    return {
        "weight": inventory.Found("U8", (rows, columns // 2), "f"),
        "weight_scale": inventory.Found("F8_E4M3", (rows, columns // 16), "f"),
        "weight_scale_2": inventory.Found("F32", (), "f"),
    }


def fill(rows: int, columns: int, scale: int = ONE) -> dict[str, torch.Tensor]:
    """Return a matrix of ones (times the scale) in ModelOpt's names."""
    return {
        "weight": torch.full((rows, columns // 2), 0x22, dtype=torch.uint8),
        "weight_scale": torch.full((rows, columns // 16), scale, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        "input_scale": torch.tensor(7.0),
    }


def load(layer: Any, tensors: dict[str, torch.Tensor], *shard: Any) -> None:
    """Load tensors as the models of the engine do."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)


def finish(layer: Any) -> dict[str, Any]:
    """Process a loaded layer and describe what is left of it."""
    layer.quant_method.process_weights_after_loading(layer)
    left = {name: type(p).__name__ for name, p in layer.named_parameters()}
    return {"left": left, "rows": layer.weight[:, 0].tolist(), "shape": list(layer.weight.shape)}


def merged(sizes: list[int], *headers: str) -> Any:
    """Return a fused layer whose checkpoint has the given modules."""
    modules = {name: found(sizes[0], 32) for name in headers}
    return MergedColumnParallelLinear(
        32, sizes, bias=False, quant_config=config_for(**modules), prefix="gate_up_proj"
    )


def separate_globals() -> dict[str, Any]:
    """Load two parts with globals of their own."""
    layer = merged([2, 3], "gate_proj", "up_proj")
    load(layer, fill(2, 32) | {"weight_scale_2": torch.tensor(0.25)}, 0)
    load(layer, fill(3, 32, HALF) | {"weight_scale_2": torch.tensor([4.0])}, 1)
    return finish(layer)


def fused_on_disk() -> dict[str, Any]:
    """Load one tensor for all parts: its only global belongs to each."""
    layer = merged([2, 3], "gate_up_proj")
    load(layer, fill(5, 32) | {"weight_scale_2": torch.tensor(0.25)})
    return finish(layer)


def several_parts() -> dict[str, Any]:
    """Load one tensor for the first three parts and one for the last, as hybrids store them."""
    layer = merged([2, 2, 1, 3], "gate_up_proj")
    load(layer, fill(5, 32) | {"weight_scale_2": torch.tensor(0.25)}, (0, 1, 2))
    load(layer, fill(3, 32) | {"weight_scale_2": torch.tensor(3.0)}, 3)
    return finish(layer)


def fp8_parts() -> dict[str, Any]:
    """Load FP8 parts: one tensor for three of them, scales first, and one for the last."""
    parts = {"weight": inventory.Found("F8_E4M3", (5, 32), "f")}
    parts |= {"weight_scale": inventory.Found("F32", (), "f")}
    config = config_for(gate_up_proj=parts)
    layer = MergedColumnParallelLinear(
        32, [2, 2, 1, 3], bias=False, quant_config=config, prefix="gate_up_proj"
    )
    ones = torch.ones(8, 32).to(torch.float8_e4m3fn)
    load(layer, {"weight_scale": torch.tensor(0.25), "weight": ones[:5]}, (0, 1, 2))
    by_row = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.bfloat16)
    load(layer, {"weight": ones[5:], "weight_scale": by_row, "input_scale": torch.tensor(7.0)}, 3)
    return finish(layer)


def padded_columns() -> dict[str, Any]:
    """Load a matrix of 40 columns that its producer padded to 48, and multiply with it."""
    config = config_for(proj=found(3, 48))
    layer = ReplicatedLinear(40, 3, bias=False, quant_config=config, prefix="proj")
    load(layer, fill(3, 48) | {"weight_scale_2": torch.tensor(0.5)})
    result = finish(layer)
    return result | {"product": layer(torch.ones(1, 40))[0].tolist()}


def part_twice() -> str:
    """Load the first part twice and the second never."""
    layer = merged([2, 2], "gate_proj", "up_proj")
    part = fill(2, 32) | {"weight_scale_2": torch.tensor(0.25)}
    load(layer, part, 0)
    load(layer, part, 0)
    return message_of(lambda: layer.quant_method.process_weights_after_loading(layer))


def too_large_for_fp16() -> str:
    """Load a BF16 weight beyond the range of FP16."""
    config = config_for(proj={"weight": inventory.Found("BF16", (2, 16), "f")})
    layer = ReplicatedLinear(
        16, 2, bias=False, params_dtype=torch.float16, quant_config=config, prefix="proj"
    )
    load(layer, {"weight": torch.full((2, 16), 70000.0, dtype=torch.bfloat16)})
    return message_of(lambda: layer.quant_method.process_weights_after_loading(layer))


def main() -> None:
    """Run everything and print one JSON object."""
    results: dict[str, Any] = {"register": register_twice()}
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        store = f"file://{Path(directory) / 'store'}"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1, 1)
        for case in (
            separate_globals,
            fused_on_disk,
            several_parts,
            fp8_parts,
            padded_columns,
            part_twice,
            too_large_for_fp16,
        ):
            results[case.__name__] = case()
    results["cut_block"] = message_of(lambda: linear._stored_columns("down_proj", 1856, 232))
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
