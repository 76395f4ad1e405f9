"""Asks a served checkpoint through its OpenAI API, as any client would."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quality.measurement import Measurement, Window, unusable
from appliance.quality.prompts import PROMPTS, VERSION, Task, arithmetic_tasks, copy_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TOP = 20
"""Most probable tokens kept of each position: what vLLM gives without being configured."""

_ANSWER_TOKENS = 32
_TASK_TOKENS = 16
_TIMEOUT_S = 600.0
_OK = 200


@dataclass(frozen=True)
class Text:
    """A text in pieces that are asked one by one.

    Attributes:
        pieces: Parts of about equal length, cut at white space.
        sha256: Of the whole text that the pieces hold.
        letters: Most letters of a piece.
    """

    pieces: tuple[str, ...]
    sha256: str
    letters: int


def read_text(path: Path, *, letters: int, pieces: int) -> Text:
    """Cut the start of a UTF-8 text file into pieces.

    Raises:
        ApplianceError: QUALITY_INPUT, exit 2, if it cannot be read or holds not one piece.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(4 * letters * pieces)
    except OSError as error:
        reason, fix = error.strerror or type(error).__name__, "name a text file that you may read"
        raise unusable(str(path), "a readable UTF-8 text file", reason, fix) from None
    left = raw.decode(errors="ignore")
    found: list[str] = []
    while len(found) < pieces and len(left) >= letters:
        cut = left.rfind(" ", letters // 2, letters)
        cut = letters if cut < 0 else cut
        found.append(left[:cut])
        left = left[cut:]
    if not found:
        fix = "give a longer text, or fewer --letters"
        raise unusable(str(path), f"at least {letters} letters of text", str(len(left)), fix)
    digest = hashlib.sha256("\0".join(found).encode()).hexdigest()
    return Text(tuple(found), digest, letters)


class Served:
    """One model behind an OpenAI API."""

    def __init__(self, url: str, *, model: str | None, key: str | None) -> None:
        """Name the server; `model` None takes the one that it serves."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S)
        self._model = model

    @property
    def model(self) -> str:
        """Name of the model that is asked.

        Raises:
            ApplianceError: QUALITY_SERVER, exit 41.
        """
        if self._model is None:
            listed = self._ask("GET", "/v1/models", None)
            self._model = str(listed["data"][0]["id"])
        return self._model

    def complete(self, prompt: str, tokens: int) -> str:
        """Return the greedy continuation of a prompt.

        Raises:
            ApplianceError: QUALITY_SERVER, exit 41.
        """
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "seed": 0}
        return str(self._complete(body)["text"])

    def predict(self, text: str) -> Window:
        """Return what the model thought of every token of a text but the first.

        Raises:
            ApplianceError: QUALITY_SERVER, exit 41; NUMERIC_NAN, exit 60, for what is no number.
        """
        body = {"prompt": text, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP}
        found = self._complete(body).get("prompt_logprobs")
        if not found or len(found) < 2:  # noqa: PLR2004 - one token has no prediction
            raise _server(self._url, "prompt_logprobs for the text", str(found)[:80])
        _check_numbers(self._url, found[1:])
        return window_of(found[1:])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask("POST", "/v1/completions", {"model": self.model, **body})
        return dict(answer["choices"][0])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        where = f"{self._url}{path}"
        try:
            answer = self._client.request(method, where, json=body)
        except httpx.HTTPError as error:
            raise _server(where, "an answer", f"{type(error).__name__} {error}") from None
        if answer.status_code != _OK:
            value = f"HTTP {answer.status_code} {answer.text[:160]}"
            raise _server(where, "status 200", value)
        parsed: dict[str, Any] = answer.json()
        return parsed


def _check_numbers(url: str, entries: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Refuse log-probabilities that are none; the engine writes them as null or NaN."""
    for position, entry in enumerate(entries, 1):
        for each in entry.values():
            value = each.get("logprob")
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                what = f"a finite log-probability of token {position}"
                fix = "run `appliance model verify` and `appliance gate`"
                fault = Fault("NUMERIC_NAN", url, what, str(value), fix)
                raise ApplianceError(ExitCode.REGRESSION, fault)


def window_of(entries: Sequence[dict[str, dict[str, Any]]]) -> Window:
    """Turn vLLM's prompt_logprobs into a window: the first key of an entry is the token itself."""
    tokens: list[int] = []
    logprobs: list[float] = []
    tops: list[tuple[tuple[int, float], ...]] = []
    for entry in entries:
        token = next(iter(entry))
        ranked = sorted(
            ((int(each["rank"]), int(key), float(each["logprob"])) for key, each in entry.items()),
        )
        tokens.append(int(token))
        logprobs.append(float(entry[token]["logprob"]))
        tops.append(tuple((key, value) for rank, key, value in ranked if rank <= TOP))
    return Window(tuple(tokens), tuple(logprobs), tuple(tops))


def measure(
    served: Served, text: Text, *, at_once: int, advance: Callable[[int, int], None]
) -> Measurement:
    """Ask everything.

    Args:
        served: The model.
        text: The text for perplexity and divergence.
        at_once: Requests at the same time.
        advance: Told the number of finished requests and of all.

    Raises:
        ApplianceError: QUALITY_SERVER, exit 41.
    """
    copies, sums = copy_tasks(), arithmetic_tasks()
    total = len(text.pieces) + len(PROMPTS) + len(copies) + len(sums)
    done = 0

    model = served.model
    with ThreadPoolExecutor(at_once) as pool:

        def run(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
            nonlocal done
            results: list[Any] = []
            for result in pool.map(function, arguments):
                done += 1
                advance(done, total)
                results.append(result)
            return results

        windows = run(served.predict, text.pieces)
        answers = run(lambda prompt: served.complete(prompt, _ANSWER_TOKENS), PROMPTS)
        copied = run(lambda task: _is_right(served, task), copies)
        solved = run(lambda task: _is_right(served, task), sums)
    inputs = {
        "text_sha256": text.sha256,
        "letters": text.letters,
        "pieces": len(text.pieces),
        "prompts": VERSION,
        "top": TOP,
    }
    return Measurement(model, inputs, tuple(windows), tuple(answers), tuple(copied), tuple(solved))


def _is_right(served: Served, task: Task) -> bool:
    words = served.complete(task.prompt, _TASK_TOKENS).split()
    return bool(words) and words[0].rstrip(".,;") == task.answer


def _server(where: str, what: str, value: str) -> ApplianceError:
    fix = "start the appliance and wait until it is ready; shorten --letters if a text is too long"
    return ApplianceError(ExitCode.ENGINE_DIED, Fault("QUALITY_SERVER", where, what, value, fix))
