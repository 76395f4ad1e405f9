"""The summary: what whole checkpoints add up to, and which code each defect gives."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from appliance.checkpoint.read import summarize
from appliance.checkpoint.summary import Cut, Kind
from appliance.errors import ApplianceError, ExitCode

if TYPE_CHECKING:
    Tiny = Any

VALUE_CODES = {"E_SCALE_NAN", "E_GLOBAL_INVALID", "E_GLOBAL_DIRECTION"}
"""Defects in values: headers do not show them, the loader does."""

PLAN_CODES = {"E_TP_GROUP at tp=2"}
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
O = "model.layers.1.self_attn.o_proj"  # noqa: E741 - the projection's name
DOWN = "model.layers.0.mlp.experts.1.down_proj"


def refusal(root: Path) -> ApplianceError:
    with pytest.raises(ApplianceError) as caught:
        summarize(root)
    return caught.value


def codes_of(root: Path) -> set[str]:
    return {fault.code for fault in refusal(root).faults}


def stored_bytes(root: Path) -> int:
    """Return the bytes of data in all shards, from their headers and sizes."""
    total = 0
    for path in root.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - length
    return total


def test_handed_checkpoint_gives_the_expected_verdict(
    vector: dict[str, Any], vectors: Path
) -> None:
    root = vectors / vector["dir"]
    expected = vector.get("expect_error")

    if expected in VALUE_CODES | PLAN_CODES or expected is None:
        summary = summarize(root)
        assert sum(summary.bytes_by_kind().values()) == stored_bytes(root)
    else:
        error = refusal(root)
        assert [fault.code for fault in error.faults] == [expected] * len(error.faults)
        corrupt = expected == "E_TRUNCATED"
        assert error.exit_code == (
            ExitCode.CHECKPOINT_CORRUPT if corrupt else ExitCode.CHECKPOINT_UNSUPPORTED
        )


CT = "compressed-tensors"
DESCRIBED: dict[str, tuple[str, str, int, list[str]]] = {
    "ok_modelopt_w4a4": ("nvfp4", "modelopt", 16, ["W_ACT_IGNORED", "W_KV_FP8_IGNORED"]),
    "ok_modelopt_legacy_hfquant_only": ("nvfp4", "modelopt", 16, ["W_ACT_IGNORED"]),
    "ok_ct_w4a4": ("nvfp4", CT, 16, ["W_ACT_IGNORED"]),
    "ok_ct_w4a16": ("nvfp4", CT, 16, []),
    "ok_modelopt_mixed_fp8": ("mixed", "modelopt", 16, ["W_ACT_IGNORED"]),
    "ok_moe_per_expert": ("nvfp4", "modelopt", 16, ["W_ACT_IGNORED"]),
    "ok_mtp_bf16_excluded": ("nvfp4", "modelopt", 16, ["W_ACT_IGNORED", "I_MTP_SKIPPED"]),
    "ok_quasar_st_f16": ("nvfp4", "quasar-st", 128, []),
    "ok_qwen35_gdn_quasar_like": (
        "nvfp4",
        CT,
        16,
        ["W_ACT_IGNORED", "W_MTP_ABSENT", "I_TEXT_ONLY"],
    ),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_good_handed_checkpoint_is_described(vectors: Path, name: str) -> None:
    summary = summarize(vectors / "ckpt" / name)

    notes = [note.partition(":")[0] for note in summary.notes]
    assert (summary.format, summary.producer, summary.group_size, notes) == DESCRIBED[name]


def test_bytes_by_kind_are_those_of_the_tensors(tiny: Tiny, hollow: ModuleType) -> None:
    summary = summarize(tiny.write())

    parts = {
        Kind.CODES: ("weight_packed",),
        Kind.BLOCK_SCALES: ("weight_scale",),
        Kind.GLOBALS: ("weight_global_scale",),
    }
    sizes = {name: hollow.size_of(entry) for name, entry in tiny.tensors.items()}
    expected = {
        kind: sum(size for name, size in sizes.items() if name.endswith(ends))
        for kind, ends in parts.items()
    }
    expected[Kind.EMBEDDING] = sizes["model.embed_tokens.weight"]
    expected[Kind.LM_HEAD] = sizes["lm_head.weight"]
    expected[Kind.DENSE] = sum(sizes.values()) - sum(expected.values())
    assert summary.bytes_by_kind() == expected
    assert summary.tensor_count == len(tiny.tensors)


def test_groups_carry_elements_rows_and_cuts(tiny: Tiny) -> None:
    groups = {
        (group.kind, group.cut): group
        for group in summarize(tiny.write()).groups
        if group.layer == 1
    }

    rows = groups[Kind.CODES, Cut.ROWS]
    assert (rows.elements, rows.rows) == ((64 + 2 * 96) * 64, 64 + 2 * 96)
    heads = groups[Kind.CODES, Cut.KV_HEADS]
    assert (heads.elements, heads.rows) == (2 * 32 * 64, 2 * 32)
    columns = groups[Kind.CODES, Cut.COLUMNS]
    assert (columns.elements, columns.rows) == (64 * 64 + 64 * 96, 2 * 64)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-14b", "qwen3-30b-a3b", "quasar-27b"])
def test_public_model_adds_up_to_its_tensors(tmp_path: Path, hollow: ModuleType, name: str) -> None:
    root = hollow.build(tmp_path, name)

    summary = summarize(root)

    assert sum(summary.bytes_by_kind().values()) == stored_bytes(root)
    assert summary.format == "nvfp4"


def test_hybrid_state_and_cache_are_the_public_numbers(tmp_path: Path, hollow: ModuleType) -> None:
    geometry = summarize(hollow.build(tmp_path, "quasar-27b")).geometry

    assert geometry.kv_bytes_per_token() == 65_536
    assert geometry.state_elements * geometry.recurrent_layers * 4 == 48 * 48 * 128 * 128 * 4
    assert (geometry.attention_layers, geometry.recurrent_layers) == (16, 48)


def test_quantized_linears_of_quasar_are_the_public_count(
    tmp_path: Path, hollow: ModuleType
) -> None:
    summary = summarize(hollow.build(tmp_path, "quasar-27b"))

    globals_ = sum(g.elements for g in summary.groups if g.kind is Kind.GLOBALS)
    codes = sum(g.elements for g in summary.groups if g.kind is Kind.CODES)
    assert globals_ == 496
    assert 24.3e9 < codes < 24.4e9


def test_excluded_dense_linear_is_accepted(tiny: Tiny) -> None:
    tiny.make_dense(O)
    tiny.quantization["ignore"] = ["lm_head", r"re:model\.layers\.1\.self_attn\.o_.*"]

    assert summarize(tiny.write()).format == "nvfp4"


def test_exclude_list_with_another_root_is_understood(tiny: Tiny) -> None:
    tiny.make_dense(O)
    other = O.replace("model.", "model.language_model.", 1)
    tiny.quantization["ignore"] = ["lm_head", f"{other}.linear"]

    assert summarize(tiny.write()).format == "nvfp4"


@pytest.mark.parametrize(
    "entry",
    ["model.layers.1.self_attn.o_proj", "model.layers.1*o_proj", "*.o_proj", "o_proj"],
)
def test_modelopt_exclude_names_are_understood(tiny: Tiny, entry: str) -> None:
    tiny.make_dense(O)
    if "1" not in entry:
        tiny.make_dense(O.replace("layers.1", "layers.0"))
    tiny.as_modelopt(ignore=["lm_head", entry])

    assert summarize(tiny.write()).producer == "modelopt"


def test_modelopt_parent_excludes_what_lies_below(tiny: Tiny) -> None:
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tiny.make_dense(f"model.layers.1.self_attn.{leaf}")
    tiny.as_modelopt(ignore=["lm_head", "model.layers.1.self_attn"])

    assert summarize(tiny.write()).format == "nvfp4"


def test_target_list_leaves_other_linears_dense(tiny: Tiny) -> None:
    for layer in range(2):
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tiny.make_dense(f"model.layers.{layer}.self_attn.{leaf}")
    tiny.quantization["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]

    assert summarize(tiny.write()).format == "nvfp4"


def test_compressed_tensors_may_mix_fp8_in(tiny: Tiny) -> None:
    tiny.make_fp8(O)
    fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    groups = tiny.quantization["config_groups"]
    groups["group_1"] = {"targets": [O], "weights": fp8}

    summary = summarize(tiny.write())

    assert summary.format == "mixed"
    assert summary.bytes_by_kind()[Kind.FP8] == 64 * 64 + 4


@pytest.mark.parametrize(
    ("scale", "code"),
    [
        (("F32", (64, 1)), None),
        (("BF16", (1,)), None),
        (("F32", (2, 2)), "E_SCALE_SHAPE"),
        (("F8_E4M3", ()), "E_SCALE_DTYPE"),
    ],
    ids=str,
)
def test_fp8_scale_is_checked(
    tiny: Tiny, scale: tuple[str, tuple[int, ...]], code: str | None
) -> None:
    is_of_rows = scale[1] == (64, 1)
    layers = {O: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN" if is_of_rows else "FP8"}}
    tiny.make_fp8(O)
    tiny.tensors[f"{O}.weight_scale"] = scale
    for name in list(tiny.tensors):
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
    tiny.as_modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers)

    root = tiny.write()

    if code is None:
        assert summarize(root).format == "mixed"
    else:
        assert codes_of(root) == {code}


def test_two_files_that_disagree_are_refused(tiny: Tiny) -> None:
    tiny.as_modelopt()
    root = tiny.write()
    legacy = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (root / "hf_quant_config.json").write_text(json.dumps(legacy))

    assert codes_of(root) == {"E_CONFIG_CONFLICT"}


def test_nvfp4_method_without_packed_weights_is_refused(tmp_path: Path, hollow: ModuleType) -> None:
    config = dict(hollow.QWEN2_7B) | {
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "nvfp4"},
    }
    root = hollow.write(tmp_path, config, hollow.dense(hollow.model(config)))

    assert codes_of(root) == {"E_CONFIG_TENSOR_MISMATCH"}


def test_dense_checkpoint_is_dense(tmp_path: Path, hollow: ModuleType) -> None:
    config = dict(hollow.QWEN2_7B) | {"num_hidden_layers": 1}
    root = hollow.write(tmp_path, config, hollow.dense(hollow.model(config)))

    summary = summarize(root)

    assert (summary.format, summary.producer, summary.group_size) == ("dense", "none", 0)


def test_head_that_is_quantized_and_not_excluded_counts_as_head(tiny: Tiny) -> None:
    del tiny.tensors["lm_head.weight"]
    tiny.tensors |= {
        "lm_head.weight_packed": ("U8", (100, 32)),
        "lm_head.weight_scale": ("F8_E4M3", (100, 4)),
        "lm_head.weight_global_scale": ("F32", (1,)),
    }
    tiny.quantization["ignore"] = []

    assert summarize(tiny.write()).bytes_by_kind()[Kind.LM_HEAD] == 100 * 32 + 100 * 4 + 4


def test_quantized_embedding_is_refused(tiny: Tiny) -> None:
    del tiny.tensors["model.embed_tokens.weight"]
    tiny.tensors |= {
        "model.embed_tokens.weight_packed": ("U8", (100, 32)),
        "model.embed_tokens.weight_scale": ("F8_E4M3", (100, 4)),
        "model.embed_tokens.weight_global_scale": ("F32", (1,)),
    }

    assert codes_of(tiny.write()) == {"E_UNSUPPORTED_ALGO"}


def test_tied_model_needs_no_head(tiny: Tiny) -> None:
    del tiny.tensors["lm_head.weight"]
    tiny.config["tie_word_embeddings"] = True

    assert summarize(tiny.write()).geometry.tied_embeddings


def test_stacked_experts_are_counted_like_single_ones(tiny_moe: Tiny) -> None:
    single = summarize(tiny_moe.write()).bytes_by_kind()
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        for name in [name for name in tiny_moe.tensors if name.startswith(f"{base}.")]:
            del tiny_moe.tensors[name]
    tiny_moe.as_modelopt(ignore=["lm_head", "*.mlp.gate"])
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        tiny_moe.tensors |= {
            f"{base}.gate_up_proj": ("U8", (3, 96, 32)),
            f"{base}.gate_up_proj_weight_scale": ("F8_E4M3", (3, 96, 4)),
            f"{base}.gate_up_proj_weight_scale_2": ("F32", (3, 1, 1)),
            f"{base}.gate_up_proj_input_scale": ("F32", (3,)),
            f"{base}.down_proj": ("U8", (3, 64, 24)),
            f"{base}.down_proj_weight_scale": ("F8_E4M3", (3, 64, 3)),
            f"{base}.down_proj_weight_scale_2": ("F32", (3,)),
        }

    stacked = summarize(tiny_moe.write()).bytes_by_kind()

    assert stacked[Kind.CODES] == single[Kind.CODES]
    assert stacked[Kind.BLOCK_SCALES] == single[Kind.BLOCK_SCALES]


def test_kv_scales_are_legal_and_unread(tiny: Tiny) -> None:
    tiny.tensors["model.layers.0.self_attn.k_scale"] = ("F32", (1,))
    tiny.tensors[f"{K}.k_scale"] = ("F32", ())

    notes = summarize(tiny.write()).notes

    assert [note.partition(":")[0] for note in notes] == ["W_KV_FP8_IGNORED"]


def test_digest_follows_headers_and_sizes(tiny: Tiny) -> None:
    before = summarize(tiny.write()).digest
    again = summarize(tiny.write()).digest
    tiny.quantization["ignore"] = ["lm_head", "re:.*nothing.*"]

    after = summarize(tiny.write()).digest

    assert before == again != after


def test_files_beside_the_weights_are_looked_for(tiny: Tiny) -> None:
    root = tiny.write()
    with_both = summarize(root)
    (root / "tokenizer.json").unlink()
    (root / "tokenizer_config.json").unlink()

    without = summarize(root)

    assert (with_both.has_tokenizer, with_both.has_chat_template) == (True, True)
    assert (without.has_tokenizer, without.has_chat_template) == (False, False)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "hf_quant_config.json",
     "model.safetensors.index.json", "config.json"],
)  # fmt: skip
def test_link_that_cannot_be_followed_is_a_fault_or_nothing(tiny: Tiny, name: str) -> None:
    root = Path(tiny.write())
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to("a" * 300)  # following it fails by itself, as in a closed directory

    if name in ("tokenizer.json", "chat_template.jinja"):
        assert summarize(root).has_tokenizer == (name != "tokenizer.json")
    else:
        assert codes_of(root) <= {"E_UNREADABLE"}
