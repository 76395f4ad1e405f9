"""What each producer may write beyond the handed vectors, and how each contradiction is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.decode import open_matrix
from appliance.checkpoint.identity import identify
from appliance.checkpoint.read import summarize
from appliance.checkpoint.stored import Layout, find_stored
from appliance.checkpoint.tensors import open_tensors
from appliance.errors import ApplianceError
from appliance.nvfp4 import e4m3

Edit = Callable[[str], Any]
Codes = Callable[[Path], list[str]]

LAYER = "model.layers.0"
Q, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"


def as_quasar_16(made: Any) -> None:
    """Rename every compressed-tensors matrix to QUASAR-ST with groups of 16."""
    for name in [name for name in made.tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        parts = made.drop(module)
        words = np.ascontiguousarray(parts[name][1]).view("<i4")
        divisor = parts[f"{module}.weight_global_scale"][1].reshape(())
        made.tensors[f"{module}.qweight"] = ("I32", words)
        made.tensors[f"{module}.weight_scales"] = parts[f"{module}.weight_scale"]
        made.tensors[f"{module}.weight_scale_2"] = ("F32", np.float32(1) / divisor)
    made.config["quantization_config"] = {
        "quant_method": "nvfp4",
        "format": "quasar",
        "version": "1.0",
        "codebook": "e2m1",
        "group_size": 16,
        "ignore": ["lm_head"],
    }


def test_quasar_of_16_is_nvfp4(edit: Edit) -> None:
    made = edit("ok_ct_w4a16")
    original = {name: found.total for name, found in identify(made.write()).modules.items()}
    as_quasar_16(made)

    summary = summarize(made.write())

    assert (summary.format, summary.producer, summary.group_size) == ("nvfp4", "quasar-st", 16)
    sums = {name: found.total for name, found in identify(made.root).modules.items()}
    assert sums == pytest.approx(original, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("group_size", 128, "E_SCALE_SHAPE"),
        ("group_size", 64, "E_GROUP_SIZE"),
        ("codebook", "int4", "E_CODEBOOK"),
        ("version", "2.0", "E_VERSION"),
        ("scale_dtype", "float16", "E_SCALE_DTYPE"),
        ("ignore", ["re:(.*)*x"], "E_CONFIG"),
    ],
)
def test_quasar_profile_that_contradicts_its_tensors_is_refused(
    edit: Edit, codes: Codes, field: str, value: object, code: str
) -> None:
    made = edit("ok_ct_w4a16")
    as_quasar_16(made)
    made.quantization[field] = value

    assert codes(made.write()) == [code]


def test_quasar_without_group_size_is_told_by_its_tensors(edit: Edit) -> None:
    made = edit("ok_quasar_st_f16")
    del made.quantization["group_size"]

    assert summarize(made.write()).group_size == 128


def block_fp8(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return E4M3 codes, FP32 scales of blocks of 128 x 128, and the values they stand for."""
    generator = np.random.default_rng(rows * columns)
    codes = generator.integers(0, 0x7F, (rows, columns), dtype=np.uint8)
    blocks = (-(-rows // 128), -(-columns // 128))
    scales = generator.uniform(1e-4, 1e-3, blocks).astype(np.float32)
    spread = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    exact = e4m3.decode(codes).astype(np.float64) * spread.astype(np.float64)
    return codes, scales, exact.astype(np.float32)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("as_four", [False, True])
def test_block_fp8_part_is_decoded(edit: Edit, suffix: str, as_four: bool) -> None:
    made = edit("ok_modelopt_mixed_fp8")
    made.drop(f"{LAYER}.self_attn.o_proj")
    codes, scales, values = block_fp8(64, 64)
    stored = scales[:, None, :, None] if as_four else scales
    made.tensors[f"{LAYER}.self_attn.o_proj.weight"] = ("F8_E4M3", codes)
    made.tensors[f"{LAYER}.self_attn.o_proj.{suffix}"] = ("F32", stored)
    for block in (made.quantization, made.legacy["quantization"]):
        layers = block["quantized_layers"]
        layers[f"{LAYER}.self_attn.o_proj"] = {"quant_algo": "FP8_PB_WO"}

    assert summarize(made.write()).format == "mixed"
    found = identify(made.root).modules[f"{LAYER}.self_attn.o_proj"]
    assert (found.form, found.shape) == ("fp8", (64, 64))
    assert found.total == pytest.approx(float(values.sum(dtype=np.float64)))


def test_block_fp8_of_ragged_size_is_decoded_exactly(edit: Edit) -> None:
    codes, scales, values = block_fp8(200, 300)
    made = edit("ok_ct_w4a16")
    made.tensors = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scales)}

    with open_tensors(made.write()) as reader:
        forms = {
            name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()
        }
        [stored], _ = find_stored(forms)
        found = open_matrix(reader, stored).values()

    assert stored.layout is Layout.FP8
    np.testing.assert_array_equal(found, values)


