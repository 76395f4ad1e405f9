"""Reported faults of checkpoint files, by the id of the case, put to `validate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from planned import plan_of

from appliance.serve.canary import asks_chat

Run = Callable[..., Any]
Model = Callable[..., Path]
Validate = Callable[..., Any]


@pytest.mark.parametrize(
    ("block", "scheme"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int",
                                                           "strategy": "channel"}}}}, "8"),
    ],
    ids=["awq", "gptq", "w8a8"],
)  # fmt: skip
def test_rc_044_scheme_that_volta_does_not_get_is_refused_by_its_name(
    validate: Validate, model: Model, hollow: ModuleType, block: dict[str, Any], scheme: str
) -> None:
    path = model(
        tensors=lambda config: hollow.dense(hollow.model(config)),
        extra={"quantization_config": block},
    )

    ended = validate(path)

    assert ended.code == 30
    assert ended.codes[0] == "E_UNSUPPORTED_ALGO"
    assert scheme in ended.err
    assert "NVFP4" in ended.err


@pytest.mark.parametrize(
    ("block", "code", "key"),
    [
        (None, "E_NO_QUANT_METADATA", "quantization"),
        ({"quant_method": ""}, "E_UNKNOWN_METHOD", "quantization_config.quant_method"),
        ({"quant_method": "nvfp5"}, "E_UNKNOWN_METHOD", "quantization_config.quant_method"),
    ],
    ids=["missing", "empty", "unknown"],
)
def test_rc_045_missing_empty_and_unknown_methods_are_told_apart(
    validate: Validate, model: Model, block: dict[str, Any] | None, code: str, key: str
) -> None:
    ended = validate(model(extra={} if block is None else {"quantization_config": block}))

    assert ended.code == 30
    assert code in ended.codes
    assert key in ended.err
    assert "config.json" in ended.err


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9126805504\n"
FIRST = "model-00001-of-00001.safetensors"


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"1234")


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "pointer": (lambda path: path.write_bytes(POINTER), 31, "E_LFS_POINTER"),
    "empty": (lambda path: path.write_bytes(b""), 31, "E_TRUNCATED"),
    "truncated": (cut, 31, "E_TRUNCATED"),
    "long": (lengthen, 31, "E_TRAILING"),
    "zeros": (lambda path: path.write_bytes(bytes(4096)), 31, "E_BAD_HEADER"),
    "missing": (Path.unlink, 30, "E_MISSING_SHARD"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_rc_054_damaged_shard_is_named_by_its_damage_before_any_gpu(
    validate: Validate, model: Model, damage: str
) -> None:
    path = model()
    harm, code, name = DAMAGES[damage]
    harm(path / FIRST)

    ended = validate(path)

    assert (ended.code, ended.codes) == (code, [name])
    assert FIRST in ended.err


def test_rc_056_checkpoint_without_a_template_is_refused_unless_it_does_not_chat(
    validate: Validate, model: Model
) -> None:
    path = model()
    (path / "tokenizer_config.json").write_text("{}")

    refused = validate(path)
    served = plan_of(validate(path, "1x16GiB", "--json", server={"api": "completions_only"}))

    assert (refused.code, refused.codes) == (30, ["NO_CHAT_TEMPLATE"])
    assert "server.api: completions_only" in refused.err
    assert not asks_chat(served)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}", "a template that compiles"),
        ("{{ raise_exception('no') }}", "renders two turns"),
        ("hello", "keeps what the user says"),
        ("{{ messages }}{% if tools %}{{ tools[0].nothing.more }}{% endif %}", "two turns"),
    ],
    ids=["syntax", "raises", "drops", "tools"],
)
@pytest.mark.parametrize("is_configured", [False, True], ids=["checkpoint", "configured"])
def test_rc_056_template_that_fails_is_found_by_validate(
    validate: Validate, model: Model, template: str, said: str, is_configured: bool
) -> None:
    path, settings = model(), {}
    if is_configured:
        own = path.parent / "own.jinja"
        own.write_text(template)
        settings = {"model": {"chat_template": str(own)}}
    else:
        (path / "chat_template.jinja").write_text(template)

    ended = validate(path, **settings)

    assert (ended.code, ended.codes) == (30, ["E_CHAT_TEMPLATE"])
    assert said in ended.err


def test_rc_056_template_that_works_is_asked_for_a_chat(validate: Validate, model: Model) -> None:
    assert asks_chat(plan_of(validate(model(), "1x16GiB", "--json")))
