"""What every `auto` became and why, and what deserves a second look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.plan.attention import REASONS, unproved
from appliance.plan.candidate import SEQUENCE_TOKENS
from appliance.plan.formats import unproved_formats, weights_reason
from appliance.plan.launch_plan import Decision
from appliance.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.config.load import LoadedConfig
    from appliance.config.schema import Config
    from appliance.plan.candidate import Candidate
    from appliance.plan.cards import Cards
    from appliance.plan.choice import Choice
    from appliance.plan.launch_plan import ExecutionPlan


def decisions(
    config: Config,
    checkpoint: CheckpointSummary,
    cards: Cards,
    *,
    choice: Choice,
    execution: ExecutionPlan,
) -> tuple[Decision, ...]:
    """Return every resolved key with its value and reason, in the order of the file."""
    taken = choice.taken
    found = [
        *_model(config, checkpoint, taken),
        *_parallel(config, choice),
        *cards.decisions,
        *_cache(config, taken),
        *_execution(config, checkpoint, taken, execution),
    ]
    return tuple(found)


def _model(config: Config, checkpoint: CheckpointSummary, taken: Candidate) -> Iterator[Decision]:
    if config.model.format == "auto":
        reason = f"the tensors are those of {checkpoint.producer}"
        if checkpoint.format == "dense":
            reason = "no tensor is quantized"
        yield Decision("model.format", checkpoint.format, reason)
    if config.model.max_model_len == "auto":
        reason = (
            f"what the cache holds; the model's own limit is {checkpoint.geometry.max_position}"
        )
        if taken.longest == checkpoint.geometry.max_position:
            reason = "the model's own limit"
        elif not config.execution.chunked_prefill:
            reason = "memory.max_num_batched_tokens, since a prompt has to fit one step"
        yield Decision("model.max_model_len", str(taken.longest), reason)


def _parallel(config: Config, choice: Choice) -> Iterator[Decision]:
    if config.parallel.mode == "auto":
        yield Decision("parallel.mode", str(choice.taken.split), choice.reason)


def _cache(config: Config, taken: Candidate) -> Iterator[Decision]:
    memory, on_cpu = config.memory, config.execution.device == "cpu"
    value = "float32" if on_cpu else "float16"
    reason = "the compute type of the CPU engine" if on_cpu else "Volta has no FP8"
    yield Decision("memory.kv_cache_dtype", value, reason)
    if on_cpu and memory.kv_cache_size == "auto" and taken.pool_bytes is not None:
        tokens = min(taken.longest, SEQUENCE_TOKENS)
        reason = (
            f"whole GiB a rank that hold {memory.max_num_seqs} sequences of {tokens} tokens "
            f"and one of {taken.longest}"
        )
        total = taken.pool_bytes * taken.split.ranks
        yield Decision("memory.kv_cache_size", f"{total // GIB}GiB", reason)
    if taken.layout.block_tokens != config.execution.block_size:
        reason = "vLLM raises it until a page of the attention cache holds a recurrent state"
        yield Decision("execution.block_size", str(taken.layout.block_tokens), reason)


def _execution(
    config: Config, checkpoint: CheckpointSummary, taken: Candidate, execution: ExecutionPlan
) -> Iterator[Decision]:
    section, on_cpu = config.execution, execution.device == "cpu"
    if section.device == "auto":
        yield Decision("execution.device", "cuda", "the CPU engine must be asked for")
    decoded = weights_reason(checkpoint, execution.device)
    if decoded is not None:
        yield Decision("execution.weights", execution.weights, decoded)
    if section.enforce_eager == "auto":
        yield Decision(
            "execution.enforce_eager", str(execution.enforce_eager).lower(), _eager(config, taken)
        )
    if section.custom_all_reduce == "auto":
        reason = "hangs two V100s" if not on_cpu else "a feature of GPUs"
        yield Decision("execution.custom_all_reduce", "false", reason)
    if execution.attention_backend is not None:
        backend = execution.attention_backend
        yield Decision("execution.attention_backend", backend, REASONS[backend])


def _eager(config: Config, taken: Candidate) -> str:
    if config.execution.device == "cpu":
        return "there are no CUDA graphs on a CPU, and compiling takes a minute a start"
    if taken.graphs:
        return "CUDA graphs stay where the start-up canary passes with them"
    if not config.startup.canary:
        return "startup.canary is off, so that nothing would prove the graphs"
    return "the memory of CUDA graphs is needed for the cache"


def warnings(
    loaded: LoadedConfig, checkpoint: CheckpointSummary, cards: Cards, choice: Choice
) -> tuple[str, ...]:
    """Return what deserves a second look, one sentence each."""
    config, taken = loaded.config, choice.taken
    found = [*loaded.warnings, *cards.warnings]
    found += [note for note in checkpoint.notes if note.startswith("W_")]
    found += unproved(checkpoint.geometry.recurrent_layers, config.execution.device)
    found += unproved_formats(checkpoint, config.execution.device)
    if config.execution.custom_all_reduce is True:
        where = loaded.where("execution.custom_all_reduce")
        found.append(f"{where}: stays off, since no self-test of this machine has proved it")
    if not taken.working_set:
        together = taken.capacity_tokens // max(1, min(taken.longest, SEQUENCE_TOKENS))
        found.append(
            f"the cache holds about {together} of memory.max_num_seqs "
            f"({config.memory.max_num_seqs}) sequences at a time; the others wait"
        )
    if (
        taken.split.tensor > 1
        and choice.link in ("none", "unknown")
        and config.execution.device != "cpu"
    ):
        found.append("every layer is cut over GPUs whose way to each other is not known to be good")
    if choice.one_suffices and choice.link != "nvlink":
        found.append(
            "TP_SLOW_LINK: one GPU holds this model, and cutting every layer over a link without "
            "NVLink is often slower than one GPU; set parallel.mode: auto"
        )
    if taken.split.ranks < len(cards.cards):
        idle = [str(card.index) for card in cards.cards if card not in taken.cards]
        found.append(f"GPU {', '.join(idle)} stays idle")
    if config.memory.shm_size < GIB and taken.split.ranks > 1:
        size = format_bytes(config.memory.shm_size)
        found.append(f"memory.shm_size of {size} is little for {taken.split.ranks} processes")
    return tuple(found)