def test_compressed_tensors_block_fp8_is_read(edit: Edit, codes: Codes) -> None:
    made = edit("ok_ct_w4a16")
    made.drop(Q)
    weight, scales, _ = block_fp8(64, 64)
    made.tensors |= {f"{Q}.weight": ("F8_E4M3", weight), f"{Q}.weight_scale": ("F32", scales)}
    for part in ("k_proj", "v_proj"):
        name = f"{LAYER}.self_attn.{part}"
        made.drop(name)
        weight, scales, _ = block_fp8(32, 64)
        made.tensors |= {
            f"{name}.weight": ("F8_E4M3", weight),
            f"{name}.weight_scale": ("F32", scales),
        }
    scheme = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    made.quantization["config_groups"]["group_1"] = {
        "targets": [r"re:.*self_attn\.[qkv]_proj$"],
        "weights": scheme,
    }

    assert codes(made.write()) == []
    scheme["block_structure"] = [64, 64]
    assert codes(made.write()) == ["E_GROUP_SIZE"]


def stacked(made: Any, *, turned: bool) -> dict[str, np.ndarray]:
    """Stack the experts of a MoE checkpoint; return what each stack stands for."""
    values: dict[str, np.ndarray] = {}
    prefix = f"{LAYER}.mlp.experts"
    gathered: dict[str, dict[str, list[np.ndarray]]] = {}
    for expert in range(3):
        parts = {
            leaf: made.drop(f"{prefix}.{expert}.{leaf}_proj") for leaf in ("gate", "up", "down")
        }
        for leaf, tensors in parts.items():
            base = f"{prefix}.{expert}.{leaf}_proj"
            target = "down_proj" if leaf == "down" else "gate_up_proj"
            found = gathered.setdefault(target, {"codes": [], "scales": [], "factors": []})
            found["codes"].append(tensors[f"{base}.weight"][1])
            found["scales"].append(tensors[f"{base}.weight_scale"][1])
            found["factors"].append(tensors[f"{base}.weight_scale_2"][1])
    for target, found in gathered.items():
        step = 1 if target == "down_proj" else 2
        join = [np.concatenate(found["codes"][at : at + step]) for at in range(0, 3 * step, step)]
        scales = [
            np.concatenate(found["scales"][at : at + step]) for at in range(0, 3 * step, step)
        ]
        codes_, scales_ = np.stack(join), np.stack(scales)
        factors = np.array([float(each) for each in found["factors"][::step]], np.float32)
        low_high = np.stack([codes_ & 15, codes_ >> 4], -1).reshape(*codes_.shape[:-1], -1)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
        table = np.concatenate([table, -table])
        exact = table[low_high] * e4m3.decode(scales_).astype(np.float64).repeat(16, -1)
        values[f"{prefix}.{target}"] = (exact * factors.astype(np.float64)[:, None, None]).astype(
            np.float32
        )
        if turned:
            codes_, scales_ = codes_.swapaxes(1, 2).copy(), scales_.swapaxes(1, 2).copy()
        made.tensors[f"{prefix}.{target}"] = ("U8", codes_)
        made.tensors[f"{prefix}.{target}_weight_scale"] = ("F8_E4M3", scales_)
        made.tensors[f"{prefix}.{target}_weight_scale_2"] = ("F32", factors)
    return values


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts_are_the_same_either_way_round(edit: Edit, turned: bool) -> None:
    made = edit("ok_moe_per_expert")
    values = stacked(made, turned=turned)

    summary = summarize(made.write())

    assert summary.format == "nvfp4"
    modules = identify(made.root).modules
    for name, expected in values.items():
        assert modules[name].shape == expected.shape
        assert modules[name].total == pytest.approx(float(expected.sum(dtype=np.float64)), abs=1e-9)


def test_stack_without_its_scales_is_named(edit: Edit) -> None:
    made = edit("ok_moe_per_expert")
    stacked(made, turned=False)
    del made.tensors[f"{LAYER}.mlp.experts.down_proj_weight_scale_2"]

    with pytest.raises(ApplianceError, match="no weight_scale_2") as caught:
        summarize(made.write())

    assert {fault.code for fault in caught.value.faults} == {"E_MISSING_COMPANION"}


