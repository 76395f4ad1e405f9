"""Asks the method for a layer while the engine's own config speculates; prints the refusal."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from vllm.config import VllmConfig, set_current_vllm_config

import appliance.vllm_plugin
from appliance.errors import ApplianceError
from appliance.vllm_plugin.config import Nvfp4Config

appliance.vllm_plugin.register()
for method in ("mtp", "ngram"):
    engine, ours = VllmConfig(), Nvfp4Config()
    engine.speculative_config = SimpleNamespace(method=method)
    ours.maybe_update_config(sys.argv[1])
    with set_current_vllm_config(engine):
        try:
            ours.get_quant_method(None, "")
            sys.stdout.write(f"{method}: taken\n")
        except ApplianceError as error:
            sys.stdout.write(f"{method}: {error}\n")
