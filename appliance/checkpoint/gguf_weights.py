"""What an import writes of each tensor of a GGUF file: NVFP4 as it is, all else in FP16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import gguf
import numpy as np
from gguf.quants import dequantize

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.gguf_fields import count
from appliance.checkpoint.gguf_nvfp4 import BLOCK_BYTES, unpack_blocks
from appliance.checkpoint.values import check_values, scale_facts
from appliance.checkpoint.writer import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_FP16_MAX = 65504.0
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SITES = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
"""Linears that engines fuse: they are kept packed together or not at all."""

_NVFP4 = gguf.GGMLQuantizationType.NVFP4
_RESTART = "start from the model's safetensors checkpoint instead"


@dataclass(frozen=True)
class Weight:
    """One tensor of the file and what becomes of it.

    Attributes:
        tensor: As the file has it.
        module: Hugging Face name of its module.
        factor: Multiplier that a tensor beside it holds, 1 without.
        heads: Heads of a rotary projection, whose rows are in another order; 0 for others.
        is_packed: It stays NVFP4.
    """

    tensor: gguf.ReaderTensor
    module: str
    factor: float
    heads: int
    is_packed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the axis order of safetensors."""
        return tuple(int(size) for size in reversed(self.tensor.shape))

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that are written."""
        if not self.is_packed:
            return [TensorSpec(f"{self.module}.weight", "F16", self.shape)]
        rows, columns = self.shape
        return [
            TensorSpec(f"{self.module}.weight", "U8", (rows, columns // 2)),
            TensorSpec(f"{self.module}.weight_scale", "F8_E4M3", (rows, columns // 16)),
            TensorSpec(f"{self.module}.weight_scale_2", "F32", ()),
        ]

    def arrays(self, source: Path) -> dict[str, NDArray[Any]]:
        """Return the arrays of `specs` by name.

        Raises:
            ApplianceError: GGUF_TENSOR, GGUF_RANGE; E_SCALE_NEGATIVE, E_GLOBAL_INVALID or
                E_GLOBAL_DIRECTION for NVFP4.
        """
        if not self.is_packed:
            weights = _decode(source, self)
            return {f"{self.module}.weight": self._in_order(weights)}
        blocks = np.asarray(self.tensor.data, np.uint8).reshape(self.shape[0], -1, BLOCK_BYTES)
        codes, scales = unpack_blocks(blocks)
        check_values(
            self.module,
            scale_facts(scales),
            self.factor,
            scales="weight_scale",
            globals_="weight_scale_2",
            divisor=False,
        )
        return {
            f"{self.module}.weight": self._in_order(codes),
            f"{self.module}.weight_scale": self._in_order(scales),
            f"{self.module}.weight_scale_2": np.array(self.factor, np.float32),
        }

    def _in_order(self, rows: NDArray[Any]) -> NDArray[Any]:
        return _unpermute(rows, self.heads) if self.heads else rows


def plan_weights(source: Path, reader: gguf.GGUFReader) -> list[Weight]:
    """Decide what becomes of every tensor of a plain llama model.

    Raises:
        ApplianceError: GGUF_TENSOR for a name that is not known, or a shape that cannot be.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = _factors(source, tensors)
    heads = count(source, reader, "llama.attention.head_count")
    kv_heads = count(source, reader, "llama.attention.head_count_kv", heads)
    rotary = {"attn_q": heads, "attn_k": kv_heads}
    kept = {name for name, tensor in tensors.items() if tensor.tensor_type == _NVFP4}
    weights: list[Weight] = []
    for name, tensor in tensors.items():
        if name in factors.values() or name.endswith(".input_scale"):
            continue
        module, leaf = _module(source, name)
        factor = float(tensors[factors[name]].data.reshape(-1)[0]) if name in factors else 1.0
        is_packed = leaf in _LAYER_NAMES and all(other in kept for other in _site(name, leaf))
        weight = Weight(tensor, module, factor, rotary.get(leaf, 0), is_packed)
        _check_shape(source, weight)
        weights.append(weight)
    return weights


