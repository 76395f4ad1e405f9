"""Runs in the gpu image: compiles every Triton kernel that serving runs, for sm_70, into FOLDER.

The image's own Triton and ptxas, and the kernels of its own patched vLLM. No GPU is needed: Triton
is told that there is one, or vLLM would put stand-ins in the kernels' places. What a launch would
specialize on is written by hand: pointers and the listed integers are multiples of 16.
"""

import json
import sys
from pathlib import Path

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

backends["nvidia"].driver.is_active = staticmethod(lambda: True)

from vllm.v1.sample.ops import topk_topp_triton  # noqa: E402
from vllm.v1.worker.block_table import _compute_slot_mapping_kernel  # noqa: E402
from vllm.v1.worker.utils import _zero_kv_blocks_kernel  # noqa: E402

_topk_topp_kernel = topk_topp_triton._topk_topp_kernel
VOLTA = GPUTarget("cuda", 70, 32)
VOCABULARY = 20_000
SAMPLER = {
    "LOGITS": "*fp32",
    "LOGITS_STRIDE_0": "i32",
    "BUFFER": "*fp32",
    "PERCENTILE_TO_STD_TABLE": "*fp32",
    "NORMAL_CDF_TO_SIGMA_TABLE": "*fp32",
    "K": "*i32",
    "P": "*fp32",
    "BATCH_SIZE": "i32",
}
SLOTS = {
    "num_tokens": "i32",
    "max_num_tokens": "i32",
    "query_start_loc_ptr": "*i32",
    "positions_ptr": "*i64",
    "block_table_ptr": "*i32",
    "block_table_stride": "i32",
    "block_size": "i32",
    "slot_mapping_ptr": "*i64",
}
ZEROS = {
    "seg_addrs_ptr": "*i64",
    "seg_page_sizes_ptr": "*i64",
    "block_ids_ptr": "*i64",
    "n_blocks": "i32",
}


def sampler(top_k: bool, top_p: bool) -> dict[str, object]:
    """Constants of one of the sampler's three programs."""
    sizes = {"VOCAB_SIZE": VOCABULARY, "BLOCK_SIZE": 8192, "BLOCK_SIZE_TRUNC": 4096}
    return sizes | {"MASK_VALUE": float("-inf"), "TOPK_ENABLED": top_k, "TOPP_ENABLED": top_p}


PROGRAMS = {
    "top_k": (_topk_topp_kernel, SAMPLER, sampler(True, False)),
    "top_p": (_topk_topp_kernel, SAMPLER, sampler(False, True)),
    "top_k and top_p": (_topk_topp_kernel, SAMPLER, sampler(True, True)),
    "slots": (
        _compute_slot_mapping_kernel,
        SLOTS,
        {
            "KV_CACHE_BLOCK_SIZE": 16,
            "BLOCKS_PER_KV_BLOCK": 1,
            "TOTAL_CP_WORLD_SIZE": 1,
            "TOTAL_CP_RANK": 0,
            "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
            "PAD_ID": -1,
            "BLOCK_SIZE": 1024,
        },
    ),
    "zeros": (_zero_kv_blocks_kernel, ZEROS, {"N_SEGS": 2, "MAX_CHUNKS": 3, "BLOCK_SIZE": 1024}),
}
UNALIGNED = {"BATCH_SIZE", "num_tokens", "max_num_tokens", "n_blocks"}
"""Integers that vLLM keeps Triton from specializing on; all others are multiples of 16."""


def compiled(kernel: object, arguments: dict[str, str], constants: dict[str, object]) -> object:
    """One program for sm_70; Triton takes a signature by the order of its names."""
    names = list(kernel.arg_names)
    signature = {name: arguments.get(name, "constexpr") for name in names}
    aligned = [at for at, name in enumerate(names) if name in arguments and name not in UNALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    return triton.compile(source, target=VOLTA)


def main() -> None:
    """Write each program's cubin and what a launch needs to know."""
    folder, known = Path(sys.argv[1]), {}
    for name, (kernel, arguments, constants) in PROGRAMS.items():
        program = compiled(kernel, arguments, constants)
        (folder / f"{name}.cubin").write_bytes(program.asm["cubin"])
        known[name] = {
            "function": program.metadata.name,
            "threads": 32 * program.metadata.num_warps,
            "shared": program.metadata.shared,
            "scratch": program.metadata.global_scratch_size,
            "arguments": list(arguments.values()),
        }
    tables = [
        topk_topp_triton._PERCENTILE_TO_STD_TABLE,
        topk_topp_triton._NORMAL_CDF_TO_SIGMA_TABLE,
    ]
    (folder / "programs.json").write_text(json.dumps({"programs": known, "tables": tables}))


if __name__ == "__main__":
    main()
