"""Public failures of 4-bit checkpoints, H01 to H24: each once, with the verdict that it must get.

What needs the plugin's own layers is asked of them without an engine; tests/plugin runs the same
rules inside a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from appliance.checkpoint.decode import open_matrix
from appliance.checkpoint.identity import identify
from appliance.checkpoint.read import summarize
from appliance.checkpoint.stored import find_stored, split_name
from appliance.checkpoint.tensors import TensorReader
from appliance.cli import main
from appliance.errors import ApplianceError
from appliance.nvfp4 import block, e4m3, host
from appliance.plan.split import Split, obstacles, possible_splits
from appliance.vllm_plugin import ledger
from appliance.vllm_plugin.claims import is_served
from appliance.vllm_plugin.inventory import COMPRESSED_TENSORS_NAMES, MODELOPT_NAMES
from appliance.vllm_plugin.spotcheck import check_tile, last_tile

Edit = Callable[[str], Any]
Codes = Callable[[Path], list[str]]
Open = Callable[[Path], TensorReader]

LAYER = "model.layers.0"
Q, K, O = (f"{LAYER}.self_attn.{part}_proj" for part in "qko")  # noqa: E741 - the projection's name


def decoded(reader: TensorReader) -> dict[str, np.ndarray]:
    forms = {name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()}
    return {each.module: open_matrix(reader, each).values() for each in find_stored(forms)[0]}


def test_h01_activation_scales_may_be_absent_partial_or_zero(edit: Edit) -> None:
    made = edit("ok_moe_per_expert")
    scales = [name for name in made.tensors if name.endswith("input_scale")]
    made.tensors[scales[0]] = ("F32", np.zeros((), np.float32))
    before = identify(made.write()).weights_sha256
    for name in scales:
        del made.tensors[name]

    assert identify(made.write()).weights_sha256 == before
    assert not any("W_ACT_IGNORED" in note for note in summarize(made.root).notes)


def test_h01_activation_scales_are_noted_once(edit: Edit) -> None:
    notes = summarize(edit("ok_moe_per_expert").write()).notes

    assert [note.partition(":")[0] for note in notes].count("W_ACT_IGNORED") == 1


def test_h02_scale_that_no_tensor_reached_is_found() -> None:
    scales = ledger.unwritten_scales(4, 2)
    assert bool((scales.view(torch.uint8) == 0x7F).all())
    scales.view(torch.uint8)[:3] = 0x38

    with pytest.raises(ApplianceError, match=r"E_MISSING_COMPANION.*row 3, block 0"):
        ledger.check_no_sentinel(scales, Q, MODELOPT_NAMES)


def test_h02_dense_layer_that_no_entry_excludes_is_refused(edit: Edit) -> None:
    made = edit("ok_modelopt_w4a4")
    made.dense(O, 64, 64)

    with pytest.raises(ApplianceError, match=f"add {O} to the exclude list"):
        summarize(made.write())


@pytest.mark.parametrize("arrivals", [0, 2])
def test_h03_global_must_come_exactly_once_for_each_part(arrivals: int) -> None:
    matrix, record = ledger.Matrix(K, 8, 16), ledger.MatrixRecord(codes=1, scales=1)
    for _ in range(arrivals):
        ledger.enter_global(record, matrix, MODELOPT_NAMES, torch.tensor(0.5))

    with pytest.raises(ApplianceError, match=r"E_MISSING_COMPANION|E_DUPLICATE_TENSOR"):
        ledger.check(record, matrix, MODELOPT_NAMES)


def test_h04_stack_keeps_one_global_for_both_halves_of_an_expert(
    vectors: Path, single_file: Open
) -> None:
    expected = np.load(vectors / "moe_stacked_modelopt.npz")

    values = decoded(single_file(vectors / "moe_stacked_modelopt.safetensors"))

    for name in expected.files:
        np.testing.assert_array_equal(values[name], expected[name])


@pytest.mark.parametrize(
    ("row", "name", "site"),
    [
        ("h05", "moe_per_expert_modelopt", ("experts.0.gate_proj", "experts.0.up_proj")),
        ("h06", "fused_ct", ("gate_proj", "up_proj")),
        ("h07", "fused_ct", ("q_proj", "k_proj", "v_proj")),
    ],
    ids=["h05", "h06", "h07"],
)
def test_h05_h06_h07_parts_of_a_site_keep_their_own_globals(
    vectors: Path, single_file: Open, row: str, name: str, site: tuple[str, ...]
) -> None:
    reader = single_file(vectors / f"{name}.safetensors")
    expected = np.load(vectors / f"{name}.npz")
    suffix = "weight_scale_2" if row == "h05" else "weight_global_scale"
    globals_ = {float(reader.float32(f"{part}.{suffix}").reshape(())) for part in site}

    values = decoded(reader)

    assert len(globals_) == len(site)
    for part in site:
        np.testing.assert_array_equal(values[part], expected[part])


@pytest.mark.parametrize("name", ["ok_modelopt_w4a4", "ok_ct_w4a16"])
def test_h08_direction_follows_the_name_and_is_checked(edit: Edit, name: str) -> None:
    made = edit(name)
    suffix = "weight_scale_2" if name == "ok_modelopt_w4a4" else "weight_global_scale"
    kind, value = made.tensors[f"{Q}.{suffix}"]
    made.tensors[f"{Q}.{suffix}"] = (kind, 1 / value)

    with pytest.raises(ApplianceError, match=f"E_GLOBAL_DIRECTION. {Q}.{suffix}"):
        identify(made.write())


def test_h09_sums_beyond_fp16_survive_until_the_global(vectors: Path, single_file: Open) -> None:
    expected = np.load(vectors / "gemm_modelopt.npz")
    weight = decoded(single_file(vectors / "gemm_modelopt.safetensors"))["m"]

    product = expected["x_fp16"].astype(np.float32) @ weight.T

    error = np.abs(product - expected["y_fp64"])
    assert (error <= expected["abs_bound"] * 2.0**-14).all()
    assert np.isfinite(product.astype(np.float16)).all()


def test_h10_every_scale_code_is_decoded_exactly(vectors: Path, single_file: Open) -> None:
    reader = single_file(vectors / "codes_all_modelopt.safetensors")
    bits = np.load(vectors / "codes_all_modelopt.npz")["m.unscaled_fp16_bits"]
    codes, scales = reader.array("m.weight"), reader.array("m.weight_scale")
    assert sorted(scales.ravel()) == list(range(0x7F))
    out = np.empty((127, 16), np.float16)

    host.dequantize(codes, scales, np.ones(127, np.float32), out)

    np.testing.assert_array_equal(out.view(np.uint16), bits)


def test_h11_head_that_is_excluded_and_packed_is_refused(edit: Edit, codes: Codes) -> None:
    made = edit("ok_modelopt_w4a4")
    parts = made.drop("lm_head")
    assert list(parts) == ["lm_head.weight"]
    for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        made.tensors[f"lm_head.{suffix}"] = made.tensors[f"{Q}.{suffix}"]

    assert codes(made.write()) == ["E_EXCLUDED_BUT_QUANTIZED"]


def test_h12_tied_head(edit: Edit, codes: Codes, capsys: pytest.CaptureFixture[str]) -> None:
    made = edit("ok_ct_w4a16")
    made.config["tie_word_embeddings"] = True
    kind, embedding = made.tensors["model.embed_tokens.weight"]
    made.tensors["lm_head.weight"] = (kind, embedding.copy())
    assert main(["model", "digest", str(made.write())]) == 0
    made.tensors["lm_head.weight"][1][5, 5] ^= 1

    assert main(["model", "digest", str(made.write()), "--json"]) == 30
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [fault["code"] for fault in report["faults"]] == ["E_CONFIG_TENSOR_MISMATCH"]
    del made.tensors["lm_head.weight"]
    assert codes(made.write()) == []
    made.config["tie_word_embeddings"] = False
    assert codes(made.write()) == ["E_MISSING_TENSOR"]


@pytest.mark.parametrize("is_declared", [True, False])
def test_h13_drafter_that_nothing_excludes_is_skipped(edit: Edit, is_declared: bool) -> None:
    made = edit("ok_mtp_bf16_excluded")
    made.quantization["ignore"] = ["lm_head"]
    made.legacy["quantization"]["exclude_modules"] = ["lm_head"]
    if not is_declared:
        del made.config["num_nextn_predict_layers"]
        made.tensors["model.layers.1.eh_proj.weight"] = ("BF16", np.zeros((64, 128), np.uint16))

    notes = summarize(made.write()).notes

    assert any(note.startswith("I_MTP_SKIPPED") for note in notes)


@pytest.mark.parametrize(
    "entry",
    [
        f"language_{LAYER}.self_attn.o_proj",
        f"model.language_{LAYER}.self_attn.o_proj",
        f"language_model.{LAYER}.self_attn.o_proj",
        O,
        r"re:.*layers\.0\.self_attn\.o_proj",
    ],
)
def test_h14_patterns_are_in_the_checkpoints_own_names(
    edit: Edit, codes: Codes, entry: str
) -> None:
    made = edit("ok_ct_w4a16")
    made.dense(O, 64, 64)
    made.exclude(entry)

    assert codes(made.write()) == []


def test_h15_wrapper_at_the_end_of_an_entry_is_understood(edit: Edit, codes: Codes) -> None:
    made = edit("ok_modelopt_w4a4")
    made.dense(O, 64, 64)
    made.exclude(f"{O}.linear")

    assert codes(made.write()) == []


GDN = "model.language_model.layers.0.linear_attn"


@pytest.mark.parametrize(
    ("is_dense", "entries", "expected"),
    [
        (True, ["in_proj_qkvz", "in_proj_ba"], []),
        (True, ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"], []),
        (False, ["in_proj_qkvz", "in_proj_ba"], ["E_EXCLUDED_BUT_QUANTIZED"]),
        (True, [], ["E_UNQUANTIZED_NOT_EXCLUDED"]),
    ],
)
def test_h16_list_may_name_fused_or_split_parts(
    edit: Edit, codes: Codes, is_dense: bool, entries: list[str], expected: list[str]
) -> None:
    made = edit("ok_qwen35_gdn_quasar_like")
    if is_dense:
        for name, rows in {"qkv": 160, "z": 96, "b": 6, "a": 6}.items():
            made.dense(f"{GDN}.in_proj_{name}", rows, 64)
    made.exclude(*(f"{GDN}.{entry}" for entry in entries))

    assert codes(made.write()) == expected


def test_h17_split_that_cuts_a_block_is_refused_with_those_that_do_not(vectors: Path) -> None:
    summary = summarize(vectors / "ckpt" / "bad_tp2_group_split")

    [found] = [each for each in obstacles(summary, Split(2, 1)) if each.code == "E_TP_GROUP"]

    assert found.value == "112 / 2 = 56"
    assert possible_splits(summary, 2) == [Split(1, 1)]  # of one layer: no pipeline either


@pytest.mark.parametrize("rows", [1, 17, 33, 160, 4120, 8240])
def test_h18_any_number_of_rows_decodes_alike(rows: int) -> None:
    generator = np.random.default_rng(rows)
    codes = generator.integers(0, 256, (rows, 16), dtype=np.uint8)
    scales = generator.integers(0, 0x7F, (rows, 2), dtype=np.uint8)
    factors = np.full(rows, 0.01, np.float32)
    out = np.empty((rows, 32), np.float32)

    host.dequantize(codes, scales, factors, out)

    np.testing.assert_array_equal(out, block.dequantize(codes, e4m3.decode(scales), factors))


def test_h19_wrong_row_in_the_last_tile_is_found() -> None:
    generator = np.random.default_rng(134)
    codes = generator.integers(0, 256, (134, 32), dtype=np.uint8)
    scales = generator.integers(1, 0x7F, (134, 4), dtype=np.uint8)
    factors = np.full(134, 0.01, np.float32)
    values = block.dequantize(codes, e4m3.decode(scales), factors)
    rows, columns = last_tile(*values.shape)
    shifted = np.roll(values, 1, axis=0)
    tile = (codes[rows, : columns.stop // 2], scales[rows], factors[rows])

    check_tile(Q, *tile, values[rows, columns], is_divisor=False)
    with pytest.raises(ApplianceError, match="E_SELF_TEST"):
        check_tile(Q, *tile, shifted[rows, columns], is_divisor=False)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("bad_missing_shard", "E_MISSING_SHARD"),
        ("bad_truncated_shard", "E_TRUNCATED"),
        ("bad_duplicate_tensor", "E_DUPLICATE_TENSOR"),
    ],
)
def test_h20_incomplete_files_are_refused_by_headers_alone(
    vectors: Path, codes: Codes, name: str, code: str
) -> None:
    assert codes(vectors / "ckpt" / name) == [code]


@pytest.mark.parametrize(
    ("tensor", "module", "part"),
    [
        ("experts.3.gate_proj.weight_scale_2", "experts.3.gate_proj", "weight_scale_2"),
        ("experts.gate_up_proj", "experts.gate_up_proj", "weight"),
        ("experts.gate_up_proj_weight_scale", "experts.gate_up_proj", "weight_scale"),
        ("experts.down_proj_weight_scale_2", "experts.down_proj", "weight_scale_2"),
        ("experts.down_proj_input_scale", "experts.down_proj", "input_scale"),
        ("mlp.down_proj.weight", "mlp.down_proj", "weight"),
    ],
)
def test_h21_names_of_experts_are_told_apart(tensor: str, module: str, part: str) -> None:
    assert split_name(tensor) == (module, part)


def test_h21_expert_without_scales_or_without_anything_is_named(edit: Edit, codes: Codes) -> None:
    made = edit("ok_moe_per_expert")
    expert = f"{LAYER}.mlp.experts.1.up_proj"
    del made.tensors[f"{expert}.weight_scale"]
    assert codes(made.write()) == ["E_MISSING_COMPANION"]
    made.drop(expert)

    assert codes(made.write()) == ["E_MISSING_EXPERT"]


def test_h22_every_good_scheme_is_taken_over_for_volta(
    checkpoint: dict[str, Any], vectors: Path
) -> None:
    root = vectors / checkpoint["dir"]
    config = json.loads((root / "config.json").read_text()).get("quantization_config")
    if config is None:
        config = json.loads((root / "hf_quant_config.json").read_text())

    is_ours = is_served(config)

    assert is_ours or checkpoint["name"] == "bad_unknown_method"


def test_h23_unused_suffixes_pass_and_unknown_ones_do_not(edit: Edit, codes: Codes) -> None:
    made = edit("ok_ct_w4a16")
    for suffix in ("input_global_scale", "weight_zero_point", "weight_shape"):
        made.tensors[f"{Q}.{suffix}"] = ("F32", np.zeros(1, np.float32))
    made.tensors[f"{K}.k_scale"] = ("F32", np.ones(1, np.float32))
    assert codes(made.write()) == []
    made.tensors[f"{Q}.surprise"] = ("F32", np.zeros(1, np.float32))

    assert codes(made.write()) == ["E_UNKNOWN_TENSOR"]


def test_h24_packed_weights_without_metadata_are_refused(edit: Edit, codes: Codes) -> None:
    made = edit("ok_modelopt_w4a4")
    made.legacy = None
    del made.config["quantization_config"]

    assert codes(made.write()) == ["E_NO_QUANT_METADATA"]
    made.config["quantization_config"] = {}
    assert codes(made.write()) == ["E_NO_QUANT_METADATA"]
    made.config["quantization_config"] = {"quant_method": "nvfp4"}
    assert codes(made.write()) == []


def test_h08_names_carry_the_direction() -> None:
    assert (MODELOPT_NAMES.divisor, COMPRESSED_TENSORS_NAMES.divisor) == (False, True)
