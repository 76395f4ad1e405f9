"""Values that are allowed and deserve a second look: bypasses, debug routes, awkward paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from appliance.config.schema import Config


def cautions(config: Config, where: Callable[[str], str]) -> Iterator[str]:
    """Yield one sentence for every such value.

    Args:
        config: A valid configuration.
        where: Returns `file:line key` of a key.
    """
    bypasses: tuple[tuple[str, bool, str], ...] = (
        ("gate.mode", config.gate.mode == "warn", "the hardware gate reports but starts anyway"),
        ("gate.mode", config.gate.mode == "off", "the hardware is not checked at all"),
        ("gate.on_unknown", config.gate.on_unknown == "allow",
         "hardware that cannot be measured counts as healthy"),
        ("gate.ecc.require_enabled", not config.gate.ecc.require_enabled,
         "GPUs without ECC are accepted: flipped bits go unnoticed"),
        ("model.trust_remote_code", config.model.trust_remote_code,
         "code that ships inside the checkpoint is run"),
        ("model.integrity", config.model.integrity == "off",
         "files of the checkpoint are not checked before loading"),
        ("model.lenient", config.model.lenient == "tensors-win",
         "packed tensors win over the checkpoint's own exclude list"),
        ("execution.allow_unvalidated", config.execution.allow_unvalidated,
         "combinations that were never run may start; only the canary judges them"),
        ("execution.weights", config.execution.weights == "dequantized",
         "a debug route: every weight takes 2 bytes"),
        ("startup.canary", not config.startup.canary,
         "ready is reported before an answer was seen"),
    )  # fmt: skip
    for key, active, sentence in bypasses:
        if active:
            yield f"{where(key)}: {sentence}"
    paths = (
        ("model.path", config.model.path),
        ("model.chat_template", config.model.chat_template),
        ("server.api_keys_file", config.server.api_keys_file),
    )
    for key, path in paths:
        if path is not None and (not path.isascii() or " " in path):
            yield f"{where(key)}: spaces or non-ASCII letters in a path trip other tools"
    for number, override in enumerate(config.gate.overrides):
        yield (
            f"{where(f'gate.overrides[{number}]')}: {override.check} of {override.gpu} is accepted "
            f"up to {override.bound:g} until {override.until.isoformat()} by {override.by}"
        )
