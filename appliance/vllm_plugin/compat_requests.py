"""What clients ask for, held to what the engine survives, where vLLM 0.27 checks a request.

0.27 checks the token ids of `logit_bias` and of `allowed_token_ids`, but not those of
`stop_token_ids`: with `min_tokens` it writes to their logits, and one behind the vocabulary ends
the engine. What its backends for structured outputs say of a bad schema reaches a client as status
500 without a word, because they raise an error that the engine takes for its own.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_requests", "foreign_ids"]

_CHECKED = "appliance_checks"
_MOST_NAMED = 8


def foreign_ids(ids: Iterable[int], vocabulary: int) -> list[int]:
    """Return the ids that name no token of a vocabulary of this many."""
    return [token for token in ids if not 0 <= token < vocabulary]


def check_requests() -> None:
    """Let the engine answer 400 to what would end it; may be called any number of times."""
    plain: Any = SamplingParams.verify
    if hasattr(plain, _CHECKED):
        return

    @wraps(plain)
    def verify(self: SamplingParams, model_config: Any, *others: Any) -> None:  # noqa: ANN401 - the engine's
        vocabulary = int(model_config.get_vocab_size())
        for name in ("stop_token_ids", "allowed_token_ids"):
            if foreign := foreign_ids(getattr(self, name) or (), vocabulary):
                named = ", ".join(map(str, foreign[:_MOST_NAMED]))
                what = f"{name} must lie in the vocabulary of {vocabulary} tokens, got {named}"
                raise VLLMValidationError(what, parameter=name, value=foreign[:_MOST_NAMED])
        try:
            plain(self, model_config, *others)
        except VLLMValidationError:
            raise
        except ValueError as error:
            # The engine's own word for what a client can mend, else it answers 500.
            raise VLLMValidationError(str(error)) from error

    setattr(verify, _CHECKED, True)
    setattr(SamplingParams, "verify", verify)  # noqa: B010 - a type checker forbids the plain way
