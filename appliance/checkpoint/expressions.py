"""Matches a name against many regular expressions in bounded time, whatever the list holds.

Nearly all entries of real lists are a literal with or without `.*` around it: those become sets of
texts. Literals between several `.*` are searched one after the other. What is left goes to `re`,
unless it could take time that grows out of hand.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LENGTH_MAX = 2_000
COMPLEX_MAX = 1_000
"""Expressions that need `re`; each costs about a quarter of a microsecond a name."""

_WILD_MAX = 2
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_LITERAL = re.compile(r"(?:[A-Za-z0-9_/ -]|\\[^A-Za-z0-9])+")
_FIXED = re.compile(r"(?:[A-Za-z0-9_/ -]|\\[^A-Za-z0-9]|\\[dwsDWS]|\.(?![*+?{]))+")
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\]", re.DOTALL)
_REPEAT = re.compile(r"[*+?]|\{\d{0,9},(?P<most>\d{0,9})\}|\{\d{1,9}\}")
_BACK = re.compile(r"\\[1-9]")
_NARROW = ("\\d", "[0-9]")  # a number in a name: nothing beside it can take its digits
_FEW = 8
_OPTIONAL_MAX = 12
_ANY = ".*"


class PatternError(ValueError):
    """A pattern is no regular expression, is absurdly long, or could take forever."""


@dataclass(frozen=True)
class Texts:
    """Sets of texts that a name may equal, begin with, end with or hold."""

    equal: frozenset[str] = frozenset()
    starts: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    sizes: tuple[tuple[int, ...], ...] = ((), (), ())

    def matches(self, name: str) -> bool:
        """Tell whether one of the texts fits; the time does not depend on how many there are."""
        starts, ends, parts = self.sizes
        return (
            name in self.equal
            or any(name[:size] in self.starts for size in starts if size <= len(name))
            or any(name[len(name) - size :] in self.ends for size in ends if size <= len(name))
            or any(
                name[at : at + size] in self.parts
                for size in parts
                for at in range(len(name) - size + 1)
            )
        )


def texts(
    equal: Iterable[str] = (),
    starts: Iterable[str] = (),
    ends: Iterable[str] = (),
    parts: Iterable[str] = (),
) -> Texts:
    """Return sets of texts with the sizes that occur in them."""
    begins, closes, inner = frozenset(starts), frozenset(ends), frozenset(parts)
    sizes = tuple(tuple(sorted(set(map(len, each)))) for each in (begins, closes, inner))
    return Texts(frozenset(equal), begins, closes, inner, sizes)


@dataclass
class _Sorted:
    """Expressions by kind while they are read."""

    equal: set[str] = field(default_factory=set)
    starts: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    rest: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expressions:
    """Regular expressions, matched from the start of a name as `re.match` does.

    Attributes:
        simple: Those that are texts.
        rest: All others, in one if that is possible.
        source: What was given, for whoever asks what the list distinguishes.
    """

    simple: Texts = field(default_factory=Texts)
    rest: tuple[re.Pattern[str], ...] = ()
    source: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Tell whether one of the expressions matches a beginning of the name."""
        return self.simple.matches(name) or any(each.match(name) for each in self.rest)


NONE = Expressions()


def compile_all(expressions: Iterable[str]) -> Expressions:
    """Make expressions ready to be asked for many names.

    Raises:
        PatternError: If one does not compile, is too long, or could take time that grows with a
            power of the name's length; or if more than `COMPLEX_MAX` of them need `re`.
    """
    source = tuple(dict.fromkeys(expressions))
    found = _Sorted()
    for expression in source:
        if len(expression) > LENGTH_MAX:
            raise PatternError(f"{expression[:80]}... with {len(expression)} characters")
        if not _sort(expression, found):
            found.rest.append(_checked(expression))
    if len(found.rest) > COMPLEX_MAX:
        raise PatternError(f"{len(found.rest)} expressions, at most {COMPLEX_MAX} of this kind")
    simple = texts(found.equal, found.starts, found.ends, found.parts)
    return Expressions(simple, _joined(found.rest), source)


