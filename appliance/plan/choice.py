"""Chooses how the model is cut: the first way that holds what is asked, in order of preference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.candidate import SEQUENCE_TOKENS, Candidate, Demand, evaluate, host_pool
from appliance.plan.split import Split, obstacles, possible_splits
from appliance.plan.weights import WeightForm
from appliance.units import GIB, format_bytes

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.config.load import LoadedConfig
    from appliance.config.schema import Config
    from appliance.plan.candidate import Card
    from healthchecks.facts import HostFacts, PairFacts

Link = Literal["nvlink", "p2p", "none", "unknown"]
_WEAKEST_FIRST: tuple[Link, ...] = ("none", "unknown", "p2p", "nvlink")


@dataclass(frozen=True)
class Choice:
    """What was tried and what was taken.

    Attributes:
        taken: The chosen split, the best one even if it does not fit.
        reason: Why this one.
        tried: Everything that was evaluated, in order of preference.
        link: How the GPUs reach each other.
        one_suffices: Tensor parallelism was asked for although one GPU holds all that is asked.
    """

    taken: Candidate
    reason: str
    tried: tuple[Candidate, ...]
    link: Link
    one_suffices: bool = False


def demand_of(config: Config, summary: CheckpointSummary, *, graphs: bool) -> Demand:
    """Return what the configuration asks of any split."""
    cpu = config.execution.device == "cpu"
    longest = config.model.max_model_len
    stated = None if longest == "auto" else longest
    if stated is None and not config.execution.chunked_prefill:
        # Without cutting, a prompt has to fit one engine step.
        stated = min(summary.geometry.max_position, config.memory.max_num_batched_tokens)
    return Demand(
        device="cpu" if cpu else "cuda",
        form=WeightForm(
            element_bytes=4 if cpu else 2,
            packed=not cpu and config.execution.weights == "fused",
        ),
        sequences=config.memory.max_num_seqs,
        step_tokens=config.memory.max_num_batched_tokens,
        block_tokens=config.execution.block_size,
        prefix_caching=config.execution.prefix_caching,
        longest=stated,
        graphs=graphs,
    )


def choose(
    loaded: LoadedConfig, summary: CheckpointSummary, cards: tuple[Card, ...], host: HostFacts
) -> Choice:
    """Return the split to launch; the caller asks whether it fits.

    Raises:
        ApplianceError: Exit 10 if the configured mode does not divide this model.
    """
    config = loaded.config
    if config.execution.device == "cpu":
        return _choose_cpu(loaded, summary, cards)
    link = link_between(host, cards) if config.gate.p2p.policy != "off" else "none"
    splits = _splits(loaded, summary, len(cards), link)
    graphs = wants_graphs(config)
    tried: list[Candidate] = []
    for split in splits:
        used = _cards_for(split, cards)
        found = evaluate(summary, split, used, demand_of(config, summary, graphs=graphs))
        if graphs and config.execution.enforce_eager == "auto":
            found = _without_graphs(config, summary, found) or found
        tried.append(found)
    taken = next((each for each in tried if each.fits and each.working_set), None)
    if taken is not None:
        alone = taken.split.tensor > 1 and config.parallel.mode == "tensor"
        alone = alone and _one_suffices(config, summary, cards, graphs=taken.graphs)
        return Choice(taken, _reason(config, taken, tried, link), tuple(tried), link, alone)
    best = max(tried, key=lambda each: (each.fits, -each.missing_bytes, each.capacity_tokens))
    reason = "the cache does not hold all sequences together; this way it holds the most tokens"
    return Choice(best, reason, tuple(tried), link)


def _without_graphs(
    config: Config, summary: CheckpointSummary, found: Candidate
) -> Candidate | None:
    """Return the same split without CUDA graphs where that serves more, None where it does not."""
    if found.working_set and found.captures:
        return None
    demand = demand_of(config, summary, graphs=False)
    eager = evaluate(summary, found.split, found.cards, demand)
    serves = (eager.fits, eager.working_set) > (found.fits, found.working_set)
    return eager if serves or (eager.fits and not found.captures) else None


def _one_suffices(
    config: Config, summary: CheckpointSummary, cards: tuple[Card, ...], *, graphs: bool
) -> bool:
    demand = demand_of(config, summary, graphs=graphs)
    single = evaluate(summary, Split(), _cards_for(Split(), cards), demand)
    return single.fits and single.working_set


def wants_graphs(config: Config) -> bool:
    """Tell whether CUDA graphs are asked for; without a canary nothing would prove them."""
    eager = config.execution.enforce_eager
    return config.startup.canary if eager == "auto" else not eager


def link_between(host: HostFacts, cards: tuple[Card, ...]) -> Link:
    """Return how the GPUs reach each other; the weakest pair decides."""
    indexes = {card.index for card in cards}
    links: list[Link] = [_link(pair) for pair in host.pairs if {pair.a, pair.b} <= indexes]
    needed = len(indexes) * (len(indexes) - 1) // 2
    if len(links) < needed:
        links.append("unknown")
    for link in _WEAKEST_FIRST:
        if link in links:
            return link
    return "unknown"


def _link(pair: PairFacts) -> Link:
    """A copy that was tried outweighs the driver's word, which is known to be wrong at times."""
    if pair.functional not in (None, "ok"):
        return "none"
    if pair.nvlink_lanes:
        return "nvlink"
    permissions = (pair.read_ab, pair.read_ba, pair.write_ab, pair.write_ba)
    if pair.functional == "ok" or all(word == "OK" for word in permissions):
        return "p2p"
    return "unknown" if None in permissions else "none"


