"""Exclude lists of any length and any expression are asked in bounded time, with `re`'s answers."""

from __future__ import annotations

import fnmatch
import re
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from appliance.checkpoint.document import ELEMENTS_MAX, parse_unique
from appliance.checkpoint.expressions import COMPLEX_MAX, PatternError, compile_all
from appliance.checkpoint.patterns import expression_matcher, shell_matcher

MODULES = ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.up_proj", "linear_attn.in_proj_qkv")
NAMES = [
    *(f"model.layers.{layer}.{module}" for layer in range(64) for module in MODULES),
    *("lm_head", "model.visual.blocks.0.attn.qkv", "mtp.fc", "x" * 300),
]
EXPRESSIONS = [
    "lm_head",
    ".*visual.*",
    r"model\.layers\.0\.mlp",
    "^lm_head$",
    r".*mlp\.gate$",
    r".*layers\.(0|1|2)\..*proj",
    r".*layers\.\d+\.mlp\.experts\.\d+\..*_proj.*",
    "model.*layers.1.*proj$",
    "^(?!.*mlp).*$",
    ".*self_attn.q_proj",
    "(?i).*VISUAL.*",
    "model.layers.6[0-3].*",
    r".*\.(gate|up)_proj$",
    "(?P<a>l)m_head",
    "(?P<a>m)tp.*",
    ".*a.*b.*c.*d.*e.*f$",
]
HOSTILE = [
    "(.*)*x",
    "(a|aa)+$",
    "(a+)+$",
    "([a-z]*)*b",
    "(.*a){20}",
    "(x+x+)+y",
    "a?" * 30 + "a" * 30,
    r"(a)\1",
    "(?P<q>a)(?P=q)",
    "(((a*)*)*)*",
    ".*[a-z].*[a-z].*[a-z].*!",
    r"\w*\w*\w*\w*x",
    "(?:.*)*b",
    "[a-z]*" * 10 + "!",
    "(" * 900,
    "a" * 3000,
    "[",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_gives_the_answers_of_re(expression: str) -> None:
    compiled = compile_all([expression])

    found = [name for name in NAMES if compiled.matches(name)]

    assert found == [name for name in NAMES if re.match(expression, name)]


def test_all_expressions_together_give_the_answers_of_re() -> None:
    compiled = compile_all(EXPRESSIONS)

    for name in NAMES:
        assert compiled.matches(name) is any(re.match(each, name) for each in EXPRESSIONS)


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_expression_that_may_take_forever_is_refused(expression: str) -> None:
    with pytest.raises(PatternError):
        compile_all([expression])


WORDS = st.sampled_from(["model", r"\.", ".", ".*", "layers", r"\d", "0", "mlp", "gate", "$", "^"])


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(words=st.lists(WORDS, min_size=1, max_size=7))
def test_any_expression_of_the_usual_words_gives_the_answers_of_re(words: list[str]) -> None:
    expression = "".join(words)
    try:
        compiled = compile_all([expression])
    except PatternError:
        return

    for name in NAMES[:12] + NAMES[-4:]:
        assert compiled.matches(name) is (re.match(expression, name) is not None), expression


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    words=st.lists(
        st.sampled_from(["model", ".", "*", "?", "layers", "1", "[01]", "mlp", "gate_proj"]),
        min_size=1,
        max_size=6,
    )
)
def test_any_wildcard_gives_the_answers_of_fnmatch(words: list[str]) -> None:
    pattern = "".join(words)
    try:
        matcher = shell_matcher([pattern])
    except PatternError:
        return
    if not any(sign in pattern for sign in "*?["):
        return

    for name in NAMES[:12]:
        assert matcher.matches(name) is fnmatch.fnmatchcase(name, pattern), pattern


def test_forty_thousand_excludes_take_no_second() -> None:
    begun = time.process_time()
    names = [f"model.layers.{at}.x" for at in range(20_000)]

    by_name = expression_matcher([f"re:.*foo{at}.*" for at in range(20_000)] + names)
    by_shell = shell_matcher([f"{name}*" for name in names])
    answers = [by_name.matches(name) or by_shell.matches(name) for name in NAMES]
    mentions = [by_shell.mentions(name) for name in NAMES]

    assert not any(answers)
    assert not any(mentions)
    assert time.process_time() - begun < 3


def test_expression_that_re_remarks_on_is_compiled_quietly() -> None:
    assert compile_all(["[[a]+x"]).matches("aax")


def test_many_expressions_that_need_re_are_refused() -> None:
    with pytest.raises(PatternError, match="at most"):
        compile_all(f"a[{at}]b" for at in range(COMPLEX_MAX + 1))


def test_json_of_too_many_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{ELEMENTS_MAX + 1} elements"):
        parse_unique(b"[" + b"1," * ELEMENTS_MAX + b"1]")
