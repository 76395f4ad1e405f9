"""Takes secrets out of what leaves the machine: by name, by form, and by values that are known.

A key file is never read, so its keys are found by the header or the setting that they stand in.
What looks like a secret and is none is lost as well; the other mistake cannot be taken back.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

REMOVED = "[removed]"

SHORTEST = 6
"""Characters of a value that is looked for everywhere; a shorter one would take words apart."""

_ENDS = (
    *(f"{mark}key{many}" for mark in "_-." for many in ("", "s")),
    *(f"{kind}key" for kind in ("api", "access", "secret", "private", "signing")),
    *("token", "secret", "secrets", "password", "passwd", "passphrase", "_pass", "-pass"),
    *("credential", "credentials", "authorization", "cookie", "_auth", "-auth", "_pwd", "serial"),
)
"""Ends of names whose values are secrets; a board's serial names its owner to the vendor."""

_COUNTED = tuple(f"per{mark}{what}" for mark in "_- " for what in ("token", "key"))
_MARKERS = tuple(f"{what}_token" for what in ("bos", "eos", "pad", "unk", "stop", "image"))
_TENSORS = ("missing_keys", "unexpected_keys", "cache_key")
_PLAIN = (*_COUNTED, *_MARKERS, *_TENSORS)
"""Ends of names that count something or tell of a checkpoint."""

_PLACES = ("file", "files", "path", "dir")
"""Ends of names that say where a secret is; places are told."""

_SPEAKING = r"(?=[\w.\-]{0,128}?(?:secret|passw|credential))"


def _ends(ends: tuple[str, ...], how: str) -> list[str]:
    return [f"(?{how}{re.escape(end)})" for end in ends]


_IS_SECRET = f"(?:{'|'.join(_ends(_ENDS, '<='))}){''.join(_ends(_PLAIN, '<!'))}"
_WORD = r"[\w.\-]{1,128}+"
_IN_NAME = rf"(?:{_WORD}{_IS_SECRET}|{_SPEAKING}{_WORD}{''.join(_ends(_PLACES, '<!'))})"
_NAME = re.compile(rf"(?i){_IN_NAME}")
_WRAPPED = r"(?:\w{1,20}\()?(?:[bru](?=\\{0,8}[\"']))?"  # SecretStr('...'), b'...'
_VALUE = (
    rf"(?:{_WRAPPED}(?P<mark>\\*(?:\"\"\"|'''|[\"']))"  # the quotes of JSON in JSON too
    r"(?:(?!(?P=mark))(?:\\[^\r\n]|[^\r\n\\]))*"
    r"|\[[^\]]{0,4096}\]?|\{[^}]{0,4096}\}?"
    r"|[|>][+\-]?[ \t]*(?:\r?\n[ \t]+[^\r\n]*)+"  # a block of YAML
    r"|-[ \t]+[^\r\n]*(?:\r?\n[ \t]*-[ \t]+[^\r\n]*)*"
    r"|[^\s\"'\\]+)"
)
_SETTING = re.compile(
    rf"(?i)(?P<name>(?<![\w.\-]){_IN_NAME}\\*[\"']?\s{{0,8}}[=:]\s{{0,8}}"
    rf"|(?<![\w.\-])(?=-){_IN_NAME}(?:[ \t]{{1,8}}|\\*[\"'],[ \t]{{0,8}})"
    rf"|\bapi[ ]keys?[ ]?[=:][ ]{{0,8}})(?P<value>{_VALUE})"
)
_RANDOM = r"(?=[^\s\"'\\]{0,64}\d)(?=[^\s\"'\\]{0,64}[A-Za-z])"
"""Letters and digits, as words have not."""