def _splits(
    loaded: LoadedConfig, summary: CheckpointSummary, devices: int, link: Link
) -> list[Split]:
    mode = loaded.config.parallel.mode
    tensor, pipeline = Split(devices, 1), Split(1, devices)
    if mode == "single":
        return [Split()]
    if mode != "auto":
        split = tensor if mode == "tensor" else pipeline
        _demand_possible(loaded, summary, split, devices)
        return [split]
    order = [tensor, pipeline] if link in ("nvlink", "p2p") else [pipeline, tensor]
    return [Split(), *(each for each in order if devices > 1 and not obstacles(summary, each))]


def _demand_possible(
    loaded: LoadedConfig, summary: CheckpointSummary, split: Split, devices: int
) -> None:
    where, mode = loaded.where("parallel.mode"), loaded.config.parallel.mode
    if split.ranks == 1 and mode != "auto":
        fix = "name two GPUs in parallel.gpus, or set mode: single"
        fault = Fault("TP_INVALID", where, f"{mode} needs at least two GPUs", "one", fix)
        raise ApplianceError(ExitCode.CONFIG, fault)
    found = obstacles(summary, split)
    if found:
        valid = possible_splits(summary, devices)
        pairs = ", ".join(f"({each.tensor}, {each.pipeline})" for each in valid)
        fix = f"use one of the (tensor, pipeline) pairs {pairs}"
        faults = [Fault(each.code, where, each.what, each.value, fix) for each in found]
        raise ApplianceError(ExitCode.CONFIG, *faults)


def _cards_for(split: Split, cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """Return the cards of a split; one rank goes where most memory is free."""
    if split.ranks == 1:
        return (max(cards, key=lambda card: (card.usable_bytes, -card.index)),)
    return cards[: split.ranks]


def _reason(config: Config, taken: Candidate, tried: list[Candidate], link: Link) -> str:
    tokens = min(taken.longest, SEQUENCE_TOKENS)
    holds = f"holds {config.memory.max_num_seqs} sequences of {tokens} tokens"
    if config.parallel.mode != "auto":
        return f"asked for; {holds}"
    if taken.split.ranks == 1:
        return f"one GPU {holds}"
    ways = {
        "nvlink": "the GPUs have NVLink",
        "p2p": "the GPUs reach each other over PCIe",
        "none": "the GPUs do not reach each other, so that cutting every layer would wait for it",
        "unknown": "nothing is known of the way between the GPUs",
    }
    first = tried[0]
    lack = f"lacks {format_bytes(first.missing_bytes)}" if first.missing_bytes else "holds fewer"
    return f"one GPU {lack}; {ways[link]}; this {holds}"


def _choose_cpu(
    loaded: LoadedConfig, summary: CheckpointSummary, cards: tuple[Card, ...]
) -> Choice:
    config, split = loaded.config, Split(len(cards))
    if split.ranks > 1:
        _demand_possible(loaded, summary, split, split.ranks)
    demand, stated = demand_of(config, summary, graphs=False), config.memory.kv_cache_size
    pool = host_pool(summary, split, demand) if stated == "auto" else stated // split.ranks
    found = evaluate(summary, split, cards, replace(demand, pool_bytes=pool))
    if stated == "auto" and not found.fits:
        spare = pool - found.missing_bytes
        smaller = max(1, spare // GIB) * GIB
        found = evaluate(summary, split, cards, replace(demand, pool_bytes=smaller))
    ranks = "one rank" if split.ranks == 1 else f"{split.ranks} ranks"
    return Choice(found, f"{ranks} of the CPU engine (parallel.cpu_ranks)", (found,), "none")
