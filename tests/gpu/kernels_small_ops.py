"""Norms, activations, routing, rotation and the cache write against torch in FP64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from kernels_compare import assert_same, error_of
from kernels_device import IO_TYPES, Device

from appliance.nvfp4 import abi

if TYPE_CHECKING:
    from kernels_report import Report

TOLERANCES = {torch.float16: 1e-3, torch.float32: 2e-5}
TYPES = (torch.float16, torch.float32)


def _random(device: Device, *shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    source = device.generator(*shape, seed)
    return torch.randn(*shape, generator=source, device=device.name).to(dtype)


def _close(found: torch.Tensor, right: torch.Tensor, what: str) -> None:
    rows, wanted = found.reshape(-1, found.shape[-1]), right.reshape(-1, right.shape[-1])
    typical = wanted.pow(2).mean(dim=1, keepdim=True).sqrt()
    error = error_of(rows, wanted, typical)
    limit = TOLERANCES[found.dtype]
    assert error.worst <= limit, (
        f"{what}: norm {error.norm:.2e}, element {error.element:.2e} at {list(error.at)}"
    )


def run_norms(device: Device, report: Report, *, quick: bool) -> None:
    shapes = ((3, 64), (2, 1037)) if quick else ((1, 5120), (64, 4096), (3, 1037), (2048, 128))
    plan = [(shape, io, weight) for shape in shapes for io in TYPES for weight in TYPES]
    for (rows, hidden), io, weight_type in plan:
        for offset, has_residual in ((0.0, False), (1.0, True)):
            where = f"rms_norm {rows}x{hidden} {io} weight {weight_type} {offset} {has_residual}"
            with report.case(where):
                _check_norm(device, (rows, hidden), io, weight_type, offset)


def _check_norm(
    device: Device,
    shape: tuple[int, int],
    io: torch.dtype,
    weight_type: torch.dtype,
    offset: float,
) -> None:
    """With an offset there is a residual too."""
    rows, hidden = shape
    x = _random(device, rows, hidden + 8, seed=1, dtype=io)[:, :hidden]
    residual = _random(device, rows, hidden, seed=2, dtype=io)
    gain = _random(device, hidden, seed=3, dtype=weight_type)
    total = x.double() + (residual.double() if offset else 0)
    y = torch.full((rows, hidden), math.nan, dtype=io, device=device.name)
    device.library.rms_norm(
        abi.Norm(
            io_type=IO_TYPES[io],
            weight_type=IO_TYPES[weight_type],
            eps=1e-6,
            weight_offset=offset,
            rows=rows,
            hidden=hidden,
            weight=gain.data_ptr(),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            y=y.data_ptr(),
            y_stride=hidden,
            residual=residual.data_ptr() if offset else None,
            residual_stride=hidden,
        ),
        stream=device.stream(),
    )
    right = torch.nn.functional.rms_norm(total, (hidden,), eps=1e-6)
    _close(y, right * (gain.double() + offset), "rms_norm")
    if offset:
        assert_same(residual, total.to(io), "residual")


def run_silu_mul(device: Device, report: Report, *, quick: bool) -> None:
    shapes = ((3, 64), (2, 37)) if quick else ((1, 17408), (64, 768), (3, 37), (2048, 1408))
    for rows, width in shapes:
        for io in TYPES:
            with report.case(f"silu_mul {rows}x{width} {io}"):
                x = _random(device, rows, 2 * width, seed=4, dtype=io) * 3
                y = torch.full((rows, width), math.nan, dtype=io, device=device.name)
                device.library.silu_mul(
                    rows,
                    width,
                    io_type=IO_TYPES[io],
                    x=x.data_ptr(),
                    x_stride=2 * width,
                    y=y.data_ptr(),
                    y_stride=width,
                    stream=device.stream(),
                )
                gate, up = x.double().split(width, dim=1)
                _close(y, torch.nn.functional.silu(gate) * up, "silu_mul")


def run_routing(device: Device, report: Report, *, quick: bool) -> None:
    shapes = ((5, 128, 8), (2, 7, 7)) if quick else ((1, 128, 8), (300, 512, 10), (65, 7, 7))
    for m, experts, top_k in shapes:
        for dtype in TYPES:
            for renormalize in (False, True):
                with report.case(f"topk_softmax {m}x{experts} of {top_k} {dtype} {renormalize}"):
                    _check_routing(device, (m, experts, top_k), dtype, renormalize=renormalize)
    with report.case("topk_softmax of a NaN"):
        logits = torch.zeros(1, 9, device=device.name)
        logits[0, 4] = math.nan
        ids, weights = _route(device, logits, 2, renormalize=True)
        assert ids.tolist() == [[0, 1]], ids.tolist()
        assert bool(weights.isnan().all()), weights.tolist()


def _check_routing(
    device: Device, shape: tuple[int, int, int], dtype: torch.dtype, *, renormalize: bool
) -> None:
    m, experts, top_k = shape
    logits = _random(device, m, experts, seed=6, dtype=dtype)
    logits[:, 1] = logits[:, 0]  # a tie goes to the lower expert
    ids, weights = _route(device, logits, top_k, renormalize=renormalize)
    order = logits.double().argsort(dim=1, descending=True, stable=True)[:, :top_k]
    assert torch.equal(ids.long(), order), "other experts"
    picked = logits.double().softmax(dim=1).gather(1, order)
    _close(weights, picked / picked.sum(1, keepdim=True) if renormalize else picked, "weights")


def _route(
    device: Device, logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    m, experts = logits.shape
    ids = torch.full((m, top_k), -7, dtype=torch.int32, device=device.name)
    weights = torch.full((m, top_k), -7.0, device=device.name)
    device.library.topk_softmax(
        logits.data_ptr(),
        m,
        experts=experts,
        top_k=top_k,
        logits_type=IO_TYPES[logits.dtype],
        logits_stride=experts,
        renormalize=renormalize,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        stream=device.stream(),
    )
    return ids, weights


def run_rotary(device: Device, report: Report, *, quick: bool) -> None:
    plan = [(17, 3, 2, 16, 8)] if quick else [(17, 3, 2, 16, 8), (300, 40, 8, 128, 128)]
    plan += [] if quick else [(64, 16, 2, 256, 64)]
    for shape in plan:
        for is_neox in (False, True):
            for table_type in TYPES:
                with report.case(f"rotary {shape} neox {is_neox} table {table_type}"):
                    _check_rotary(device, shape, table_type, is_neox=is_neox)


def _check_rotary(
    device: Device, shape: tuple[int, int, int, int, int], table_type: torch.dtype, *, is_neox: bool
) -> None:
    tokens, q_heads, kv_heads, dim, turn = shape
    block_size, blocks, most = 16, -(-2 * tokens // 16), 4096
    half = torch.float16
    q = _random(device, tokens, q_heads, dim, seed=7, dtype=half)
    k = _random(device, tokens, kv_heads, dim, seed=8, dtype=half)
    v = _random(device, tokens, kv_heads, dim, seed=9, dtype=half)
    source = device.generator(tokens, 10)
    positions = torch.randint(0, most, (tokens,), generator=source, device=device.name)
    slots = torch.randperm(blocks * block_size, generator=source, device=device.name)[:tokens]
    slots[1] = -1
    angles = torch.rand(most, turn // 2, generator=source, device=device.name) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(table_type)
    caches = torch.full((2, blocks, block_size, kv_heads, dim), 9.0, device=device.name).half()
    wanted_q = _rotated(q, table[positions], is_neox=is_neox)
    wanted_k = _rotated(k, table[positions], is_neox=is_neox)
    device.library.rotary_write_kv(
        abi.Rotary(
            io_type=abi.Type.F16,
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            rotary_dim=turn,
            is_neox=int(is_neox),
            cos_sin_type=IO_TYPES[table_type],
            cos_sin=table.data_ptr(),
            max_position=most,
            positions=positions.data_ptr(),
            q=q.data_ptr(),
            q_stride=q_heads * dim,
            k=k.data_ptr(),
            k_stride=kv_heads * dim,
            v=v.data_ptr(),
            v_stride=kv_heads * dim,
            slots=slots.data_ptr(),
            k_cache=caches[0].data_ptr(),
            v_cache=caches[1].data_ptr(),
            blocks=blocks,
            block_size=block_size,
            cache_block_stride=block_size * kv_heads * dim,
            cache_token_stride=kv_heads * dim,
            cache_head_stride=dim,
        ),
        stream=device.stream(),
    )
    _close(q, wanted_q, "q")
    _close(k, wanted_k, "k")
    flat = caches.view(2, -1, kv_heads, dim)
    written = slots >= 0
    assert_same(flat[0][slots[written]], k[written], "k cache")
    assert_same(flat[1][slots[written]], v[written], "v cache")
    others = torch.ones(flat.shape[1], dtype=torch.bool, device=device.name)
    others[slots[written]] = False
    assert bool((flat[:, others] == 9.0).all()), "a slot of nobody was written"


def _rotated(rows: torch.Tensor, turns: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    half = turns.shape[1] // 2
    first = torch.arange(half, device=rows.device) * (1 if is_neox else 2)
    second = first + half if is_neox else first + 1
    cosine, sine = turns[:, None, :half].double(), turns[:, None, half:].double()
    right = rows.double()
    u, v = right[..., first], right[..., second]
    right[..., first], right[..., second] = u * cosine - v * sine, v * cosine + u * sine
    return right


def run_small_ops(device: Device, report: Report, *, quick: bool) -> None:
    run_norms(device, report, quick=quick)
    run_silu_mul(device, report, quick=quick)
    run_routing(device, report, quick=quick)
    run_rotary(device, report, quick=quick)
