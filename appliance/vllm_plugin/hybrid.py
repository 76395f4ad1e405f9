"""What an engine needs to serve hybrid models, offered to it in one place."""

from __future__ import annotations

from appliance.vllm_plugin import compat_hybrid
from appliance.vllm_plugin.gdn_layer import GatedDeltaNet, NoChunks
from appliance.vllm_plugin.hybrid_layers import LibraryGemmaNorm, LibraryMRotary
from appliance.vllm_plugin.text_only import stand_in_for_torchvision

LAYERS = (GatedDeltaNet, NoChunks, LibraryGemmaNorm, LibraryMRotary)
"""Each stands for the engine's class that it extends."""


def offer_hybrids() -> None:
    """Offer the layers, and let the model classes be imported without torchvision."""
    for layer in LAYERS:
        compat_hybrid.offer_layer(layer)
    stand_in_for_torchvision()
