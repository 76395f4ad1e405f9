"""What clients ask for is refused in words where the engine would not survive it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from appliance.vllm_plugin.compat_requests import check_requests, foreign_ids

VOCABULARY = 49_152
MODEL = SimpleNamespace(  # what the engine's checks read of a model
    max_logprobs=20,
    is_diffusion=False,
    logits_processors=None,
    get_vocab_size=lambda: VOCABULARY,
)


@pytest.fixture
def tokenizer(smollm2: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(smollm2 / "model" / "tokenizer.json"))


def verify(params: SamplingParams, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    check_requests()
    check_requests()
    params.verify(MODEL, None, StructuredOutputsConfig(), tokenizer)


@pytest.mark.parametrize(
    ("ids", "foreign"),
    [
        ([], []),
        ([0, VOCABULARY - 1], []),
        ([VOCABULARY], [VOCABULARY]),
        ([5, -1, 2**40], [-1, 2**40]),
    ],
)
def test_foreign_ids_are_those_outside_of_the_vocabulary(
    ids: list[int], foreign: list[int]
) -> None:
    assert foreign_ids(ids, VOCABULARY) == foreign


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**40])
def test_token_outside_of_the_vocabulary_is_refused(name: str, token: int) -> None:
    params = SamplingParams(min_tokens=2, max_tokens=4, **{name: [1, token]})

    with pytest.raises(VLLMValidationError, match=rf"{name} must lie in .*, got {token}"):
        verify(params)


def test_tokens_of_the_vocabulary_pass() -> None:
    verify(SamplingParams(stop_token_ids=[0, VOCABULARY - 1], allowed_token_ids=[1]))
    verify(SamplingParams())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": "{"}, "Expecting property name"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "greater than maximum"),
    ],
    ids=["regex", "type", "no JSON", "impossible"],
)
def test_bad_schema_is_the_clients_fault_and_says_why(
    asked: dict[str, Any], said: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked))

    with pytest.raises(VLLMValidationError, match=said):
        verify(params, tokenizer)