def _site(name: str, leaf: str) -> list[str]:
    """Return the tensors that an engine fuses with this one, itself included."""
    leaves = next((site for site in _SITES if leaf in site), (leaf,))
    return [name.replace(f".{leaf}.", f".{other}.") for other in leaves]


def _factors(source: Path, tensors: Mapping[str, gguf.ReaderTensor]) -> dict[str, str]:
    """Return tensor to the name of the one that holds its multiplier, in either spelling."""
    found: dict[str, str] = {}
    for name in tensors:
        stem = name.removesuffix(".weight")
        for spelling in (f"{stem}.scale", f"{name}.scale"):
            if name != stem and spelling in tensors:
                found[name] = spelling
                factor = tensors[spelling]
                is_one = factor.n_elements == 1
                if not is_one or factor.tensor_type != gguf.GGMLQuantizationType.F32:
                    value = f"{factor.tensor_type.name} {list(factor.shape)}"
                    raise _unknown(source, spelling, "one F32 number", value)
    return found


def _module(source: Path, name: str) -> tuple[str, str]:
    """Return the Hugging Face module of a tensor, and the part of its name that says which."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name].removesuffix(".weight"), name.removesuffix(".weight")
    parts = name.split(".")
    if (
        len(parts) != 4  # noqa: PLR2004 - blk.N.part.weight
        or (parts[0], parts[3]) != ("blk", "weight")
        or not (parts[1].isascii() and parts[1].isdecimal())
        or parts[2] not in _LAYER_NAMES
    ):
        value = "a name that the importer does not know"
        raise _unknown(source, name, "a tensor of a plain llama model", value)
    return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}", parts[2]


def _check_shape(source: Path, weight: Weight) -> None:
    rows = weight.shape[0] if weight.shape else 0
    wanted = 1 if weight.module.endswith("norm") else 2
    is_whole = len(weight.shape) == wanted and rows > 0 and rows % (2 * (weight.heads or 1)) == 0
    if len(weight.shape) != wanted or rows == 0 or (weight.heads and not is_whole):
        what = f"{wanted} axes, rows in pairs for {weight.heads} heads"
        raise _unknown(source, weight.tensor.name, what, str(list(weight.shape)))


def _unknown(source: Path, name: str, what: str, value: str) -> Exception:
    return refuse("GGUF_TENSOR", f"{source} {name}", what, value, _RESTART)


def _decode(source: Path, weight: Weight) -> NDArray[np.float16]:
    """Decode a GGUF tensor to FP16 in the axis order of safetensors."""
    tensor = weight.tensor
    try:
        values = cast("NDArray[np.float32]", dequantize(tensor.data, tensor.tensor_type))
    except (NotImplementedError, ValueError) as error:
        raise refuse(
            "GGUF_TENSOR",
            f"{source} {tensor.name}",
            "a type that the gguf package decodes",
            f"{tensor.tensor_type.name}: {str(error)[:80]}",
            "use a file of another type, such as Q4_1, Q8_0 or F16",
        ) from None
    if weight.factor != 1.0:
        values = (values.astype(np.float64) * np.float64(np.float32(weight.factor))).astype("f4")
    largest = float(np.max(np.abs(values), initial=0.0))
    if not largest <= _FP16_MAX:
        raise refuse(
            "GGUF_RANGE",
            f"{source} {tensor.name}",
            f"every weight is finite and within +-{_FP16_MAX:.0f}",
            str(largest),
            "the model cannot be run in FP16; use another one",
        )
    return values.reshape(tuple(int(n) for n in reversed(tensor.shape))).astype(np.float16)


def _unpermute(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """Put the rows of a rotary projection [heads * width, K] back into halves per head.

    GGUF keeps the two halves that rotate together as neighbouring rows.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
