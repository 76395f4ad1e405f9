"""Describes steps to the gated delta networks' builder; writes what it made as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from appliance.vllm_plugin.gdn_step import DeltaMetadata, DeltaMetadataBuilder

MOST = 8


def builder(cache_mode: str = "none") -> DeltaMetadataBuilder:
    """Return the builder of an engine of at most eight sequences, with blocks of 128 tokens."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=cache_mode),
        scheduler_config=SimpleNamespace(max_num_seqs=MOST),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    from vllm.v1.kv_cache_interface import MambaSpec  # noqa: PLC0415 - after the plugin's imports

    spec = MambaSpec(block_size=128, shapes=((1,),), dtypes=(torch.float32,))
    return DeltaMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def step(counts: list[int], computed: list[int], table: list[list[int]]) -> Any:
    """Return the engine's description of a step: tokens of each sequence, before, and blocks."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor(counts).int() + torch.tensor(computed).int()
    return SimpleNamespace(
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        compute_num_computed_tokens=lambda: lengths - (starts[1:] - starts[:-1]),
    )


def told(found: DeltaMetadata) -> dict[str, Any]:
    """Return what a step says."""
    return {
        "decodes": found.decodes,
        "longest": found.longest,
        "query_start": found.query_start.tolist(),
        "slots": found.slots.tolist(),
        "carried": found.carried.tolist(),
        "addresses": [found.slots.data_ptr(), found.carried.data_ptr()],
    }


def main() -> None:
    """Describe every step and write the results."""
    twice, table = builder(), [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    results = {
        "mixed": told(builder().build(0, step([1, 1, 30], [40, 0, 0], [[5, 9], [6, 9], [7, 9]]))),
        "padded": told(builder().build(0, step([1, 1, 0, 0], [40, 7, 0, 0], [[5], [6], [0], [0]]))),
        "captured": told(
            twice.build_for_cudagraph_capture(step([1, 1], [0, 0], [[0], [0]])),
        ),
        "replayed": told(twice.build(0, step([1, 1], [9, 0], [[3], [4]]))),
        "aligned": told(builder("align").build(0, step([1, 28, 128], [128, 100, 0], table))),
    }
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
