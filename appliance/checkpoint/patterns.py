"""Which modules a checkpoint's exclude, ignore and target lists name."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import cached_property

from appliance.checkpoint.expressions import (
    LENGTH_MAX,
    NONE,
    Expressions,
    PatternError,
    Texts,
    compile_all,
    texts,
)

__all__ = [
    "TEXT_PREFIXES",
    "Matcher",
    "PatternError",
    "canonical",
    "expression_matcher",
    "shell_matcher",
]

TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""How checkpoints spell the root of the language model; longest first."""

_PLAIN_ROOT = "model."
_ROOT = re.compile("|".join(map(re.escape, TEXT_PREFIXES)))
_DIGIT = re.compile(r"[0-9]")


def canonical(name: str) -> str:
    """Return a module name or pattern with the language model's root spelled `model.`.

    Exclude lists and tensors of one checkpoint often differ in that root only, and wrapper classes
    add a `.linear` at the end.
    """
    match = _ROOT.match(name)
    if match is not None and match[0] != _PLAIN_ROOT:
        name = f"{_PLAIN_ROOT}{name[match.end() :]}"
    return name.removesuffix(".linear")


@dataclass(frozen=True)
class Matcher:
    """A list of patterns, ready to be asked for many names.

    Attributes:
        literals: Canonical names that match themselves.
        parents: A literal also covers the modules below it.
        globs: Shell wildcards over the canonical name.
        expressions: Regular expressions, matched from the start of the name as stored.
        everything: A class name covers every linear.
    """

    literals: frozenset[str]
    parents: bool
    globs: Expressions = NONE
    expressions: Expressions = NONE
    everything: bool = False

    def matches(self, name: str) -> bool:
        """Tell whether a module of the checkpoint is meant."""
        if self.everything:
            return True
        plain = canonical(name)
        if plain in self.literals or self.globs.matches(plain) or self.expressions.matches(plain):
            return True
        if plain != name and self.expressions.matches(name):
            return True
        return self.parents and self._covers(plain)

    @cached_property
    def tells_layers_apart(self) -> bool:
        """Whether two layers with indexes of equal length may be answered differently.

        A pattern without a digit treats all digits alike, unless it refers back to itself.
        """
        every = (*self.literals, *self.globs.source, *self.expressions.source)
        return any("(?P=" in text or _DIGIT.search(text) for text in every)

    def mentions(self, name: str) -> bool:
        """Tell whether a literal is part of the name, as older exporters meant it."""
        return self._parts.matches(name)

    @cached_property
    def _parts(self) -> Texts:
        return texts(parts=self.literals)

    def _covers(self, name: str) -> bool:
        parent = name.rpartition(".")[0]
        while parent:
            if parent in self.literals:
                return True
            parent = parent.rpartition(".")[0]
        return False


def shell_matcher(patterns: list[str]) -> Matcher:
    """Return the matcher of ModelOpt's lists: names, names of parents, and shell wildcards.

    Raises:
        PatternError: As `compile_all`.
    """
    plain = [canonical(pattern) for pattern in patterns]
    wild = {pattern for pattern in plain if any(sign in pattern for sign in "*?[")}
    globs = compile_all([_expression(pattern) for pattern in sorted(wild)])
    return Matcher(literals=frozenset(plain) - wild, parents=True, globs=globs)


def expression_matcher(patterns: list[str]) -> Matcher:
    """Return the matcher of compressed-tensors' lists: names, class names, `re:` expressions.

    Raises:
        PatternError: As `compile_all`.
    """
    names = [pattern for pattern in patterns if not pattern.startswith("re:")]
    return Matcher(
        literals=frozenset(canonical(name) for name in names),
        parents=False,
        expressions=compile_all(each[3:] for each in patterns if each.startswith("re:")),
        everything="Linear" in names,
    )


def _expression(pattern: str) -> str:
    """Return the regular expression of a shell wildcard; `fnmatch` knows what `[` means."""
    if "[" in pattern:
        if len(pattern) > LENGTH_MAX:
            raise PatternError(f"{pattern[:80]}... with {len(pattern)} characters")
        return fnmatch.translate(pattern)
    return re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