_KEY_BLOCKS = (
    re.compile(
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
        re.DOTALL,
    ),
    # The begin of the text may lie inside a block.
    re.compile(r"\A(?:(?!-----BEGIN ).)*?-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----", re.DOTALL),
)
_KEY_BLOCK = "PRIVATE KEY-----"
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(?i)(?P<kept>\b(?:authorization|cookie|x-api-key)\b\\*[\"']?\s{0,8}[:=,]\s{0,8}"
            r"b?\\*[\"']?)[^\r\n\"'\\]+"
        ),
        rf"\g<kept>{REMOVED}",
    ),
    (
        re.compile(r"(?P<kept>\b(?:[Bb]earer|BEARER|Basic)(?:\s{1,8}|%20|\+))[\w.~+/=\-]{4,}"),
        rf"\g<kept>{REMOVED}",
    ),
    (
        re.compile(
            r"(?i)(?P<kept>\b(?:token|api[ _\-]?key|password|passphrase|secret|authorization)\b"
            r"[ \t]{1,4}(?:is[ \t]|[\-=]>[ \t]{0,4})?)"
            rf"{_RANDOM}[\w.~+/=\-]{{10,}}"
        ),
        rf"\g<kept>{REMOVED}",
    ),
    (
        re.compile(
            r"(?i)(?P<kept>\bkeys?\b\\*[\"']?\s{0,8}[=:]\s{0,8}\\*[\"']?)"
            rf"{_RANDOM}[\w\-]{{12,}}+(?![.\w])"
        ),
        rf"\g<kept>{REMOVED}",
    ),
    (
        re.compile(r"(?i)(?P<kept>\b[a-z][a-z0-9+.\-]{0,20}://)[^\s/?#\"'\\]{1,512}@"),
        rf"\g<kept>{REMOVED}@",
    ),
    (
        re.compile(
            r"(?i)(?P<kept>[?&][\w\-]{0,64}(?:token|key|secret|sig|signature|password|auth|"
            r"credential)=)[^&\s\"'\\#]+"
        ),
        rf"\g<kept>{REMOVED}",
    ),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{20,}|(?:sk|nvapi|glpat)-[\w\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
            r"|github_pat_\w{16,}|xox[abeprs]-[\w\-]{10,}|AKIA[0-9A-Z]{16}"
            r"|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)"
        ),
        REMOVED,
    ),
)


def is_secret_name(name: str) -> bool:
    """Tell whether a setting, a variable or a flag of this name holds a secret."""
    return _NAME.fullmatch(name) is not None or name.lower() in {"key", "pass", "auth"}


class Scrubber:
    """Knows some values that are secrets, and how the others look."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Know the values of the environment's variables that are named like secrets."""
        self._known: set[str] = set()
        self._learn(value for name, value in environ.items() if is_secret_name(name))

    def learn_values(self, value: object) -> None:
        """Know the values below keys whose names are those of secrets."""
        self._learn(_secrets(value))

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for value in sorted(self._known, key=lambda known: (-len(known), known)):
            text = text.replace(value, REMOVED)
        for block in _KEY_BLOCKS if _KEY_BLOCK in text else ():
            text = block.sub(REMOVED, text)
        for form, kept in _FORMS:
            text = form.sub(kept, text)
        return _SETTING.sub(_without_value, text)

    def plain(self, value: object) -> object:
        """Return plain values, as JSON has them, without secrets."""
        if isinstance(value, dict):
            return self._mapping(cast("dict[str, object]", value))
        if isinstance(value, list | tuple):
            return self._sequence(list(cast("Iterable[object]", value)))
        if isinstance(value, str):
            return self.text(value)
        return REMOVED if str(value) in self._known else value

    def json_or_text(self, text: str) -> str:
        """Return a file's text without secrets; one that is JSON stays JSON."""
        try:
            return dump(self.plain(json.loads(text)))
        except (ValueError, RecursionError):
            return self.text(text)

    def _mapping(self, value: dict[str, object]) -> dict[str, object]:
        name = value.get("name")
        named = isinstance(name, str) and is_secret_name(name)
        return {
            self.text(key): REMOVED
            if member not in (None, "")
            and ((is_secret_name(key) and key != "key") or (named and key == "value"))
            else self.plain(member)
            for key, member in value.items()
        }

    def _sequence(self, value: list[object]) -> list[object]:
        lines = [member for member in value if isinstance(member, str)]
        if len(lines) == len(value) and any(_KEY_BLOCK in line for line in lines):
            return list(self.text("\n".join(lines)).splitlines())
        cleaned: list[object] = []
        before: object = None
        for member in value:
            flag = isinstance(before, str) and before.startswith("-") and is_secret_name(before)
            cleaned.append(REMOVED if flag else self.plain(member))
            before = member
        return cleaned

    def _learn(self, values: Iterable[str]) -> None:
        for value in values:
            lines = (line.strip() for line in value.splitlines())  # a key file in a variable
            forms = {value, *lines, json.dumps(value)[1:-1], quote(value, safe="")}
            self._known |= {form for form in forms if len(form) >= SHORTEST and form != REMOVED}


def dump(value: object) -> str:
    """Return plain values as indented JSON; what JSON cannot say becomes text."""
    return json.dumps(value, indent=1, default=str) + "\n"


def _without_value(match: re.Match[str]) -> str:
    mark = match["mark"] or ""
    return f"{match['name']}{mark}{REMOVED}"


def _secrets(value: object, *, below: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in cast("dict[str, object]", value).items():
            yield from _secrets(member, below=below or is_secret_name(str(key)))
    elif isinstance(value, list):
        for member in cast("list[object]", value):
            yield from _secrets(member, below=below)
    elif below and value is not None and not isinstance(value, bool):
        yield str(value)