@pytest.mark.parametrize(
    ("algorithm", "served"),
    [
        ("NVFP4", True),
        ("nvfp4", True),
        ("W4A16_NVFP4", True),
        ("W4A8_NVFP4_FP8", True),
        ("NVFP4_AWQ", False),
        ("NVFP4_SVD", False),
        ("MXFP8", False),
        ("MXFP4", False),
        ("INT4_AWQ", False),
        ("NEW_THING", False),
    ],
)
def test_every_algorithm_is_served_or_refused_by_its_name(
    edit: Edit, algorithm: str, served: bool
) -> None:
    made = edit("ok_modelopt_w4a4")
    made.quantization["quant_algo"] = algorithm
    made.legacy["quantization"]["quant_algo"] = algorithm

    if served:
        assert summarize(made.write()).format == "nvfp4"
        return
    with pytest.raises(ApplianceError, match=algorithm) as caught:
        summarize(made.write())
    assert [fault.code for fault in caught.value.faults] == ["E_UNSUPPORTED_ALGO"]


def test_empty_quantization_config_leaves_the_word_to_the_other_file(edit: Edit) -> None:
    made = edit("ok_modelopt_legacy_hfquant_only")
    made.config["quantization_config"] = {}

    assert summarize(made.write()).producer == "modelopt"


def test_mixed_precision_may_name_the_module_above(edit: Edit, codes: Codes) -> None:
    made = edit("ok_moe_per_expert")
    layers = {
        f"{LAYER}.self_attn.{part}_proj": {"quant_algo": "NVFP4"} for part in ("q", "k", "v", "o")
    }
    layers[f"{LAYER}.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    made.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    made.legacy = None

    assert codes(made.write()) == []
    del layers[f"{LAYER}.mlp.experts"]
    assert codes(made.write()) == ["E_EXCLUDED_BUT_QUANTIZED"]


def test_padded_rows_of_modelopt_are_read_without_the_padding(edit: Edit) -> None:
    made = edit("ok_modelopt_w4a4")
    made.config["intermediate_size"] = 90
    for part in ("gate_proj", "up_proj"):
        name = f"{LAYER}.mlp.{part}"
        for suffix in ("weight", "weight_scale"):
            kind, array = made.tensors[f"{name}.{suffix}"]
            made.tensors[f"{name}.{suffix}"] = (kind, array[:90].copy())

    summary = summarize(made.write())

    assert summary.format == "nvfp4"
    assert identify(made.root).modules[DOWN].shape == (64, 90)


def test_mxfp4_is_refused_by_its_name(edit: Edit) -> None:
    made = edit("ok_modelopt_w4a4")
    made.drop(Q)
    made.tensors |= {
        f"{Q}.weight": ("U8", np.zeros((64, 32), np.uint8)),
        f"{Q}.weight_scale": ("U8", np.full((64, 2), 127, np.uint8)),
    }

    with pytest.raises(ApplianceError, match="MXFP4") as caught:
        summarize(made.write())

    assert [fault.code for fault in caught.value.faults] == ["E_CODEBOOK"]


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("pre_quant_scale", "BF16", (64,)),
        ("svdquant_lora_a", "BF16", (8, 64)),
        ("forward_hadamard_matrix", "BF16", (16, 16)),
    ],
)
def test_tensor_that_changes_what_weights_mean_is_refused(
    edit: Edit, codes: Codes, name: str, kind: str, shape: tuple[int, ...]
) -> None:
    made = edit("ok_modelopt_w4a4")
    made.tensors[f"{Q}.{name}"] = (kind, np.zeros(shape, np.uint16))

    assert codes(made.write()) == ["E_UNSUPPORTED_ALGO"]


@pytest.mark.parametrize("field", ["transform_config", "sparsity_config"])
def test_rotation_and_sparsity_are_refused(edit: Edit, codes: Codes, field: str) -> None:
    made = edit("ok_ct_w4a16")
    made.quantization[field] = {"config_groups": {"R1": {}}, "format": "sparse-24-bitmask"}

    assert codes(made.write()) == ["E_UNSUPPORTED_ALGO"]


def test_swizzled_scales_are_refused(edit: Edit, codes: Codes) -> None:
    made = edit("ok_modelopt_w4a4")
    made.tensors[f"{Q}.weight_scale"] = ("F8_E4M3", np.zeros((128, 4), np.uint8))

    assert codes(made.write()) == ["E_SCALE_SHAPE"]


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_key_that_occurs_twice_is_refused(edit: Edit, codes: Codes, name: str) -> None:
    made = edit("ok_modelopt_w4a4")
    root = made.write()
    text = (root / name).read_text()
    (root / name).write_text(text.replace("{", '{"a": 1, "a": 2, ', 1))

    assert codes(root) == ["E_CONFIG"]


def test_index_with_a_name_twice_is_refused(vectors: Path, tmp_path: Path, codes: Codes) -> None:
    source = vectors / "ckpt" / "ok_ct_w4a4"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    first = text[text.index('"lm_head.weight"') :].partition('"lm_head.weight"')[2].partition(",")
    entry = f'"lm_head.weight"{first[0].rstrip(" }").rstrip()}'
    index.write_text(text.replace('"lm_head.weight"', f'{entry}, "lm_head.weight"', 1))

    assert codes(tmp_path) == ["E_CONFIG"]
