"""Every kind of request that the API takes, each asked twice at once by many: what the engine runs
for one sort of request alone must be there, and must not be compiled while its user waits.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TEXT = "Once upon a time, in a small village by the sea,"
TOGETHER = 12
"""Requests at a time: more than the eight from which the engine samples in another kernel, and no
multiple of 16, for which Triton would have another program."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "sea": {"type": "boolean"}},
    "required": ["name", "sea"],
    "additionalProperties": False,
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "seed": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"42": 5.0}},
    "logprobs": {"logprobs": 5},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "three answers": {"n": 3, "temperature": 0.8},
    "stop": {"stop": ["village"]},
    "bad_words": {"bad_words": ["village"]},
    "allowed_token_ids": {"allowed_token_ids": [10, 42, 99]},
    "min_tokens": {"min_tokens": 4},
    "beam search": {"use_beam_search": True, "n": 2},
    "stream": {"stream": True},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat with logprobs": {"logprobs": True, "top_logprobs": 5},
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": SCHEMA},
        },
        "max_tokens": 64,
    },
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,6}"}},
}
KINDS = (*COMPLETIONS, *CHATS)


def body_of(kind: str, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of one kind of request; greedy unless it says otherwise."""
    plain: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0}
    if kind in COMPLETIONS:
        return "/v1/completions", plain | {"prompt": TEXT} | COMPLETIONS[kind]
    messages = [{"role": "user", "content": TEXT}]
    return "/v1/chat/completions", plain | {"messages": messages} | CHATS[kind]


def ask(url: str, kind: str, model: str) -> str:
    """Ask once and return the text of the first choice, of a stream its lines.

    Raises:
        urllib.error.HTTPError: The answer's status is not 200.
        OSError: Nothing answers.
    """
    path, body = body_of(kind, model)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        read = answer.read().decode()
    if body.get("stream"):
        return read
    choice = json.loads(read)["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def twice(url: str, kind: str, model: str, together: int = TOGETHER) -> dict[str, Any]:
    """Ask as many at a time, twice; seconds of both, or what went wrong."""
    seconds = []
    try:
        for _ in range(2):
            started = time.monotonic()
            with ThreadPoolExecutor(together) as pool:
                answers = list(pool.map(lambda _: ask(url, kind, model), range(together)))
            seconds.append(round(time.monotonic() - started, 2))
    except Exception as error:  # noqa: BLE001 - the reason is the result
        said = error.read().decode()[-300:] if hasattr(error, "read") else ""
        return {"error": f"{type(error).__name__}: {error} {said}".strip()}
    return {"first_s": seconds[0], "second_s": seconds[1]} | judged(kind, answers)


def judged(kind: str, answers: list[str]) -> dict[str, str]:
    """Nothing, or what is wrong with the answers' text."""
    for answer in answers:
        try:
            right = RIGHT.get(kind, bool)(answer)
        except ValueError:
            right = False
        if not right:
            return {"error": f"an answer was {answer!r}"}
    return {}


def is_of_schema(answer: str) -> bool:
    """Whether the text is what the schema asks for, or begins so and reached its length."""
    if not answer.rstrip().endswith("}"):
        compact, begin = "".join(answer.split()), '{"name":"'
        return bool(compact) and begin.startswith(compact[: len(begin)])
    found = json.loads(answer)
    return set(found) == {"name", "sea"} and isinstance(found["sea"], bool)


RIGHT: dict[str, Any] = {
    "json_schema": is_of_schema,
    "choice": lambda answer: answer in {"yes", "no"},
    "regex": lambda answer: answer.isalpha() and answer.islower() and 3 <= len(answer) <= 6,
    "stream": lambda answer: answer.rstrip().endswith("data: [DONE]"),
    "stop": lambda answer: "village" not in answer,
    "bad_words": lambda answer: " village" not in answer,
    "echo with logprobs": lambda answer: answer.startswith(TEXT),
}
"""What the text of a kind must be; of others it must not be empty."""


def every_kind(url: str, model: str, together: int = TOGETHER) -> dict[str, Any]:
    """Ask every kind, one after the other."""
    return {kind: twice(url, kind, model, together) for kind in KINDS}
