"""One right call of every function of the ABI, for tests that spoil it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gdn_calls import gdn_arguments

from appliance.nvfp4 import abi, host


class Scene:
    """One right call of every function over memory that the test owns.

    `on_host` gives memory that the library may read and write; `io_type` is that of products.
    """

    def __init__(self, on_host: Any, linear_factory: Any, io_type: abi.Type = abi.Type.F32) -> None:
        self._io_type = int(io_type)
        rng = np.random.default_rng(5)
        linear = linear_factory(rng, 7, 32)
        pairs = [linear_factory(rng, 64, 32) for _ in range(2)]
        self._packed = {
            "weight": on_host.pack(linear),
            "gate_up": on_host.pack(*pairs, kind=abi.WeightKind.GATE_UP),
            "down": on_host.pack(*pairs),
        }
        self._sources = (linear.codes, linear.scales, linear.row_globals)
        # Everything a call may write, and only that; inputs are `_floats`.
        self._written = on_host.aligned(1 << 16, fill=0x5A)
        self._floats = on_host.aligned(1 << 12)
        self._workspace = on_host.aligned(1 << 21)
        self._integers = on_host.aligned(1 << 12)
        self._report = on_host.aligned(ctypes.sizeof(abi.Report))
        self._plan = on_host.aligned(on_host.library.moe_plan_bytes(3, 2, 2))
        on_host.library.moe_plan(
            self._integers.ctypes.data,
            3,
            top_k=2,
            experts=2,
            plan=self._plan.ctypes.data,
            plan_bytes=self._plan.nbytes,
        )
        self._library = on_host.library

    def snapshot(self) -> bytes:
        buffers = (each.buffer for each in self._packed.values())
        return b"".join(array.tobytes() for array in (self._written, self._plan, *buffers))

    def handle(self, name: str) -> abi.Weight:
        return abi.Weight.from_buffer_copy(self._packed[name].handle)

    def arguments(self, name: str) -> dict[str, Any]:
        makers = {
            "weight": self._weight_calls,
            "moe": self._moe_calls,
            "ops": self._op_calls,
            "gdn": self._gdn_calls,
            "rest": self._other_calls,
        }
        for make in makers.values():
            calls = make()
            if name in calls:
                return calls[name]
        raise KeyError(name)

    def _weight_calls(self) -> dict[str, dict[str, Any]]:
        weight, report = self.handle("weight"), abi.Report.from_buffer(self._report)
        self._library.report_reset(ctypes.addressof(report))
        out = self._written.ctypes.data
        desc = abi.WeightDesc(
            kind=1, experts=1, n=7, k=32, group=16, scale_type=abi.Type.E4M3, global_kind=1
        )
        source = host.describe(*self._sources, is_divisor=False)
        size = ctypes.c_int64(0)
        return {
            "nvfp4_weight_bytes": {"desc": desc, "bytes": size},
            "nvfp4_weight_create": {
                "desc": desc,
                "buffer": out,
                "buffer_bytes": self._library.weight_bytes(desc),
                "weight": abi.Weight(),
                "stream": None,
            },
            "nvfp4_weight_check": {"weight": weight},
            "nvfp4_report_reset": {"report": report, "stream": None},
            "nvfp4_repack": {
                "weight": weight,
                "source": source,
                "expert": 0,
                "row_begin": 0,
                "report": report,
                "stream": None,
            },
            "nvfp4_report_status": {"report": report, "weight": weight},
            "nvfp4_dequantize": {
                "weight": weight,
                "expert": 0,
                "row_begin": 1,
                "rows": 6,
                "flags": 0,
                "out_type": 2,
                "out": out,
                "out_stride": 32,
                "stream": None,
            },
            "nvfp4_dequantize_source": {
                "source": source,
                "flags": 0,
                "out_type": 2,
                "out": out,
                "out_stride": 32,
            },
            "nvfp4_matmul_workspace_bytes": {"weight": weight, "m_max": 5, "bytes": size},
            "nvfp4_matmul": {
                "weight": weight,
                "io_type": self._io_type,
                "m": 3,
                "x": self._floats.ctypes.data,
                "x_stride": 32,
                "y": out,
                "y_stride": 7,
                "bias": self._floats.ctypes.data,
                "workspace": self._workspace.ctypes.data,
                "workspace_bytes": self._library.matmul_workspace_bytes(weight, 3),
                "stream": None,
            },
        }

    def _moe_calls(self) -> dict[str, dict[str, Any]]:
        gate_up, down, size = self.handle("gate_up"), self.handle("down"), ctypes.c_int64(0)
        plan, ids = self._plan.ctypes.data, self._integers.ctypes.data
        needed = [
            self._library.moe_workspace_bytes(*pair, 3, 2)
            for pair in ((gate_up, None), (None, down))
        ]
        grouped = {"plan": plan, "plan_bytes": self._plan.nbytes}
        grouped |= {"io_type": self._io_type, "m": 3, "top_k": 2}
        x = {"x": self._floats.ctypes.data, "x_stride": 32}
        weights = {"topk_weights": self._floats.ctypes.data}
        y = {"y": self._written.ctypes.data, "y_stride": 64}
        workspace = {"workspace": self._workspace.ctypes.data}
        return {
            "nvfp4_moe_plan_bytes": {"m_max": 3, "top_k": 2, "experts": 2, "bytes": size},
            "nvfp4_moe_plan": {
                "topk_ids": ids,
                "m": 3,
                "top_k": 2,
                "experts": 2,
                "expert_map": ids,
                "map_size": 2,
                "plan": plan,
                "plan_bytes": self._plan.nbytes,
                "stream": None,
            },
            "nvfp4_moe_workspace_bytes": {
                "gate_up": gate_up,
                "down": down,
                "m_max": 3,
                "top_k": 2,
                "bytes": size,
            },
            "nvfp4_moe_gate_up": {
                "weight": gate_up,
                **grouped,
                **x,
                **y,
                **workspace,
                "workspace_bytes": needed[0],
                "stream": None,
            },
            "nvfp4_moe_down": {
                "weight": down,
                **grouped,
                **x,
                **weights,
                **y,
                **workspace,
                "workspace_bytes": needed[1],
                "stream": None,
            },
        }

    def _op_calls(self) -> dict[str, dict[str, Any]]:
        x, y, integers = (
            array.ctypes.data for array in (self._floats, self._written, self._integers)
        )
        norm = abi.Norm(io_type=2, weight_type=2, eps=1e-6, rows=2, hidden=8)
        norm.weight, norm.x, norm.x_stride, norm.y, norm.y_stride = x, x, 8, y, 8
        norm.residual, norm.residual_stride = y + 4096, 8
        rotary = abi.Rotary(io_type=2, tokens=2, q_heads=2, kv_heads=1, head_dim=16, rotary_dim=8)
        rotary.is_neox, rotary.cos_sin_type, rotary.cos_sin, rotary.max_position = 1, 2, x, 4
        rotary.positions, rotary.slots = integers, integers
        rotary.q, rotary.q_stride, rotary.k, rotary.k_stride = y, 32, y + 1024, 16
        rotary.v, rotary.v_stride, rotary.k_cache, rotary.v_cache = x, 16, y + 8192, y + 16384
        rotary.blocks = rotary.block_size = 2
        rotary.cache_block_stride, rotary.cache_token_stride, rotary.cache_head_stride = 32, 16, 16
        return {
            "nvfp4_rms_norm": {"norm": norm, "stream": None},
            "nvfp4_rotary_write_kv": {"rotary": rotary, "stream": None},
            "nvfp4_silu_mul": {
                "io_type": 2,
                "rows": 2,
                "width": 8,
                "x": x,
                "x_stride": 16,
                "y": y,
                "y_stride": 8,
                "stream": None,
            },
            "nvfp4_topk_softmax": {
                "logits_type": 2,
                "m": 3,
                "experts": 4,
                "top_k": 2,
                "logits": x,
                "logits_stride": 4,
                "renormalize": 1,
                "ids": y,
                "weights": y + 1024,
                "stream": None,
            },
        }

    def _gdn_calls(self) -> dict[str, dict[str, Any]]:
        return gdn_arguments(
            self._written.ctypes.data,
            self._floats.ctypes.data,
            self._integers.ctypes.data,
            workspace=self._workspace.ctypes.data,
            library=self._library,
        )

    @staticmethod
    def _other_calls() -> dict[str, dict[str, Any]]:
        problem = abi.Problem(kind=1, m=3, n=7, k=32, experts=1, top_k=1, group=16, scale_type=3)
        return {
            "nvfp4_choose": {"problem": problem, "choice": abi.Choice()},
            "nvfp4_self_test": {"device": 0, "result": abi.SelfTestResult()},
            "nvfp4_set_threads": {"threads": 0},
        }

    def call(self, name: str, arguments: dict[str, Any]) -> int:
        # Structs go by address, so that a wrong address can take their place.
        raw = [
            ctypes.addressof(each) if isinstance(each, (ctypes.Structure, ctypes.c_int64)) else each
            for each in arguments.values()
        ]
        return int(getattr(self._library._dll, name)(*raw))

    def last_error(self) -> str:
        return self._library._dll.nvfp4_last_error().decode()


@pytest.fixture
def scene(on_host: Any, linear_factory: Any) -> Scene:
    return Scene(on_host, linear_factory)
