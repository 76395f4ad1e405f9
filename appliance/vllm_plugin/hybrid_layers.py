"""The norms and rotary embeddings of hybrid models, on the kernel library for GPUs.

Those norms store one less than they multiply by. The engine's own are torch's, in several kernels,
since their sum is FP32 beside FP16 activations; its rotary embeddings are a kernel of Triton.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from appliance.vllm_plugin import compat, compat_hybrid, engine_ops


def runs_on_library() -> bool:
    """Say if the engine computes on a GPU; on a CPU its own layers are right."""
    return compat.device_type() == "cuda"


class LibraryGemmaNorm(compat_hybrid.GemmaRMSNorm):  # type: ignore[misc]
    """x / rms(x) * (1 + weight), after adding a residual if there is one."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        """Keep what the layer runs on."""
        engine: Any = super()
        engine.__init__(hidden_size, eps)
        self.on_library = runs_on_library()
        self.gain: torch.Tensor | None = None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x, or of x plus residual together with that sum; these in place.

        Raises:
            LibraryError: If the library refuses the call.
        """
        if not self.on_library:
            engine: Any = super()
            return cast("torch.Tensor", engine.forward(x, residual))
        if self.gain is None:  # the first pass comes after loading, and before any capture
            self.gain = self.weight.data.float() + 1.0
        if residual is None:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            engine_ops.rms_norm(result, x, self.gain, self.variance_epsilon)
            return result
        engine_ops.fused_add_rms_norm(x, residual, self.gain, self.variance_epsilon)
        return x, residual


class LibraryMRotary(compat_hybrid.MRotaryEmbedding):  # type: ignore[misc]
    """Rotary embeddings of text, whose three kinds of positions are one."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Keep what it runs on: the engine's own where images may give positions of their own."""
        engine: Any = super()
        engine.__init__(*arguments, **named)
        self.on_library = runs_on_library() and compat_hybrid.serves_text_only()

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key, [tokens, heads * size], in place.

        Positions are [tokens] or [3, tokens].

        Raises:
            LibraryError: If the library refuses the call.
        """
        if not self.on_library:
            engine: Any = super()
            rotated = engine.forward(positions, query, key, offsets)
            return cast("tuple[torch.Tensor, torch.Tensor | None]", rotated)
        places = positions.view(-1, positions.shape[-1])[0]
        cache = self._match_cos_sin_cache_dtype(query)
        engine_ops.rotary_embedding(places, query, key, self.head_size, cache, self.is_neox_style)
        return query, key
