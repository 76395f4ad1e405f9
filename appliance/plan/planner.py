"""Makes the plan: configuration, checkpoint and host in, one frozen value out."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Literal, cast

from appliance.config.base import Section
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.attention import attention_backend
from appliance.plan.cards import Cards, cpu_cards, gpu_cards
from appliance.plan.choice import choose
from appliance.plan.decisions import decisions, warnings
from appliance.plan.formats import format_faults, quantization
from appliance.plan.launch_plan import (
    Alternative,
    Decision,
    ExecutionPlan,
    LaunchPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    RunPlan,
    ServerPlan,
)
from appliance.plan.refusal import check_captures, does_not_fit
from appliance.plan.validated import KEY, capabilities_of, unvalidated
from healthchecks.assumed import MOST_GPUS, assumed_host

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary, Geometry
    from appliance.config.load import LoadedConfig
    from appliance.config.schema import Config
    from appliance.plan.candidate import Candidate
    from appliance.plan.decode import Plain
    from healthchecks.facts import HostFacts


def make_plan(loaded: LoadedConfig, checkpoint: CheckpointSummary, host: HostFacts) -> LaunchPlan:
    """Return what will be launched, every `auto` resolved.

    Raises:
        ApplianceError: Exit 10 if the configuration does not suit the model, 11 if a GPU is absent,
            30 if the checkpoint cannot be served, 32 if it does not fit.
    """
    config = loaded.config
    _check_checkpoint(loaded, checkpoint)
    on_cpu = config.execution.device == "cpu"
    cards = cpu_cards(loaded, host) if on_cpu else gpu_cards(loaded, host)
    choice = choose(loaded, checkpoint, cards.cards, host)
    taken = choice.taken
    if not taken.fits:
        raise does_not_fit(loaded, checkpoint, host, choice)
    check_captures(loaded, taken)
    execution = _execution(config, checkpoint.geometry, taken)
    indexes = () if on_cpu else tuple(card.index for card in taken.cards)
    found, recurrent = capabilities_of(host, indexes), checkpoint.geometry.recurrent_layers > 0
    risk = unvalidated(loaded, checkpoint.format, execution, found, recurrent=recurrent)
    return LaunchPlan(
        config_path=str(loaded.path),
        config_sha256=loaded.sha256,
        model=_model(config, checkpoint, taken),
        parallel=ParallelPlan(
            kind=taken.split.kind,
            tensor_parallel=taken.split.tensor,
            pipeline_parallel=taken.split.pipeline,
            gpus=() if on_cpu else tuple(card.name for card in taken.cards),
            gpu_indexes=indexes,
        ),
        memory=_memory(config, checkpoint, cards, taken),
        execution=execution,
        server=_server(config),
        run=_run(config, forced_canary=risk is not None),
        gate=_plain(config.gate),
        decisions=(
            *decisions(config, checkpoint, cards, choice=choice, execution=execution),
            *_forced(config, risk),
        ),
        warnings=(*warnings(loaded, checkpoint, cards, choice), *([risk] if risk else [])),
        alternatives=tuple(_alternative(each) for each in choice.tried if each is not taken),
    )


def check_without_cards(loaded: LoadedConfig, checkpoint: CheckpointSummary) -> None:
    """Check what is wrong on any cards: some machine of the largest V100s must have a plan.

    Raises:
        ApplianceError: As `make_plan`; for GPUs that are named, on as many GPUs.
    """
    parallel, refusals = loaded.config.parallel, list[ApplianceError]()
    stated = None if parallel.gpus == "all" else len(parallel.gpus)
    cut = parallel.mode in ("tensor", "pipeline")
    any_cards = parallel.model_copy(update={"gpus": "all"})
    config = loaded.config.model_copy(update={"parallel": any_cards})
    for count in [min(stated, MOST_GPUS)] if stated else range(1 + cut, MOST_GPUS + 1):
        host = assumed_host(f"{count}x32GiB-nvlink")
        try:
            make_plan(replace(loaded, config=config), checkpoint, host)
        except ApplianceError as refusal:
            refusals.append(refusal)
        else:
            return
    # Fewest cards say best what cannot be cut, most cards what is too large for all.
    least = refusals[0]
    raise refusals[-1] if least.exit_code == ExitCode.DOES_NOT_FIT else least


def _alternative(candidate: Candidate) -> Alternative:
    return Alternative(
        split=str(candidate.split),
        max_model_len=candidate.longest if candidate.fits else 0,
        kv_capacity_tokens=candidate.capacity_tokens if candidate.fits else 0,
        missing_bytes=candidate.missing_bytes,
    )


def _check_checkpoint(loaded: LoadedConfig, checkpoint: CheckpointSummary) -> None:
    model, faults = loaded.config.model, list[Fault]()
    limit, length = checkpoint.geometry.max_position, model.max_model_len
    if length != "auto" and length > limit:
        what, fix = "at most the model's own limit", f"set it to {limit} or less"
        place = loaded.where("model.max_model_len")
        fault = Fault("CONTEXT_TOO_LONG", place, f"{what} of {limit}", f"{length}", fix)
        raise ApplianceError(ExitCode.CONFIG, fault)
    execution = loaded.config.execution
    if checkpoint.geometry.recurrent_layers and execution.prefix_caching:
        _check_prefixes(loaded)
    where = str(checkpoint.path)
    if not checkpoint.has_tokenizer:
        what = "a tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)"
        fix = "fetch the checkpoint again with all its files"
        faults.append(Fault("E_TOKENIZER_MISSING", where, what, "none", fix))
    if loaded.config.server.api == "all" and not _has_template(loaded.config, checkpoint):
        what = "a chat template, or every chat request would be refused"
        fix = "set model.chat_template, or server.api: completions_only"
        faults.append(Fault("NO_CHAT_TEMPLATE", where, what, "none", fix))
    faults += format_faults(loaded, checkpoint)
    if faults:
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, *faults)


def _has_template(config: Config, checkpoint: CheckpointSummary) -> bool:
    return config.model.chat_template is not None or checkpoint.has_chat_template


def _check_prefixes(loaded: LoadedConfig) -> None:
    """A recurrent state is kept at block ends only, so that prompts must be cut there."""
    if loaded.config.execution.chunked_prefill:
        return
    place = loaded.where("execution.prefix_caching")
    what = "false without execution.chunked_prefill, since the model keeps a recurrent state"
    fix = "set execution.chunked_prefill: true or execution.prefix_caching: false"
    raise ApplianceError(ExitCode.CONFIG, Fault("CONFIG_CONFLICT", place, what, "true", fix))


def _model(config: Config, checkpoint: CheckpointSummary, taken: Candidate) -> ModelPlan:
    template = config.model.chat_template
    return ModelPlan(
        path=config.model.path,
        served_name=config.model.served_name,
        format=checkpoint.format,
        producer=checkpoint.producer,
        quantization=quantization(checkpoint, config.execution.device),
        architecture=checkpoint.geometry.architecture,
        max_model_len=taken.longest,
        trust_remote_code=config.model.trust_remote_code,
        chat_template=template,
        integrity=config.model.integrity,
        digest=checkpoint.digest,
        text_only=any(note.startswith("I_TEXT_ONLY") for note in checkpoint.notes),
        recurrent=checkpoint.geometry.recurrent_layers > 0,
        has_chat_template=config.server.api == "all" and _has_template(config, checkpoint),
        lenient=config.model.lenient,
    )


def _memory(
    config: Config, checkpoint: CheckpointSummary, cards: Cards, taken: Candidate
) -> MemoryPlan:
    stages = [taken.split.stage(rank) for rank in range(taken.split.ranks)]
    element_bytes = 4 if config.execution.device == "cpu" else 2
    pool = sum(taken.blocks * taken.layout.block_bytes(stage) for stage in stages)
    if taken.pool_bytes is not None:
        pool = taken.pool_bytes * taken.split.ranks
    return MemoryPlan(
        gpu_memory_utilization=cards.utilization,
        shm_bytes=config.memory.shm_size,
        max_num_seqs=config.memory.max_num_seqs,
        max_num_batched_tokens=config.memory.max_num_batched_tokens,
        kv_cache_dtype=config.memory.kv_cache_dtype,
        kv_bytes_per_token=checkpoint.geometry.kv_bytes_per_token(element_bytes),
        kv_cache_bytes=pool,
        kv_capacity_tokens=taken.capacity_tokens,
        ranks=taken.budgets,
        kv_block_tokens=taken.layout.block_tokens,
    )


def _execution(config: Config, geometry: Geometry, taken: Candidate) -> ExecutionPlan:
    section = config.execution
    device: Literal["cuda", "cpu"] = "cpu" if section.device == "cpu" else "cuda"
    eager = section.enforce_eager
    if eager == "auto":
        eager = device == "cpu" or not taken.graphs
    return ExecutionPlan(
        device=device,
        dtype="float32" if device == "cpu" else "float16",
        weights="dequantized" if device == "cpu" else section.weights,
        enforce_eager=eager,
        custom_all_reduce=False,
        chunked_prefill=section.chunked_prefill,
        prefix_caching=section.prefix_caching,
        block_size=section.block_size,
        attention_backend=None if device == "cpu" else attention_backend(geometry),
        extra_args=dict(section.extra_args),
    )


def _server(config: Config) -> ServerPlan:
    server = config.server
    return ServerPlan(
        host=server.host,
        port=server.port,
        admin_host=server.admin_host,
        admin_port=server.admin_port,
        api_keys_file=server.api_keys_file,
        max_request_bytes=server.limits.max_request_size,
        max_concurrent_requests=server.limits.max_concurrent_requests,
        requests_per_minute_per_key=server.limits.requests_per_minute_per_key,
        drain_timeout_s=server.drain_timeout,
    )


def _forced(config: Config, risk: str | None) -> tuple[Decision, ...]:
    if risk is None or config.startup.canary:
        return ()
    return (Decision("startup.canary", "true", f"forced by {KEY}: nobody ran this way"),)


def _run(config: Config, *, forced_canary: bool) -> RunPlan:
    runtime, startup = config.runtime, config.startup
    return RunPlan(
        startup_timeout_s=startup.timeout,
        canary=startup.canary or forced_canary,
        ladder=startup.ladder,
        on_gpu_fault=runtime.on_gpu_fault,
        stall_s=runtime.stall,
        sample_interval_s=runtime.thermal.sample_interval,
        restart_count=runtime.restart_budget.count,
        restart_per_s=runtime.restart_budget.per,
        log_format=config.logging.format,
        log_level=config.logging.level,
        leave_gpu_c=runtime.thermal.leave_gpu_c,
        leave_hbm_margin_c=runtime.thermal.leave_hbm_margin_c,
        min_decode_rate=startup.min_decode_rate,
    )


def _plain(value: Plain) -> Plain:
    """Return a configuration section as plain values: bytes, seconds, days as ISO text."""
    if isinstance(value, Section):
        return {name: _plain(item) for name, item in value}
    if isinstance(value, (list, tuple)):
        items: list[Plain] = cast("Plain", value)
        return [_plain(item) for item in items]
    return value.isoformat() if isinstance(value, date) else value
