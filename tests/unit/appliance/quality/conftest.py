"""A small OpenAI server with a letter model: a letter is a token, probabilities by a formula."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

VOCABULARY = 40


@dataclass
class LetterModel:
    """Predicts the letter after the last one; `blur` spreads its probabilities, as noise would."""

    name: str = "letters"
    blur: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)
    key: str = ""
    status: int = 200
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def distribution(self, letter: int) -> list[float]:
        scores = [
            math.cos(1.7 * token + letter) * 3 * (1 - self.blur) + self.blur * math.sin(token)
            for token in range(VOCABULARY)
        ]
        total = math.log(sum(map(math.exp, scores)))
        return [score - total for score in scores]

    def entry(self, before: int, token: int, top: int) -> dict[str, Any]:
        logprobs = self.distribution(before)
        ranked = sorted(range(VOCABULARY), key=lambda each: -logprobs[each])
        named = [token, *(each for each in ranked[:top] if each != token)]
        return {
            str(each): {
                "logprob": logprobs[each],
                "rank": ranked.index(each) + 1,
                "decoded_token": chr(97 + each),
            }
            for each in named
        }

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        prompt = str(body["prompt"])
        tokens = [ord(letter) % VOCABULARY for letter in prompt]
        choice: dict[str, Any] = {"index": 0, "text": self.answers.get(prompt, " what")}
        if "prompt_logprobs" in body:
            top = int(body["prompt_logprobs"])
            choice["prompt_logprobs"] = [
                None,
                *(self.entry(one, two, top) for one, two in itertools.pairwise(tokens)),
            ]
        return {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """`/v1/models` and `/v1/completions` in vLLM's shape."""

    protocol_version = "HTTP/1.1"
    model: LetterModel

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": self.model.name}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(self.model.complete(body))

    def answer(self, value: dict[str, Any]) -> None:
        wanted = f"Bearer {self.model.key}"
        refused = self.model.key and self.headers.get("Authorization") != wanted
        content = json.dumps(value).encode()
        self.send_response(401 if refused else self.model.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def serve() -> Iterator[Callable[..., LetterModel]]:
    """Start servers; every one is gone after the test."""
    with ExitStack() as stack:

        def start(**words: Any) -> LetterModel:
            model = LetterModel(**words)
            handler = type("Handler", (Handler,), {"model": model})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            model.url = f"http://127.0.0.1:{server.server_port}"
            return model

        yield start
