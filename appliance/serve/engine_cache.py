"""What the engine left on its cache volume and must not find again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_P2P_RESULTS = "gpu_p2p_access_cache_for_*.json"
"""vLLM keys its peer access results by GPU indexes alone: they outlive cards and drivers."""


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the engine's cache directory under an environment, by vLLM's own rules."""
    home = environ.get("HOME") or str(Path.home())
    base = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    root = environ.get("VLLM_CACHE_ROOT", f"{base}/vllm")
    return Path(home + root[1:] if root.startswith("~/") else root)


def remove_p2p_results(root: Path) -> Iterator[tuple[Path, str]]:
    """Remove every stored peer access result; yield each file and why it stays, empty if gone.

    The gate has tested the pair just now; a result of other hardware or of another driver would
    overrule it, and every rank would wait for ever.
    """
    for path in sorted(root.glob(_P2P_RESULTS)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            yield path, error.strerror or str(error)
        else:
            yield path, ""
