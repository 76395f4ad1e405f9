"""Asks a served model through its OpenAI API and takes the time; any server with vLLM's routes."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import httpx

from appliance.bench.result import Result
from appliance.checkpoint.document import as_list
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

_OK = 200
_TIMEOUT_S = 600.0
_TEXT = "The harbour was quiet in the early morning, and eleven letters lay on the boat. "
_SHORT = 32
_PREFILLS = 3


@dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
        prompt_tokens: Length of the prompts whose reading is timed.
        answer_tokens: Tokens of each answer whose writing is timed.
        at_once: Requests together, beside one alone.
    """

    prompt_tokens: int = 1024
    answer_tokens: int = 128
    at_once: int = 8


class Server:
    """One model behind an API."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """Name the server."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def model(self) -> tuple[str, int]:
        """Return the served name and the longest sequence, 0 if it is not told.

        Raises:
            ApplianceError: BENCH_SERVER, exit 41.
        """
        models = as_list(self._ask("GET", "/v1/models", None).get("data"))
        if not models:
            raise _fault(self._url, "a list of models", "none")
        first = cast("dict[str, Any]", models[0])
        return str(first.get("id")), int(first.get("max_model_len") or 0)

    def tokens(self, model: str) -> list[int]:
        """Return token ids of plain text.

        Raises:
            ApplianceError: BENCH_SERVER, exit 41.
        """
        body = {"model": model, "prompt": _TEXT}
        found = as_list(self._ask("POST", "/tokenize", body).get("tokens"))
        if not found:
            raise _fault(self._url, "token ids of a text", "none")
        return [int(each) for each in found]

    def complete(self, model: str, prompt: list[int], count: int) -> int:
        """Return the tokens of an answer of exactly so many, as far as the server obeys.

        Raises:
            ApplianceError: BENCH_SERVER, exit 41.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        answer = self._ask("POST", "/v1/completions", body)
        usage = cast("dict[str, Any]", answer.get("usage") or {})
        return int(usage.get("completion_tokens", 0))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        where = f"{self._url}{path}"
        try:
            answer = self._client.request(method, where, json=body)
            if answer.status_code != _OK:
                value = f"HTTP {answer.status_code} {answer.text[:160]}"
                raise _fault(where, "status 200", value)
            found: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise _fault(where, "an answer", f"{type(error).__name__} {error}") from None
        return found


def measure(
    server: Server, label: str, load: Load, *, clock: Callable[[], float] = time.monotonic
) -> Result:
    """Time reading and writing, one request alone and several together.

    No two prompts begin alike, so that no cache of prefixes answers.

    Raises:
        ApplianceError: BENCH_SERVER, exit 41, if an answer is missing or too short.
    """
    model, longest = server.model()
    ids = server.tokens(model)
    room = longest - 1 if longest else load.prompt_tokens
    length = max(1, min(load.prompt_tokens, room))
    answer = load.answer_tokens if not longest else min(load.answer_tokens, longest - _SHORT)
    turn = iter(range(10**6))

    def prompt(size: int) -> list[int]:
        start = next(turn) % len(ids)
        whole = [*ids[start:], *ids[:start]]
        return (whole * (size // len(ids) + 1))[:size]

    def ask(each: list[int], tokens: int) -> int:
        return server.complete(model, each, tokens)

    def timed(count: int, tokens: int, size: int) -> float:
        prompts = [prompt(size) for _ in range(count)]
        began = clock()
        with ThreadPoolExecutor(count) as pool:
            made = [one.result() for one in [pool.submit(ask, each, tokens) for each in prompts]]
        if min(made) < tokens:
            raise _fault("/v1/completions", f"answers of {tokens} tokens", str(min(made)))
        return max(clock() - began, 1e-9)

    timed(1, 2, _SHORT)  # what is compiled or captured at the first request is not the model's rate
    reading = statistics.median(timed(1, 1, length) for _ in range(_PREFILLS))
    alone = timed(1, answer, _SHORT)
    together = timed(load.at_once, answer, _SHORT)
    return Result(
        label=label,
        model=model,
        prompt_tokens=length,
        answer_tokens=answer,
        at_once=load.at_once,
        prefill_rate=length / reading,
        decode_rate=answer / alone,
        decode_rate_together=load.at_once * answer / together,
    )


def _fault(where: str, what: str, value: str) -> ApplianceError:
    fix = (
        "start the appliance and wait until it is ready; shorten --prompt-tokens if it is too long"
    )
    return ApplianceError(ExitCode.ENGINE_DIED, Fault("BENCH_SERVER", where, what, value, fix))
