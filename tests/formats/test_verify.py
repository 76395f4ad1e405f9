"""`appliance model verify`: files as they lie on the disk, tokenizer and chat template tried."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.template import TemplateProblem, find_templates, try_template
from appliance.checkpoint.verify import verify
from appliance.cli import main
from appliance.errors import ApplianceError

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def tokenizer(size: int = 60) -> str:
    """Return a byte-level tokenizer of single letters."""
    letters = [chr(code) for code in range(ord("!"), ord("!") + size - 4)]
    vocab = {letter: at for at, letter in enumerate([*letters, "Ġ", "Ã", "¼", "Ł"])}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    )


@pytest.fixture
def whole(edit: Callable[[str], Any]) -> Path:
    """A mini checkpoint with all its files."""
    root = edit("ok_ct_w4a16").write()
    (root / "tokenizer.json").write_text(tokenizer())
    (root / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": GOOD, "eos_token": {"content": "</s>"}})
    )
    return root


def verdict(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, set[str]]:
    status = main(["model", "verify", str(root), "--json"])
    report = json.loads(capsys.readouterr().out)
    return status, {fault["code"] for fault in report.get("faults", ())}


def sign(root: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(root.iterdir())
    ]
    (root / "SHA256SUMS").write_text("".join(lines))


def test_whole_checkpoint_passes_every_check(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign(whole)

    status = main(["model", "verify", str(whole), "--json"])

    report = json.loads(capsys.readouterr().out)
    assert (status, report["verdict"]) == (0, "pass")
    results = {check["name"]: check["result"] for check in report["checks"]}
    names = ("pointers", "weights", "digests", "tokenizer", "chat template")
    assert results == dict.fromkeys(names, "pass")


def test_verify_needs_no_torch(whole: Path) -> None:
    verify(whole)

    script = (
        "import sys; from appliance.cli import main;"
        f" main(['model', 'verify', {str(whole)!r}]);"
        " sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'numpy')))"
    )
    import subprocess  # noqa: PLC0415 - this test only

    assert subprocess.run((sys.executable, "-c", script), check=False).returncode == 0


def test_changed_byte_is_found_by_the_manifest(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign(whole)
    shard = whole / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    assert verdict(whole, capsys) == (31, {"E_DIGEST"})
    assert main(["model", "verify", str(whole), "--no-hashes"]) == 0


def test_every_broken_file_is_named_at_once(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (whole / "tokenizer.json").write_text(pointer)
    shard = whole / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])

    assert verdict(whole, capsys) == (31, {"E_LFS_POINTER", "E_TRUNCATED", "E_TOKENIZER"})


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "E_TOKENIZER_MISSING"),
        ("{", "E_TOKENIZER"),
        ("[]", "E_TOKENIZER"),
        ("{}", "E_TOKENIZER"),
        ('{"model": {"vocab": {"a": 0}}}', "E_TOKENIZER"),
        (tokenizer(70), "E_TOKENIZER"),  # six ids more than the embedding has rows
        ('{"model": 1, "model": {"vocab": {"a": 0}}}', "E_TOKENIZER"),
    ],
    ids=["missing", "torn", "list", "empty", "incomplete", "too large", "twice"],
)
def test_broken_tokenizer_is_named(
    whole: Path, capsys: pytest.CaptureFixture[str], content: str | None, code: str
) -> None:
    (whole / "tokenizer.json").unlink()
    if content is not None:
        (whole / "tokenizer.json").write_text(content)

    assert verdict(whole, capsys) == (30, {code})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}",  # no end
        "{{ messages[0].content | nosuchfilter }}",
        "{{ messages[7]['content']['x'] }}",
        "{{ raise_exception('no') }}",
        "a constant",
        "{{ messages[0].content }}",  # drops the last turn
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}",
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages }}",
    ],
)
def test_broken_chat_template_is_named(
    whole: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    (whole / "chat_template.jinja").write_text(template)

    assert verdict(whole, capsys) == (30, {"E_CHAT_TEMPLATE"})


@pytest.mark.parametrize(
    "template",
    [
        GOOD,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{{ m.content[0].text + '' }}{% endfor %}",  # wants lists of parts
        (
            "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{{ m | tojson }}"
            "{% endfor %}{{ strftime_now('%Y') }}"
            "{% if tools %}{{ tools[0].function.name }}{% endif %}"
        ),
    ],
)
def test_templates_as_models_write_them_render(template: str) -> None:
    assert try_template("t", template, {}) > 20


def test_missing_chat_template_is_a_warning(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole / "tokenizer_config.json").write_text("{}")

    assert main(["model", "verify", str(whole)]) == 0
    assert "W_NO_CHAT_TEMPLATE" in capsys.readouterr().err


def test_several_templates_are_all_found(tmp_path: Path) -> None:
    entries = [{"name": "default", "template": GOOD}, {"name": "tool_use", "template": "x"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "y"}))

    found = find_templates(tmp_path, {"chat_template": entries})

    assert list(found) == [
        "chat_template.json",
        "tokenizer_config.json default",
        "tokenizer_config.json tool_use",
    ]
    with pytest.raises(TemplateProblem):
        find_templates(tmp_path, {"chat_template": [{"name": 1}]})


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        (
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}{{ ns.x }}"
        ),
    ],
    ids=["time", "memory"],
)
def test_hostile_template_ends_with_its_child(whole: Path, template: str) -> None:
    (whole / "chat_template.jinja").write_text(template)

    with pytest.raises(ApplianceError) as caught:
        verify(whole, cpu_s=2)

    assert [fault.code for fault in caught.value.faults] == ["E_CHAT_TEMPLATE"]


def test_index_that_states_another_size_is_noted(vectors: Path, tmp_path: Path) -> None:
    for path in (vectors / "ckpt" / "ok_ct_w4a4").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    place = tmp_path / "model.safetensors.index.json"
    index = json.loads(place.read_text())
    index["metadata"] = {"total_size": 5}
    place.write_text(json.dumps(index))

    checks = {check.name: check for check in verify(tmp_path).checks}

    assert checks["weights"].result == "warn"
    assert "W_INDEX_SIZE" in checks["weights"].detail


def test_time_of_a_small_checkpoint_is_seconds(whole: Path) -> None:
    begun = time.process_time()

    verify(whole)

    assert time.process_time() - begun < 5
