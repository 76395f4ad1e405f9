"""Chat templates as the engine renders them: jinja2's sandbox with transformers' additions."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.checkpoint.document import as_list, as_object, is_regular, parse_unique

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jinja2.parser import Parser

TEMPLATE_BYTES_MAX = 4 * 1024**2

_FIRST, _ANSWER, _SECOND = "What is 17 plus 25?", "It is 42.", "And 5 more?"
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TemplateProblem(Exception):  # noqa: N818 - no error of ours: the checkpoint's
    """A template that cannot be used.

    Attributes:
        where: File, and the name of the template where it holds several.
        what: What was expected.
        value: What happened.
    """

    def __init__(self, where: str, what: str, value: str) -> None:
        """Keep the parts of the later message."""
        super().__init__(f"{where}: {what}, got {value}")
        self.where = where
        self.what = what
        self.value = value


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; rendering skips the mark."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def find_templates(root: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return every chat template of a checkpoint by where it stands.

    Args:
        root: Directory of the checkpoint.
        settings: Content of tokenizer_config.json.

    Raises:
        TemplateProblem: If one is not text.
    """
    found: dict[str, str] = {}
    single = root / "chat_template.jinja"
    if is_regular(single):
        found[single.name] = _read(single)
    table = root / "chat_template.json"
    if is_regular(table):
        content = as_object(_parse(table))
        found |= _templates(table.name, (content or {}).get("chat_template"))
    return found | _templates("tokenizer_config.json", settings.get("chat_template"))


def read_template(path: Path) -> dict[str, str]:
    """Return the template of a file that stands for a checkpoint's own, as `find_templates` does.

    Raises:
        TemplateProblem: If it cannot be read.
    """
    return {str(path): _read(path)}


def try_template(where: str, source: str, settings: Mapping[str, Any]) -> int:
    """Render a conversation of two turns, and one with a tool where the template knows of tools.

    Returns:
        Letters of the rendered conversation.

    Raises:
        TemplateProblem: If it does not compile, refuses the conversation, or drops what was said.
    """
    environment = _environment()
    try:
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        value = f"line {error.lineno}: {error.message}"
        raise TemplateProblem(where, "a template that compiles", value) from None
    tokens = {name: _token(settings.get(name)) for name in _TOKENS}
    text = _render(where, template, tokens)
    if _SECOND not in text or _FIRST not in text:
        what = "a template that keeps what the user says"
        raise TemplateProblem(where, what, repr(text[:120]))
    if "tools" in source:
        _render(where, template, tokens | {"tools": [_TOOL]})
    return len(text)


def _render(where: str, template: jinja2.Template, context: Mapping[str, Any]) -> str:
    """Render with plain texts, or with lists of parts where the template wants those."""
    problems: list[str] = []
    for in_parts in (False, True):
        turns = (("user", _FIRST), ("assistant", _ANSWER), ("user", _SECOND))
        messages = [
            {"role": role, "content": [{"type": "text", "text": said}] if in_parts else said}
            for role, said in turns
        ]
        try:
            return template.render(messages=messages, add_generation_prompt=True, **context)
        except Exception as error:  # noqa: BLE001 - a template raises whatever its author wrote
            problems.append(f"{type(error).__name__}: {str(error)[:160]}")
    raise TemplateProblem(where, "a template that renders two turns", problems[0])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    filters: dict[str, Any] = environment.filters
    filters["tojson"] = _to_json
    names = cast("dict[str, Any]", environment.globals)
    names |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return dt.datetime.now(tz=dt.UTC).strftime(form)


def _token(value: object) -> str:
    content = (as_object(value) or {}).get("content", value)
    return content if isinstance(content, str) else ""


def _templates(where: str, value: object) -> dict[str, str]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {where: value}
    found: dict[str, str] = {}
    for entry in as_list(value) or [None]:
        table = as_object(entry) or {}
        name, source = table.get("name"), table.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            what = "a text, or a list of names and templates"
            raise TemplateProblem(where, what, repr(value)[:120])
        found[f"{where} {name}"] = source
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(TEMPLATE_BYTES_MAX + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateProblem(path.name, "a readable text", str(error)[:120]) from None
    if len(content) > TEMPLATE_BYTES_MAX:
        what = f"at most {TEMPLATE_BYTES_MAX} bytes"
        raise TemplateProblem(path.name, what, "more")
    return text


def _parse(path: Path) -> object:
    try:
        return parse_unique(_read(path).encode())
    except (ValueError, RecursionError) as error:
        raise TemplateProblem(path.name, "a JSON object", str(error)[:120]) from None
