"""Requests of clients who err or mean harm, and the status that each must get.

None of them may end the engine, and what a client can mend is never a fault of the server's (5xx).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

BEYOND = 999_999
"""A token behind every small model's vocabulary."""

COMPLETIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "stop token beyond, kept off at first": (400, {"stop_token_ids": [BEYOND], "min_tokens": 4}),
    "stop token far beyond": (400, {"stop_token_ids": [2**40], "min_tokens": 4}),
    "stop token below": (400, {"stop_token_ids": [-5], "min_tokens": 4}),
    "bias of a token beyond": (400, {"logit_bias": {str(BEYOND): 5}}),
    "allowed token beyond": (400, {"allowed_token_ids": [BEYOND]}),
    "no allowed token": (400, {"allowed_token_ids": []}),
    "prompt of a token beyond": (400, {"prompt": [BEYOND]}),
    "prompt of a token below": (400, {"prompt": [-1]}),
    "empty prompt": (400, {"prompt": ""}),
    "prompts of no token": (400, {"prompt": [[]]}),
    "longer than the context": (400, {"prompt": "sea " * 3000}),
    "log-probabilities of everything": (400, {"prompt_logprobs": -1}),
    "a thousand log-probabilities": (400, {"logprobs": 1000}),
    "long prompt with log-probabilities": (200, {"prompt": "sea " * 150, "prompt_logprobs": 2}),
    "top_k of everything": (200, {"top_k": 2**63, "temperature": 1}),
    "top_p near nothing": (200, {"top_p": 1e-9, "temperature": 1}),
    "min_p of one": (200, {"min_p": 1, "temperature": 1}),
    "temperature near nothing": (200, {"temperature": 1e-320}),
    "temperature without bound": (400, {"temperature": 1e30}),
    "smallest penalty": (200, {"repetition_penalty": 1e-30}),
    "largest penalty": (200, {"repetition_penalty": 1e300, "temperature": 1}),
    "no answers": (400, {"n": 0}),
    "twenty thousand answers": (400, {"n": 20_000, "temperature": 1}),
    "five hundred beams": (400, {"use_beam_search": True, "n": 500}),
    "stops of nothing": (400, {"stop": [""]}),
    "thousands of stops": (200, {"stop": [f"x{at}" for at in range(3000)]}),
    "thousands of bad words": (200, {"bad_words": [f"w{at}" for at in range(2000)]}),
    "more tokens than a context": (400, {"max_tokens": 2**70}),
    "another model": (404, {"model": "other"}),
    "embeddings for a prompt": (400, {"prompt_embeds": "AAAA"}),
    "a long salt": (200, {"cache_salt": "x" * 50_000}),
}
CHATS: dict[str, tuple[int, dict[str, Any]]] = {
    "open expression": (400, {"structured_outputs": {"regex": "("}}),
    "expression that looks ahead": (400, {"structured_outputs": {"regex": "(?=a)b"}}),
    "expression of millions": (200, {"structured_outputs": {"regex": "(a{1,5000}){1,5000}"}}),
    "no choice": (400, {"structured_outputs": {"choice": []}}),
    "schema of no type": (400, {"structured_outputs": {"json": {"type": "nonsense"}}}),
    "schema that is no JSON": (400, {"structured_outputs": {"json": "{"}}),
    "schema that nothing fits": (
        400,
        {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 1}}},
    ),
    "two constraints": (400, {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    "template of the client": (400, {"chat_template": "{% for i in range(10**9) %}a{% endfor %}"}),
    "image": (
        400,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
                }
            ]
        },
    ),
    "no messages": (400, {"messages": []}),
    "message of nothing": (400, {"messages": [{"role": "user", "content": None}]}),
}
RAW: dict[str, tuple[int, bytes]] = {
    "temperature that is no number": (400, b'{"prompt": "a", "temperature": NaN}'),
    "top_p that is no number": (400, b'{"prompt": "a", "temperature": 1, "top_p": NaN}'),
    "penalty that is no number": (400, b'{"prompt": "a", "repetition_penalty": NaN}'),
    "bias that is no number": (200, b'{"prompt": "a", "max_tokens": 4, "logit_bias": {"5": NaN}}'),
    "half a character": (400, b'{"prompt": "\\ud800", "max_tokens": 4}'),
    "no JSON": (400, b"{"),
    "nested without end": (400, b"[" * 50_000),
}
ROUTES: dict[str, tuple[int, str]] = {
    "scale": (404, "/scale_elastic_ep"),
    "sleep": (404, "/sleep"),
    "adapter": (404, "/v1/load_lora_adapter"),
    "calls into the engine": (404, "/collective_rpc"),
}


def requests(model: str) -> dict[str, tuple[int, str, bytes]]:
    """Every request: the right status, path, body."""
    plain: dict[str, Any] = {"model": model, "max_tokens": 6, "temperature": 0}
    completion = plain | {"prompt": "The sea is"}
    chat = plain | {"messages": [{"role": "user", "content": "Hi"}]}
    found = {
        name: (status, "/v1/completions", json.dumps(completion | body).encode())
        for name, (status, body) in COMPLETIONS.items()
    }
    found |= {
        name: (status, "/v1/chat/completions", json.dumps(chat | body).encode())
        for name, (status, body) in CHATS.items()
    }
    begin = b'{"model": "' + model.encode() + b'", '
    found |= {
        name: (status, "/v1/completions", body.replace(b"{", begin, 1) if b":" in body else body)
        for name, (status, body) in RAW.items()
    }
    return found | {name: (status, path, b"{}") for name, (status, path) in ROUTES.items()}


def post(url: str, body: bytes) -> tuple[int, str]:
    """Status and text of an answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def wrong(url: str, model: str) -> dict[str, str]:
    """Ask all; what got another status than it must, or none."""
    found = {}
    for name, (right, path, body) in requests(model).items():
        status, text = post(url + path, body)
        if status != right:
            found[name] = f"{status}, not {right}: {text[:200]}"
    return found
