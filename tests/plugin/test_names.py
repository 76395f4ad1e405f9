"""From the engine's names back to the checkpoint's."""

from __future__ import annotations

import pytest

from appliance.vllm_plugin.names import NameSpace

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "in_proj_qkvz": ("in_proj_qkv", "in_proj_z")}
PARTS = [f"layers.0.attn.{part}_proj" for part in "qkv"]


class Prefix:
    """A mapper of the engine that moves one prefix."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def apply_list(self, values: list[str]) -> list[str]:
        return [v.replace(self.old, self.new, 1) if v.startswith(self.old) else v for v in values]


def test_leaves_fused_module_gives_its_parts_in_order() -> None:
    names = NameSpace([f"model.{part}" for part in PARTS])

    leaves = names.leaves("model.layers.0.attn.qkv_proj", PACKED)

    assert leaves == [f"model.{part}" for part in PARTS]


def test_leaves_module_fused_on_disk_gives_itself() -> None:
    names = NameSpace(["model.layers.0.attn.qkv_proj"])

    assert names.leaves("model.layers.0.attn.qkv_proj", PACKED) == ["model.layers.0.attn.qkv_proj"]


def test_leaves_absent_parts_are_named_all_the_same() -> None:
    leaves = NameSpace([]).leaves("model.layers.0.attn.qkv_proj", PACKED)

    assert leaves == [f"model.{part}" for part in PARTS]


def test_leaves_module_at_the_root_has_no_parent() -> None:
    assert NameSpace(["lm_head"]).leaves("lm_head", PACKED) == ["lm_head"]


@pytest.mark.parametrize("text_root", ["model.language_model.", "language_model.model.", "model."])
def test_checkpoint_name_is_found_whatever_the_wrapper(text_root: str) -> None:
    stored = [f"{text_root}{part}" for part in PARTS]

    names = NameSpace(stored)

    for asked in ("language_model.model.", "model."):
        assert names.leaves(f"{asked}layers.0.attn.qkv_proj", PACKED) == stored


def test_checkpoint_name_follows_the_mappers_of_nested_classes() -> None:
    names = NameSpace(["backbone.blocks.0.q_proj"])

    names.add_mapper(Prefix("backbone.", "transformer."))
    names.add_mapper(Prefix("transformer.blocks.", "model.layers."))

    assert names.checkpoint_name("model.layers.0.q_proj") == "backbone.blocks.0.q_proj"


def test_checkpoint_name_two_modules_that_differ_in_wrappers_stay_apart() -> None:
    names = NameSpace(["model.layers.0.q_proj", "language_model.layers.0.q_proj"])

    assert names.checkpoint_name("model.layers.0.q_proj") == "model.layers.0.q_proj"
    assert names.checkpoint_name("layers.0.q_proj") == "layers.0.q_proj"


def test_parent_name_of_experts_follows_the_mapper() -> None:
    names = NameSpace(["backbone.0.mlp.experts.3.up_proj"])
    names.add_mapper(Prefix("backbone.", "model.layers."))

    assert names.parent_name("model.layers.0.mlp.experts") == "backbone.0.mlp.experts"
    assert names.parent_name("model.layers.9.mlp.experts") == "model.layers.9.mlp.experts"