def _joined(expressions: list[str]) -> tuple[re.Pattern[str], ...]:
    """Return one expression for all, since one match of many is faster than many matches."""
    if not expressions:
        return ()
    try:
        return (_compile("|".join(f"(?:{each})" for each in expressions)),)
    except re.error:  # two of them name a group alike, or one sets flags for itself
        return tuple(_compile(each) for each in expressions)


def _sort(expression: str, found: _Sorted) -> bool:
    """Put an expression among the texts if it is one; tell whether it is."""
    inner = expression.removeprefix("^")
    is_open = inner.startswith(_ANY)
    inner = inner.removeprefix(_ANY)
    is_whole = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_whole else inner
    if inner.endswith(_ANY) and not inner.endswith("\\.*"):
        inner, is_whole = inner.removesuffix(_ANY), False
    if not _LITERAL.fullmatch(inner):
        return False
    text = _ESCAPED.sub(r"\1", inner)
    kinds = {
        (False, False): found.starts,
        (False, True): found.equal,
        (True, False): found.parts,
        (True, True): found.ends,
    }
    kinds[is_open, is_whole].add(text)
    return True


def _checked(expression: str) -> str:
    """Return an expression that is sound, in a form that searches literals one after another."""
    try:
        _compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"{expression[:80]} ({error})") from None
    rewritten = _without_return(expression)
    if rewritten is not None:
        return rewritten
    if _wildness(expression) > _WILD_MAX:
        raise PatternError(f"{expression[:80]}, which may take forever to match")
    return expression


def _compile(expression: str) -> re.Pattern[str]:
    """Compile without the remarks that `re` makes on what later versions may read otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(expression)


def _without_return(expression: str) -> str | None:
    """Rewrite pieces of fixed width between `.*` so that none is searched twice; None if not so.

    The first place of such a piece is as good as any later one, so it may be kept for good.
    """
    inner = expression.removeprefix("^")
    is_whole = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if is_whole else inner
    first, *pieces = re.split(r"(?<!\\)\.\*", inner)
    if not pieces or not all(_FIXED.fullmatch(piece) for piece in (first, *pieces) if piece):
        return None
    last = pieces.pop() if is_whole else ""
    middle = "".join(f"(?>.*?{piece})" for piece in pieces if piece)
    # With an end, the last piece must stand there: only the rest of the name is left to skip.
    return f"{first}{middle}.*{last}$" if is_whole else f"{first}{middle}"


@dataclass
class _Group:
    """What stands between two parentheses: whether it can match in more than one way."""

    is_flexible: bool = False


def _wildness(expression: str) -> int:
    """Return how many repeats of an expression can trade characters with each other.

    `_WILD_MAX` + 1 stands for all that may take forever: a repeat of what repeats or chooses, and
    references back.
    """
    groups, closed = [_Group()], _Group()
    wild = optional = at = 0
    before = ""
    while at < len(expression):
        repeat = _REPEAT.match(expression, at) if before else None
        if repeat is None:
            before = expression[at] if (one := _ONE.match(expression, at)) is None else one[0]
            at += len(before)
            if _BACK.fullmatch(before) or expression.startswith("(?P=", at - 1):
                return _WILD_MAX + 1
            closed = _step(before, groups)
            continue
        if closed.is_flexible and repeat[0] != "?":
            return _WILD_MAX + 1
        at = repeat.end()
        optional += repeat[0] == "?"
        wild += _is_long(repeat) and before not in _NARROW and at < len(expression)
        groups[-1].is_flexible = True
        at += expression.startswith(("?", "+"), at)  # lazy and possessive repeats
        before, closed = "", _Group()
    return wild if optional <= _OPTIONAL_MAX else _WILD_MAX + 1


def _step(sign: str, groups: list[_Group]) -> _Group:
    """Follow one sign into or out of a group; return the group that it closes."""
    if sign == "(":
        groups.append(_Group())
    elif sign == "|":
        groups[-1].is_flexible = True
    elif sign == ")" and len(groups) > 1:
        closed = groups.pop()
        groups[-1].is_flexible |= closed.is_flexible
        return closed
    return _Group()


def _is_long(repeat: re.Match[str]) -> bool:
    most = repeat["most"]
    return repeat[0] in ("*", "+") or (most is not None and (not most or int(most) > _FEW))
