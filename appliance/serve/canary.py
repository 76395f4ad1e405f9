"""The start-up canary: real generations through the API, and the judgement of what came back.

Ready means that the model answers: `/v1/models` lists exactly the served name; one prompt is longer
than an engine step (`memory.max_num_batched_tokens`) by a block of the KV cache, as far as
`model.max_model_len` allows, because memory runs out there, not on a short greeting, and because
what reads cached keys is not run by less; with prefix caching it is asked twice; several requests
run together, because some kernels fail only then; log-probabilities are numbers; the text is no
endless repetition of one token, which is what NaN looks like once it has been turned into text; and
a chat is answered where chat is served.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from appliance.serve.client import (
    Answer,
    EngineClient,
    EngineSilentError,
    EngineUnreachableError,
    is_finite_number,
)
from appliance.serve.diagnose import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.plan.launch_plan import LaunchPlan

SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "One, two, three, four,",
    "A short story about a ship begins",
)
SHORT_PROMPT_ROOM = 12
"""Tokens that any of the short prompts fits in."""

SHORT_TOKENS = 24
LONG_TOKENS = 4
CHAT_LEAST_CONTEXT = 256
"""A template may bring a long preamble; in a context below this a refusal would prove nothing."""
CHECK_ALL = (
    "run `appliance model verify` and `appliance gate`; start with execution.enforce_eager: true"
)
DEGENERATE_SHARE = 0.8
DEGENERATE_LEAST = 16
_FILLER = (
    "The harbour was quiet in the early morning, and a small boat came back with fish, salt and "
    "eleven letters for the village on the hill. "
)
_OK = 200
_NAN_REPLY = "not JSON compliant"


@dataclass(frozen=True)
class Generation:
    """What one request gave.

    Attributes:
        tokens: Text of each generated token.
        logprobs: Log-probability of each; not finite numbers where the engine gave none.
        prompt_tokens: Length of the prompt as the engine counted it.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[object, ...]
    prompt_tokens: int


@dataclass(frozen=True)
class CanaryReport:
    """What was asked and seen by a canary that passed."""

    seconds: float
    long_prompt_tokens: int
    concurrent: int
    tokens_per_second: float


