"""The YAML reader: what it accepts as which value, and what it refuses before a tree is built."""

from __future__ import annotations

import contextlib
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.document import parse_document, scalar, shown
from appliance.errors import ApplianceError


def code_of(text: str) -> str:
    with pytest.raises(ApplianceError) as caught:
        parse_document(text, "a.yaml")
    return caught.value.faults[0].code


@pytest.mark.parametrize("word", ["off", "on", "yes", "no", "12:30", "2026-12-31", "1_000", "0x"])
def test_scalar_word_of_yaml_1_1_stays_text(word: str) -> None:
    assert scalar(word, plain=True) == word


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("", None),
        ("17", 17),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        (".inf", math.inf),
    ],
)
def test_scalar_plain_word_takes_its_value(word: str, value: object) -> None:
    found = scalar(word, plain=True)

    assert found == value
    assert type(found) is type(value)


def test_scalar_quoted_number_stays_text() -> None:
    assert scalar("17", plain=False) == "17"


def test_scalar_nan_becomes_a_number_the_schema_can_refuse() -> None:
    found = scalar(".nan", plain=True)

    assert isinstance(found, float)
    assert math.isnan(found)


def test_scalar_integer_of_thousands_of_digits_stays_text() -> None:
    assert isinstance(scalar("9" * 10_000, plain=True), str)


@given(st.text())
def test_scalar_never_raises(text: str) -> None:
    scalar(text, plain=True)


@given(st.text(max_size=200))
def test_shown_value_is_one_short_printable_line(text: str) -> None:
    line = shown(text)

    assert line.isprintable()
    assert len(line) <= 62 * 10


def test_document_keeps_the_line_of_every_key_and_item() -> None:
    document = parse_document("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "a.yaml")

    assert document.data == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert document.lines == {"a": 1, "a.b": 2, "a.c": 3, "a.c[0]": 4, "a.c[1]": 5, "a.c[1].d": 5}


def test_document_duplicate_key_is_a_fault_and_the_first_value_stays() -> None:
    document = parse_document("a: 1\nb: 2\na: 3\n", "a.yaml")

    assert document.data == {"a": 1, "b": 2}
    assert str(document.faults[0]) == (
        "error[CONFIG_DUPLICATE_KEY] a.yaml:3 a: must be stated once, got a second value, the "
        "first is on line 1; remove one."
    )


def test_document_tag_is_a_fault_and_nothing_is_constructed() -> None:
    document = parse_document("a: !!python/object/apply:os.system [exit]\n", "a.yaml")

    assert [fault.code for fault in document.faults] == ["CONFIG_TAG"]
    assert document.data == {"a": ["exit"]}


def test_document_collection_as_key_is_a_fault() -> None:
    document = parse_document("? [x]\n: 1\nb: 2\n", "a.yaml")

    assert [fault.code for fault in document.faults] == ["CONFIG_KEY"]
    assert document.data == {"b": 2}


def test_document_alias_repeats_a_value() -> None:
    document = parse_document("a: &x {b: 1}\nc: *x\n", "a.yaml")

    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "CONFIG_EMPTY"),
        ("# nothing\n", "CONFIG_EMPTY"),
        ("- a\n", "CONFIG_TOP"),
        ("word\n", "CONFIG_TOP"),
        ("a: 1\n---\nb: 2\n", "CONFIG_SYNTAX"),
        ("a: [1\n", "CONFIG_SYNTAX"),
        ("a:\n\tb: 1\n", "CONFIG_SYNTAX"),
        ("a: *nowhere\n", "CONFIG_SYNTAX"),
        ("a: \x00\n", "CONFIG_SYNTAX"),
        ("a: &x 1\nb: [" + "*x, " * 9 + "]\n", "CONFIG_ALIAS"),
        ("a: &x {b: *x}\n", "CONFIG_ALIAS"),
        ("".join(f"{' ' * n}a:\n" for n in range(1, 40)), "CONFIG_DEPTH"),
        ("a: " + "[" * 17 + "]" * 17, "CONFIG_DEPTH"),
        ("a: [" + "1, " * 20_000 + "]\n", "CONFIG_SIZE"),
    ],
)
def test_document_that_is_no_small_mapping_is_refused(text: str, code: str) -> None:
    assert code_of(text) == code


def test_document_aliases_that_expand_beyond_the_limit_are_refused() -> None:
    items = "1, " * 4_000
    text = f"a: &a [{items}]\nb: [*a, *a, *a, *a, *a, *a]\n"

    assert code_of(text) == "CONFIG_ALIAS"


@pytest.mark.parametrize("text", ["a: " + "[" * 1_000_000, "a: " + "{a: " * 250_000])
def test_document_nested_bomb_of_a_mebibyte_is_refused_within_a_second(text: str) -> None:
    started = time.monotonic()

    code = code_of(text)

    assert code in ("CONFIG_DEPTH", "CONFIG_SYNTAX")
    assert time.monotonic() - started < 1


@given(st.text(alphabet="a:-[]{}&*!|>'\"#\n ,?%@0.", max_size=60))
def test_document_of_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ApplianceError):  # any other exception fails
        parse_document(text, "a.yaml")


@pytest.mark.parametrize(
    ("text", "line", "value", "fix"),
    [
        ("a:\n\tb: 1\n", 2, "a tab at the start of the line", "indent with spaces"),
        ("a:\n  b: 1\n \tc: 1\n", 3, "a tab at the start of the line", "indent with spaces"),
        ("a: @home\n", 1, "`@`, which no plain text begins with", "put the text in quotes"),
        ("a: %b\n", 1, "`%`, which no plain text begins with", "put the text in quotes"),
    ],
)
def test_document_letter_that_begins_nothing_is_named(
    text: str, line: int, value: str, fix: str
) -> None:
    with pytest.raises(ApplianceError) as caught:
        parse_document(text, "a.yaml")

    (fault,) = caught.value.faults
    assert (fault.code, fault.where) == ("CONFIG_SYNTAX", f"a.yaml:{line}")
    assert (fault.value, fault.fix) == (value, fix)
