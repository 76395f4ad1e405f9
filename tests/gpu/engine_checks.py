"""The plugin's operations on a GPU against the same ones on host memory: `engine_checks.py RESULT`.

Needs both libraries. Each check compares one operation, over shapes that the engine uses, and
captures it into a graph whose replay must give the same bits.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_delta  # beside this file, whose folder is in sys.path
import torch

from appliance.nvfp4 import abi
from appliance.vllm_plugin import engine_ops, kernel_ops, paged, resident

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
LINEAR, GATE_UP = abi.WeightKind.LINEAR, abi.WeightKind.GATE_UP


def maker() -> Callable[..., Any]:
    """The unit tests' maker of random canonical weights."""
    path = REPOSITORY / "tests" / "unit" / "appliance" / "vllm_plugin" / "conftest.py"
    spec = importlib.util.spec_from_file_location("random_weights", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.make


def halves(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def on_gpu(packed: Any) -> Any:
    """The same canonical tensors in GPU memory."""
    fields = {name: getattr(packed, name).cuda() for name in ("codes", "scales", "globals")}
    return type(packed)(**fields, divisor=packed.divisor, parts=packed.parts)


def captured(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run once, capture, replay, and return what the replay wrote."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = function()
    graph.replay()
    torch.cuda.synchronize()
    return out.clone()


def far(found: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference, in units of the largest value."""
    right = right.double()
    difference = (found.cpu().double() - right).abs().max()
    return float(difference / right.abs().max().clamp(min=1e-6))


def check_linear() -> dict[str, float]:
    make, worst = maker(), {}
    shapes = [(192, 256, 1), (500, 256, 7), (1024, 576, 16), (960, 576, 48), (576, 1536, 300)]
    for rows, columns, m in [*shapes, (1152, 2048, 700), (64, 48, 2048)]:
        for divisor in (False, True):
            case = make(rows, columns, divisor=divisor)
            x, bias = halves(m, columns), halves(rows, seed=1)
            weight = resident.pack(on_gpu(case.packed), LINEAR)
            moved, shift = x.cuda(), bias.cuda()

            def product(x: Any = moved, w: Any = weight, b: Any = shift) -> torch.Tensor:
                return kernel_ops.linear(x, w, b)

            plain = product()
            right = x.double() @ case.values.T + bias.double()
            worst[f"{rows}x{columns} m={m} divisor={divisor}"] = far(plain, right)
            assert torch.equal(plain, captured(product)), "the graph gave other bits"
            dense = resident.decode(on_gpu(case.packed), torch.float16)
            assert torch.equal(dense.cpu(), case.values.float().half()), "decoded weights differ"
    return worst


def check_experts() -> dict[str, float]:
    make, worst = maker(), {}
    hidden, width, count, top_k = 256, 128, 8, 2
    first = make(2 * width * count, hidden)
    second = make(hidden * count, width, seed=3)
    packs = []
    for case, kind in ((first, GATE_UP), (second, LINEAR)):
        rows = case.packed.codes.shape[0] // count
        parts = tuple((f"expert {e}", rows) for e in range(count))
        whole = type(case.packed)(
            case.packed.codes, case.packed.scales, case.packed.globals, False, parts
        )
        packs.append((resident.pack(on_gpu(whole), kind, count), resident.pack(whole, kind, count)))
    for m in (1, 5, 16, 64, 700):
        x = halves(m, hidden) / 8
        picks = torch.Generator().manual_seed(m)
        logits = torch.randn(m, count, generator=picks).half()
        routed = []
        for device in (CUDA, torch.device("cpu")):
            weights = torch.empty(m, top_k, device=device)
            ids = torch.empty(m, top_k, dtype=torch.int32, device=device)
            rows_at = torch.empty(0, device=device)
            engine_ops.topk_softmax(weights, ids, rows_at, logits.to(device), True, None, None)
            routed.append((weights, ids))
        assert torch.equal(routed[0][1].cpu(), routed[1][1]), "other experts were chosen"

        given = (x.cuda(), x)

        def product(side: int = 0, given: Any = given, routed: Any = routed) -> torch.Tensor:
            weights, ids = routed[side]
            gate_up, down = packs[0][side], packs[1][side]
            return kernel_ops.experts(
                given[side], gate_up, down, weights=weights, ids=ids, expert_map=None
            )

        plain = product()
        worst[f"m={m}"] = far(plain, product(1))
        assert torch.equal(plain, captured(product)), "the graph gave other bits"
    return worst


def both(function: Callable[..., Any], *tensors: Any, written: tuple[int, ...]) -> float:
    """Run an operation on both devices and compare what it wrote."""
    given = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
    moved = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]
    function(*given)
    function(*moved)
    return max(far(moved[at], given[at]) for at in written)


def check_small() -> dict[str, float]:
    x, residual, weight = halves(33, 576), halves(33, 576, seed=1), halves(576, seed=2)
    query, key = halves(33, 9 * 64), halves(33, 3 * 64, seed=1)
    cache = torch.randn(128, 64).half()
    places = torch.arange(33) * 3
    keys, slots = halves(33, 3, 64), torch.arange(33) + 5
    blocks = torch.zeros(4, 16, 3, 128).half()
    return {
        "rms_norm": both(engine_ops.rms_norm, torch.empty_like(x), x, weight, 1e-6, written=(0,)),
        "fused_add_rms_norm": both(
            engine_ops.fused_add_rms_norm, x, residual, weight, 1e-6, written=(0, 1)
        ),
        "silu_and_mul": both(engine_ops.silu_and_mul, torch.empty(33, 288).half(), x, written=(0,)),
        "rotary_embedding": both(
            engine_ops.rotary_embedding, places, query, key, 64, cache, True, written=(1, 2)
        ),
        "reshape_and_cache_flash": both(
            lambda k, v, c, s: engine_ops.reshape_and_cache_flash(
                k, v, *c.split(64, dim=-1), s, "auto", k, v
            ),
            *(keys, keys + 1, blocks, slots),
            written=(2,),
        ),
    }


def filled(heads: paged.Heads, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """A cache that is NaN but for the keys of each sequence, its block table, and those keys."""
    counts = [-(-length // 16) for length in lengths]
    width, total = max(counts), sum(counts) + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).int()
    table = torch.full((len(lengths), width), total + 7, dtype=torch.int32)
    shape = (total, 16, heads.keys, 2 * heads.size)
    kv_cache = torch.full(shape, torch.nan, device=CUDA).half().permute(0, 2, 1, 3)
    kept, begin = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[begin : begin + count]
        begin += count
        both = halves(2, length, heads.keys, heads.size, seed=length + row).cuda()
        places = torch.arange(length)
        slots = table[row, places // 16].long() * 16 + places % 16
        paged.write(heads, both[0], both[1], kv_cache, slots.cuda())
        kept.append(both)
    return kv_cache, table.cuda(), kept


def right_rows(heads: paged.Heads, rows: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows of one sequence in FP64."""
    keys, values = (t.double().repeat_interleave(heads.queries // heads.keys, 1) for t in both)
    scores = torch.einsum("qhd,khd->hqk", rows.double(), keys) * heads.scale
    places = torch.arange(keys.shape[0] - rows.shape[0], keys.shape[0], device=CUDA)[:, None]
    others = torch.arange(keys.shape[0], device=CUDA)[None]
    hidden = others > places
    if heads.window:
        hidden |= others <= places - heads.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def step_of(lengths: list[int], fresh: list[int], table: torch.Tensor, decodes: int) -> paged.Step:
    return paged.Step(
        tokens=sum(fresh),
        decodes=decodes,
        decode_length=1,
        max_length=max(lengths),
        query_start=torch.tensor([0, *fresh]).cumsum(0).int().cuda(),
        lengths=torch.tensor(lengths).int().cuda(),
        block_table=table,
        slots=torch.empty(0, dtype=torch.int64, device=CUDA),
    )


def check_attention() -> dict[str, float]:
    worst = {}
    batches = [
        ("decode", [1, 33_000, 17, 512], [1, 1, 1, 1], 4),
        ("mixed", [700, 31, 600, 33], [1, 1, 200, 33], 2),
        ("prompt", [2100], [2100], 0),
    ]
    sizes = [(8, 8, 64), (9, 3, 64), (40, 8, 128), (16, 1, 128), (16, 2, 256), (4, 4, 256)]
    for queries, keys, size in sizes:
        for name, lengths, fresh, decodes in batches:
            for window in (0, 100):
                heads = paged.Heads(queries, keys, size, size**-0.5, window)
                kv_cache, table, kept = filled(heads, lengths)
                query = halves(sum(fresh), queries + 2 * keys, size).cuda()[:, :queries]
                out = torch.full((sum(fresh), queries, size), torch.nan, device=CUDA).half()
                step = step_of(lengths, fresh, table, decodes)
                paged.attend(heads, query, kv_cache, step, out)
                rows = query.split(fresh)
                right = [right_rows(heads, r, both) for r, both in zip(rows, kept, strict=True)]
                label = f"{name} {queries}/{keys} heads of {size} window {window}"
                worst[label] = far(out, torch.cat(right).cpu())
                if name == "decode":
                    replayed = replay_longer(heads, query, kv_cache, step)
                    assert far(replayed, out.cpu()) <= LIMITS["attention"], f"replay of {label}"
    return worst


def replay_longer(
    heads: paged.Heads, query: torch.Tensor, kv_cache: torch.Tensor, step: paged.Step
) -> torch.Tensor:
    """Capture with sequences of one key for any length, then replay with the real lengths."""
    real, step.max_length = step.lengths.clone(), 40_960
    step.lengths.fill_(1)
    out = torch.full(query.shape, torch.nan, device=CUDA).half()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        paged.attend(heads, query, kv_cache, step, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        paged.attend(heads, query, kv_cache, step, out)
    step.lengths.copy_(real)
    graph.replay()
    torch.cuda.synchronize()
    return out


LIMITS = {"attention": 2e-3, "linear": 2e-3, "experts": 4e-3, "small": 2e-3, "delta": 5e-3}


def main() -> None:
    """Run every check and write the largest differences, or where one failed."""
    result: dict[str, Any] = {}
    for name, check in (
        ("small", check_small),
        ("linear", check_linear),
        ("experts", check_experts),
        ("attention", check_attention),
        ("delta", engine_delta.check),
    ):
        try:
            found = check()
            bad = {case: value for case, value in found.items() if not value <= LIMITS[name]}
            result[name] = {"largest": max(found.values()), "cases": len(found), "bad": bad}
        except Exception:  # noqa: BLE001 - the reason is the result
            result[name] = {"bad": traceback.format_exc()[-2000:]}
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
