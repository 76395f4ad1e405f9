"""The JSON schema and the reference page of the configuration, both made from the models."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from appliance.config import rules
from appliance.config.describe import Entry, default_at, entries
from appliance.config.flags import OWNED, UNSUPPORTED, VLLM_VERSION
from appliance.config.schema import Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PREFACE = """\
# Configuration

The appliance reads one file, `config/appliance.yaml`. This page and `config/appliance.schema.json`
are made from its schema by `make golden`; the text of a key is in `appliance/config/`.

- Every key but `version` and `model.path` may be left out and then has the default given here.
- Sizes and durations carry a unit: `16GiB`, `30s`. A bare number is refused.
- `auto` is decided by the plan. `appliance plan` prints each decision with its reason.
- Text follows YAML 1.2: `off` and `yes` are words, only `true` and `false` are booleans.
- Unknown keys, duplicate keys, YAML tags and files above 1 MiB are refused. All faults of the file
  are reported in one run, each with file, line and what to do; the exit code is 10.
- No environment variable changes what the appliance does.
- `appliance validate --config FILE` checks the file, the checkpoint and whether the model fits the
  GPUs here or those of `--assume 2x16GiB`; without either, whether any machine of V100s could serve
  it. `--schema-only` checks the file alone. `appliance render --config FILE --explain` shows the
  flags and variables that follow from it, with the origin of each.
"""

_RULES = """\
## Rules across keys

"""

_FLAGS = f"""\
## Flags in `execution.extra_args`

A key of this mapping is a flag of vLLM {VLLM_VERSION} without its dashes; a switch takes `true` or
`false`. Names and values are checked against the list of that version's flags. Lists and mappings
are given as the JSON text that vLLM expects.

These flags follow from another key:

"""

_NO_FLAGS = "\nThese flags cannot be set:\n\n"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration file (draft 2020-12)."""
    schema = Config.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        model.pop("title", None)
        for prop in model["properties"].values():
            prop.pop("title", None)
    for entry, prop in _properties(schema, entries()):
        if " with a unit " in entry.expected:
            prop["description"] = f"{prop['description']} Accepts {entry.expected}."
            if "default" in prop:
                prop["default"] = default_at(entry.key)
    return {"$schema": DIALECT, "title": "appliance.yaml", **schema}


def schema_text() -> str:
    """Return `json_schema` as the text of config/appliance.schema.json."""
    return json.dumps(json_schema(), indent=2) + "\n"


def reference_page() -> str:
    """Return docs/config.md."""
    sections = [_section(e) for e in entries(Config) if "." not in e.key and e.section]
    parts = [_PREFACE, *sections]
    parts.append(_RULES + "\n".join(f"- {text}" for text in _rule_texts()) + "\n")
    owned = _table(("flag", "decided by"), ((f"`{k}`", _coded(v)) for k, v in OWNED.items()))
    refused = _table(("flag", "reason"), ((f"`{k}`", v) for k, v in UNSUPPORTED.items()))
    parts.append(_FLAGS + owned + _NO_FLAGS + refused)
    return "\n".join(parts)


def _properties(
    schema: dict[str, Any], keys: Iterable[Entry]
) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Yield every key with its property in the schema."""
    for entry in keys:
        node = schema
        for part in entry.key.replace("[]", "").split("."):
            node = _definition(schema, node)["properties"][part]
        yield entry, node


def _definition(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference to the definition of a section, directly or as the items of a list."""
    target: dict[str, Any] = node.get("items", node)
    reference: str | None = target.get("$ref")
    if reference is None:
        return target
    definition: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
    return definition


def _section(entry: Entry) -> str:
    rows = (
        (
            f"`{item.key.removeprefix(f'{entry.key}.')}`",
            item.expected,
            "required" if item.default is None else f"`{item.default}`",
            item.meaning,
        )
        for item in entries(Config)
        if item.key.startswith(f"{entry.key}.") and (not item.section or item.default == "[]")
    )
    table = _table(("key", "accepts", "default", "meaning"), rows)
    return f"## `{entry.key}`\n\n{entry.meaning}\n\n{table}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in escaped)


def _rule_texts() -> Iterator[str]:
    """Yield what each rule says of itself, in the order in which they are judged."""
    for name, function in inspect.getmembers(rules, inspect.isfunction):
        if name.startswith("verify_") and name != "verify_all":
            yield (function.__doc__ or "").partition("\n")[0]


def _coded(text: str) -> str:
    key, separator, rest = text.partition(":")
    return f"`{key}`{separator}{rest}" if "." in key and " " not in key else text