class CanaryError(Exception):
    """The engine answers but must not be used."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        """Keep the diagnosis."""
        super().__init__(diagnosis.code)
        self.diagnosis = diagnosis


def run_canary(
    client: EngineClient,
    plan: LaunchPlan,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> CanaryReport:
    """Ask the engine and judge its answers.

    Raises:
        CanaryError: If an answer is wrong, missing or late.
    """
    began = clock()

    def left_s() -> float:
        return timeout_s - (clock() - began)

    name = plan.model.served_name
    try:
        judge_models(client.get("/v1/models", timeout_s=left_s()), name, plan.model.max_model_len)
        prompt = _long_prompt(client, plan, timeout_s=left_s())
        long = _complete(client, name, prompt, LONG_TOKENS, left_s())
        judge_numbers(long)
        if plan.execution.prefix_caching:
            judge_numbers(_complete(client, name, prompt, LONG_TOKENS, left_s()))
        if asks_chat(plan):
            judge_chat(client.post("/v1/chat/completions", _chat(name), timeout_s=left_s()))
        workers = min(len(SHORT_PROMPTS), max(2, plan.memory.max_num_seqs))
        short_began = clock()
        generations = _together(
            [
                partial(_complete, client, name, text, _short_tokens(plan), left_s())
                for text in SHORT_PROMPTS[:workers]
            ]
        )
    except (EngineSilentError, EngineUnreachableError) as error:
        raise CanaryError(_late(str(error), late=left_s() <= 0.0)) from error
    for generation in generations:
        judge_numbers(generation)
    judge_variety(generations)
    produced = sum(len(generation.tokens) for generation in generations)
    rate = produced / max(clock() - short_began, 1e-6)
    return CanaryReport(clock() - began, long.prompt_tokens, workers, rate)


def _together(requests: Sequence[Callable[[], Generation]]) -> list[Generation]:
    """Make all requests at once; raise what the first one to fail raised.

    The threads are daemons: a request that hangs must not keep the appliance from ending.
    """
    answers: queue.SimpleQueue[Generation | CanaryError | EngineSilentError] = queue.SimpleQueue()

    def make(request: Callable[[], Generation]) -> None:
        try:
            answers.put(request())
        except CanaryError as error:
            answers.put(error)
        except (EngineSilentError, EngineUnreachableError) as error:
            answers.put(EngineSilentError(str(error)))

    for request in requests:
        threading.Thread(target=make, args=(request,), name="canary-one", daemon=True).start()
    generations: list[Generation] = []
    for _ in requests:
        answer = answers.get()
        if not isinstance(answer, Generation):
            raise answer
        generations.append(answer)
    return generations


def judge_models(answer: Answer, served_name: str, max_model_len: int) -> None:
    """Raise unless `/v1/models` lists the served name, with the planned context, and nothing else.

    An engine that tells no context is taken at its name.
    """
    models = cast("list[dict[str, Any]]", answer.json().get("data") or [])
    names = sorted(str(model.get("id")) for model in models)
    if answer.status != _OK or names != [served_name]:
        seen = (f"want {served_name}", f"got {', '.join(names) or f'HTTP {answer.status}'}")
        what, fix = (
            "another model is served than the plan names",
            "stop whatever listens on server.port",
        )
        raise CanaryError(Diagnosis("WRONG_MODEL", what, fix, seen))
    told = models[0].get("max_model_len", max_model_len)
    if told != max_model_len:
        seen = (f"max_model_len: want {max_model_len}", f"got {told}")
        what, fix = "the engine runs with other settings than the plan's", "report the engine's log"
        raise CanaryError(Diagnosis("EFFECTIVE_CONFIG", what, fix, seen))


def asks_chat(plan: LaunchPlan) -> bool:
    """Tell whether a chat is part of the canary."""
    return plan.model.has_chat_template and plan.model.max_model_len >= CHAT_LEAST_CONTEXT


def judge_chat(answer: Answer) -> None:
    """Raise unless a chat request was answered, with whatever text."""
    choices = answer.json().get("choices")
    if answer.status == _OK and isinstance(choices, list) and choices:
        return
    what = "a plain chat request is refused"
    fix = "run `appliance model verify`; set model.chat_template, or server.api: completions_only"
    seen = (f"/v1/chat/completions: HTTP {answer.status}", answer.text()[:200])
    raise CanaryError(Diagnosis("CHAT_REFUSED", what, fix, seen))


def judge_numbers(generation: Generation) -> None:
    """Raise if a log-probability is missing or no finite number."""
    bad = [value for value in generation.logprobs if not is_finite_number(value)]
    if bad or len(generation.logprobs) < len(generation.tokens):
        seen = f"logprob {bad[0] if bad else 'missing'} in {len(generation.tokens)} tokens"
        raise CanaryError(_nan(seen))


def judge_variety(generations: Sequence[Generation]) -> None:
    """Raise if most of the answers that are long enough repeat one token.

    One answer alone may: greedy text of a small model can run into a loop. Most of them at once do
    so only when the numbers behind them are broken, and the text does not tell by what.
    """
    long_enough = [g.tokens for g in generations if len(g.tokens) >= DEGENERATE_LEAST]
    shares = [most_common_share(tokens) for tokens in long_enough]
    bad = [(share, token) for share, token in shares if share > DEGENERATE_SHARE]
    if 2 * len(bad) > len(long_enough):
        share, token = bad[0]
        seen = f"{len(bad)} of {len(long_enough)} answers, {share:.0%} of one is {token!r}"
        what = "the model repeats one token, which is what NaN looks like as text"
        fix = CHECK_ALL
        raise CanaryError(Diagnosis("DEGENERATE_OUTPUT", what, fix, (seen,)))


def most_common_share(tokens: Sequence[str]) -> tuple[float, str]:
    """Return the share (0 to 1) of the most frequent token and that token."""
    if not tokens:
        return 0.0, ""
    token, count = Counter(tokens).most_common(1)[0]
    return count / len(tokens), token


def long_prompt_length(plan: LaunchPlan) -> int:
    """Return the tokens of the long prompt: a full engine step, and more than a block of the cache.

    As far as the context allows; a prompt that is not cut fits one step, by the plan.
    """
    room = plan.model.max_model_len - LONG_TOKENS
    step, block = plan.memory.max_num_batched_tokens, plan.memory.kv_block_tokens
    wanted = step + block + 1 if plan.execution.chunked_prefill else step
    return max(1, min(wanted, room))


def _short_tokens(plan: LaunchPlan) -> int:
    return max(1, min(SHORT_TOKENS, plan.model.max_model_len - SHORT_PROMPT_ROOM))


def _long_prompt(client: EngineClient, plan: LaunchPlan, *, timeout_s: float) -> list[int]:
    """Return token ids of real text, as many as one engine step takes."""
    body = {"model": plan.model.served_name, "prompt": _FILLER}
    answer = client.post("/tokenize", body, timeout_s=timeout_s)
    tokens = answer.json().get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CanaryError(_refused("/tokenize", answer))
    ids = [int(token) for token in cast("list[int]", tokens)]
    length = long_prompt_length(plan)
    return (ids * math.ceil(length / len(ids)))[:length]


def _chat(name: str) -> dict[str, object]:
    messages = [{"role": "user", "content": SHORT_PROMPTS[0]}]
    return {"model": name, "messages": messages, "max_tokens": LONG_TOKENS, "temperature": 0.0}


def _complete(
    client: EngineClient, name: str, prompt: str | list[int], max_tokens: int, timeout_s: float
) -> Generation:
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": 1,
    }
    answer = client.post("/v1/completions", body, timeout_s=timeout_s)
    if _NAN_REPLY in answer.text():
        raise CanaryError(_nan(answer.text()[:200]))
    return parse_completion(answer)


def parse_completion(answer: Answer) -> Generation:
    """Read one completion.

    Raises:
        CanaryError: If it is an error or has no text.
    """
    body = answer.json()
    choices = body.get("choices")
    if answer.status != _OK or not isinstance(choices, list) or not choices:
        raise CanaryError(_refused("/v1/completions", answer))
    choice = cast("dict[str, Any]", choices[0])
    logprobs = cast("dict[str, Any] | None", choice.get("logprobs"))
    if logprobs is None:
        raise CanaryError(_nan(f"no log-probabilities beside {str(choice.get('text'))[:80]!r}"))
    usage = cast("dict[str, Any]", body.get("usage") or {})
    tokens = tuple(str(token) for token in logprobs.get("tokens") or ())
    values = tuple(cast("list[object]", logprobs.get("token_logprobs") or []))
    return Generation(tokens, values, int(usage.get("prompt_tokens", 0)))


def _nan(seen: str) -> Diagnosis:
    what = "log-probabilities are not numbers: the model computes NaN or infinity"
    fix = CHECK_ALL
    return Diagnosis("NUMERIC_NAN", what, fix, (seen,))


def _refused(path: str, answer: Answer) -> Diagnosis:
    what = "the engine answers a plain request with an error"
    fix = "read the engine's lines above; `appliance doctor` prints the last of them"
    return Diagnosis(
        "CANARY_FAILED", what, fix, (f"{path}: HTTP {answer.status}", answer.text()[:200])
    )


def _late(seen: str, *, late: bool) -> Diagnosis:
    fix = "raise startup.timeout, or read the engine's lines above"
    if late:
        what = "the first generation did not end within startup.timeout"
        return Diagnosis("CANARY_TIMEOUT", what, fix, (seen,))
    what = "the engine broke the connection of a plain request"
    return Diagnosis("CANARY_FAILED", what, fix, (seen,))
