"""Judgements on what an engine answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from appliance.plan.launch_plan import LaunchPlan
from appliance.serve.canary import (
    CanaryError,
    Generation,
    judge_models,
    judge_numbers,
    judge_variety,
    long_prompt_length,
    parse_completion,
)
from appliance.serve.client import Answer

TEXT = ("The", " sea", " was", " calm", " and", " grey", ".", " We", " rowed", " out", " at",
        " dawn", ",", " two", " of", " us", " and")  # fmt: skip


def generation(tokens: tuple[str, ...], *values: object) -> Generation:
    return Generation(tokens, values or (-0.5,) * len(tokens), 4)


def answer(status: int, body: Any) -> Answer:
    return Answer(status, json.dumps(body).encode())


def completion(**choice: Any) -> Answer:
    return answer(200, {"choices": [choice], "usage": {"prompt_tokens": 7}})


def code_of(error: pytest.ExceptionInfo[CanaryError]) -> str:
    return error.value.diagnosis.code


@pytest.mark.parametrize("names", [[], ["other"], ["quasar", "other"], ["QUASAR"]])
def test_models_must_be_exactly_the_served_name(names: list[str]) -> None:
    listed = answer(200, {"data": [{"id": name} for name in names]})

    with pytest.raises(CanaryError) as error:
        judge_models(listed, "quasar", 64)

    assert code_of(error) == "WRONG_MODEL"
    assert "want quasar" in error.value.diagnosis.evidence


def test_models_with_the_served_name_alone_pass() -> None:
    judge_models(answer(200, {"data": [{"id": "quasar", "max_model_len": 64}]}), "quasar", 64)
    judge_models(answer(200, {"data": [{"id": "quasar"}]}), "quasar", 64)


def test_engine_with_another_context_than_planned_is_refused() -> None:
    listed = answer(200, {"data": [{"id": "quasar", "max_model_len": 4096}]})

    with pytest.raises(CanaryError) as error:
        judge_models(listed, "quasar", 64)

    assert code_of(error) == "EFFECTIVE_CONFIG"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None, "NaN", True])
def test_log_probability_that_is_no_finite_number_is_nan(value: object) -> None:
    with pytest.raises(CanaryError) as error:
        judge_numbers(generation(("a", "b"), -0.5, value))

    assert code_of(error) == "NUMERIC_NAN"


def test_fewer_log_probabilities_than_tokens_is_nan() -> None:
    with pytest.raises(CanaryError) as error:
        judge_numbers(generation(("a", "b"), -0.5))

    assert code_of(error) == "NUMERIC_NAN"


def test_numbers_of_a_healthy_model_pass() -> None:
    judge_numbers(generation(("a", "b"), -0.5, 0))


def test_one_token_for_ever_in_most_answers_is_degenerate() -> None:
    bad, good = generation(("!",) * 24), generation(TEXT)

    with pytest.raises(CanaryError) as error:
        judge_variety([bad, bad, good])

    assert code_of(error) == "DEGENERATE_OUTPUT"
    assert error.value.diagnosis.evidence == ("2 of 3 answers, 100% of one is '!'",)


@pytest.mark.parametrize(
    "generations",
    [
        [generation(TEXT)] * 3,
        [generation(("!",) * 24), generation(TEXT)],  # one loop alone
        [generation(("!",) * 15)] * 4,  # too short to tell
        [generation(("!",) * 16 + TEXT[:4])] * 4,  # exactly 80 %
        [],
    ],
)
def test_text_with_some_variety_passes(generations: list[Generation]) -> None:
    judge_variety(generations)


def test_completion_is_read_with_its_log_probabilities() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.1, None]}

    read = parse_completion(completion(text="ab", logprobs=logprobs))

    assert read == Generation(("a", "b"), (-0.1, None), 7)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (answer(500, {"error": {"message": "EngineCore encountered an issue"}}), "CANARY_FAILED"),
        (answer(200, {"choices": []}), "CANARY_FAILED"),
        (Answer(200, b"<html>"), "CANARY_FAILED"),
        (completion(text="ab", logprobs=None), "NUMERIC_NAN"),
    ],
)
def test_completion_without_an_answer_is_refused(reply: Answer, code: str) -> None:
    with pytest.raises(CanaryError) as error:
        parse_completion(reply)

    assert code_of(error) == code


@pytest.mark.parametrize(
    ("context", "batched", "length"), [(8192, 2048, 2065), (1024, 2048, 1020), (16, 2048, 12)]
)
def test_long_prompt_passes_one_step_by_a_block_or_fills_the_context(
    plan: Callable[..., LaunchPlan], context: int, batched: int, length: int
) -> None:
    made = plan(model={"max_model_len": context}, memory={"max_num_batched_tokens": batched})

    assert long_prompt_length(made) == length
