"""YAML text to plain values with line numbers; refuses what plain YAML readers accept silently.

The scalars are those of YAML 1.2: `off`, `yes` and `12:30` stay text, `true` and `false` are the
only booleans. A reader of YAML 1.1 would turn `policy: off` into `policy: false`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import yaml

from appliance.errors import ApplianceError, ExitCode, Fault

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]

MAX_DEPTH = 16
MAX_ALIASES = 8
MAX_SCALARS = 10_000
MAX_VALUES = 20_000  # with aliases written out
LONGEST_INTEGER = 30  # digits; Python refuses to convert thousands, and no key needs more

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INDENTED_BY_TAB = re.compile(r" *\t")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass
class Document:
    """One parsed file.

    Attributes:
        data: The top mapping.
        lines: Key such as `gate.overrides[0].until` to its line, from 1.
        faults: Duplicate keys, tags and keys that are not text; the values beside them are kept.
    """

    name: str
    data: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def parse_document(text: str, name: str) -> Document:
    """Return the values and lines of one YAML document.

    Args:
        text: The file's text.
        name: How messages call the file.

    Raises:
        ApplianceError: Exit 10, if the text is no YAML, no mapping, empty, or a bomb.
    """
    document = Document(name)
    try:
        _verify_events(text, document)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        raise _stop(_syntax_fault(error, text, name)) from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        fault = Fault("CONFIG_SYNTAX", name, "must be YAML text", reason, "mend the file")
        raise _stop(fault) from None
    if root is None:
        what, fix = "must hold a mapping of sections", "start from config/appliance.yaml"
        raise _stop(Fault("CONFIG_EMPTY", name, what, "an empty file", fix))
    if not isinstance(root, yaml.MappingNode):
        value = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        what = "must be a mapping of sections at the top"
        fix = "write `version: 1` and the sections, each with a colon"
        raise _stop(Fault("CONFIG_TOP", f"{name}:{_line(root)}", what, value, fix))
    _Reader(document).read_mapping(root, document.data, "", 0)
    return document


def _verify_events(text: str, document: Document) -> None:
    """Refuse bombs and note tags before a tree is built; reading events needs no recursion."""
    depth = aliases = scalars = 0
    for event in yaml.parse(text, Loader=_LOADER):
        mark = event.start_mark
        where = f"{document.name}:{mark.line + 1}" if mark else document.name
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        elif isinstance(event, yaml.ScalarEvent):
            scalars += 1
        if depth > MAX_DEPTH:
            what, fix = f"must nest at most {MAX_DEPTH} levels", "docs/config.md needs four levels"
            raise _stop(Fault("CONFIG_DEPTH", where, what, "a deeper value", fix))
        if aliases > MAX_ALIASES:
            what = f"must use at most {MAX_ALIASES} aliases"
            raise _stop(Fault("CONFIG_ALIAS", where, what, "one more", "write the values out"))
        if scalars > MAX_SCALARS:
            what, fix = f"must hold at most {MAX_SCALARS} words", "start from config/appliance.yaml"
            raise _stop(Fault("CONFIG_SIZE", where, what, "more", fix))
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag:
            what, value = "must not carry a YAML tag", shown(event.tag)
            document.faults.append(Fault("CONFIG_TAG", where, what, value, "remove the tag"))


class _Reader:
    """Turns nodes into values; counts them, since an alias repeats a whole branch."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._count = 0

    def read_mapping(
        self, node: yaml.MappingNode, into: dict[str, Value], path: str, depth: int
    ) -> None:
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                what, value = "must have a plain word as key", "a list or mapping"
                fault = Fault("CONFIG_KEY", self._where(line, path), what, value, "remove the key")
                self._document.faults.append(fault)
                continue
            key = str(key_node.value)
            child = f"{path}.{key}" if path else key
            if key in into:
                value = f"a second value, the first is on line {self._document.lines[child]}"
                where, what, fix = self._where(line, child), "must be stated once", "remove one"
                self._document.faults.append(Fault("CONFIG_DUPLICATE_KEY", where, what, value, fix))
                continue
            self._document.lines[child] = line
            into[key] = self.read(value_node, child, depth + 1)

    def read(self, node: yaml.Node, path: str, depth: int) -> Value:
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            what = f"must hold at most {MAX_VALUES} values with its aliases written out"
            where, fix = self._where(_line(node), path), "write the values out"
            raise _stop(Fault("CONFIG_ALIAS", where, what, "more", fix))
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Value] = {}
            self.read_mapping(node, mapping, path, depth)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, f"{path}[{n}]", depth) for n, item in enumerate(node.value)]
        return scalar(str(node.value), plain=not getattr(node, "style", None))

    def _item(self, node: yaml.Node, path: str, depth: int) -> Value:
        self._document.lines[path] = _line(node)
        return self.read(node, path, depth + 1)

    def _where(self, line: int, path: str) -> str:
        return f"{self._document.name}:{line} {path}".rstrip()


def scalar(text: str, *, plain: bool) -> Value:
    """Return the value of one scalar by the rules of YAML 1.2; quoted text stays text."""
    if not plain:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= LONGEST_INTEGER:
        return int(text)
    if _FLOAT.fullmatch(text) and len(text) <= LONGEST_INTEGER:
        return float(text)
    if match := _NOT_FINITE.fullmatch(text):
        return float(match[1] + match[2].lower())
    return text


def shown(value: Value) -> str:
    """Return a value of the file for a one-line message, cut at 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = f"[{', '.join(map(shown, value))}]" if isinstance(value, list) else str(value)
    if len(text) > 60:  # noqa: PLR2004 - of the sentence above
        text = f"{text[:57]}..."
    printable = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return f'"{printable}"' if isinstance(value, str) else printable


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax_fault(error: yaml.MarkedYAMLError, text: str, name: str) -> Fault:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    problem = (error.problem or "a syntax error").removesuffix(".").removeprefix("but ")
    fix = "check indentation, colons and quotes on this line and the one above"
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if mark and _INDENTED_BY_TAB.match(line):
        problem, fix = "a tab at the start of the line", "indent with spaces"
    elif mark and "cannot start any token" in problem and mark.column < len(line):
        letter = line[mark.column]
        problem = "a tab" if letter == "\t" else f"`{letter}`, which no plain text begins with"
        fix = "write a space in its place" if letter == "\t" else "put the text in quotes"
    return Fault("CONFIG_SYNTAX", where, "must be one YAML document", problem, fix)


def _stop(fault: Fault) -> ApplianceError:
    return ApplianceError(ExitCode.CONFIG, fault)
