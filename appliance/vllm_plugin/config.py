"""The quantization method `nvfp4` as vLLM sees it: which layers get which method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.checkpoint.config import read_config
from appliance.checkpoint.inventory import require_drafter
from appliance.checkpoint.metadata import read_rules
from appliance.checkpoint.rules import Form, Rules
from appliance.checkpoint.shards import read_shards
from appliance.checkpoint.stored import STACKED
from appliance.checkpoint.tied import check_tied
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.vllm_plugin import compat, compat_hybrid, ops
from appliance.vllm_plugin.claims import is_served
from appliance.vllm_plugin.dense import (
    DenseEmbeddingMethod,
    DenseLinearMethod,
    Fp8LinearMethod,
)
from appliance.vllm_plugin.experts import DOWN, GATE, UP, Site
from appliance.vllm_plugin.inventory import (
    Found,
    Modules,
    Resolution,
    fp8_scale_name,
    is_packed,
    modules_of,
    resolve,
)
from appliance.vllm_plugin.linear import Nvfp4LinearMethod
from appliance.vllm_plugin.moe import Nvfp4MoEMethod
from appliance.vllm_plugin.names import NameSpace
from appliance.vllm_plugin.plain_moe import PlainMoEMethod
from appliance.vllm_plugin.route import (
    WeightRoute,
    choose_route,
    wanted_lenience,
    wanted_route,
)
from appliance.vllm_plugin.stacks import Stacks
from appliance.vllm_plugin.startup_table import report
from appliance.vllm_plugin.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD = "nvfp4"
VOLTA = 70


class Nvfp4Config(compat.QuantizationConfig):
    """Weight-only NVFP4 of three producers, with dense and FP8 parts beside it."""

    def __init__(self) -> None:
        """Start without a checkpoint; `maybe_update_config` reads it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules = Rules("none", "no checkpoint", "nothing")
        self.modules: Modules = {}
        self.names = NameSpace(())
        self.tied_head = False
        self.route: WeightRoute | None = None
        self.tally = Tally()

    def get_name(self) -> Any:  # noqa: ANN401 - the engine's type lists its own names only
        """Return the name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the types of activations that the engine's device computes in.

        Volta has no BF16; the CPU engine knows no other type for gated delta networks.
        """
        plain = [torch.float16, torch.float32]
        return [*plain, torch.bfloat16] if compat.device_type() == "cpu" else plain

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the smallest compute capability: the method is made for Volta."""
        return VOLTA

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file name, so that a checkpoint without metadata is asked by its tensors."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Nvfp4Config:
        """Return the method; `maybe_update_config` reads what the config says."""
        del config
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: object = None
    ) -> Any:  # noqa: ANN401 - the engine's type lists its own names only
        """Claim NVFP4 checkpoints of every producer, unless the user asked for another method."""
        del hf_config
        if user_quant == METHOD or (user_quant is None and is_served(hf_quant_cfg)):
            return METHOD
        return None

    def maybe_update_config(
        self, model_name: str, hf_config: object = None, revision: str | None = None
    ) -> None:
        """Read configuration and headers of the checkpoint, before any device memory is touched.

        Raises:
            ApplianceError: If the checkpoint is not a local directory (30), a file is missing (30)
                or corrupt (31), or the config asks for a scheme that is not served (30).
        """
        del revision
        root = Path(model_name)
        if not root.is_dir():
            fix = "set model.path to the directory of the checkpoint"
            fault = Fault("E_PATH", model_name, "a local directory", "none", fix)
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
        config, shards = read_config(root), read_shards(root)
        self.rules = read_rules(config)
        check_tied(config, shards)
        located = shards.locate().items()
        self.modules = modules_of(
            (name, Found(*tensor[:2], file)) for name, (file, tensor) in located
        )
        self.names = NameSpace(self.modules)
        text_config = getattr(hf_config, "text_config", hf_config)
        self.tied_head = bool(getattr(text_config, "tie_word_embeddings", False))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: compat.NameMapper) -> None:
        """Learn how the model class renames the checkpoint's modules."""
        self.names.add_mapper(hf_to_vllm_mapper)

    def get_quant_method(
        self, layer: compat.Layer, prefix: str
    ) -> compat.QuantizeMethodBase | None:
        """Return the method of one layer, None where the engine's own is right.

        Raises:
            ApplianceError: If this engine cannot compute with such weights (40), or config and
                tensors of the layer disagree (30).
        """
        self._settled_route()
        if isinstance(layer, compat.RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, compat.ParallelLMHead):
            return self._head_method(prefix)
        if isinstance(layer, compat.VocabParallelEmbedding):
            return self._embedding_method(prefix)
        if isinstance(layer, compat.LinearBase):
            return self._linear_method(prefix)
        return None

    def _settled_route(self) -> WeightRoute:
        """Choose the route while the engine's own config can be asked: at the first layer."""
        if self.route is None:
            require_drafter(compat.speculative_method(), self.modules)
            device = compat.device_type()
            settings = compat.additional_config()
            wanted = wanted_route(settings)
            self.rules = replace(self.rules, lenient=wanted_lenience(settings))
            self.route = choose_route(device, wanted, ops.routes(device))
            report(device, self.route)
        return self.route

    def _resolve(self, prefix: str) -> Resolution:
        packed = {**compat.USUAL_PARTS, **self.packed_modules_mapping}
        leaves = self.names.leaves(prefix, packed)
        return self._noted(resolve(leaves, prefix, self.modules, self.rules))

    def _noted(self, found: Resolution) -> Resolution:
        self.tally.note_overruled(found.overruled)
        return found

    def _linear_method(self, prefix: str) -> compat.QuantizeMethodBase:
        if compat_hybrid.skips(prefix):
            return DenseLinearMethod(prefix)
        found = self._resolve(prefix)
        if found.form is Form.DENSE:
            return DenseLinearMethod(prefix)
        self.tally.expect()
        if found.names is None:
            scale_name = fp8_scale_name(found.leaves, self.modules)
            return Fp8LinearMethod(found.leaves, prefix, self.tally, scale_name)
        route = self._settled_route()
        return Nvfp4LinearMethod(found.names, found.leaves, prefix, self.tally, route=route)

    def _head_method(self, prefix: str) -> compat.QuantizeMethodBase:
        """Return the method of a head, which may share the embedding."""
        if self.tied_head or self._resolve(prefix).form is Form.DENSE:
            return DenseEmbeddingMethod(prefix)
        return self._linear_method(prefix)

    def _embedding_method(self, prefix: str) -> compat.QuantizeMethodBase:
        """Return the method of an embedding; no list of the config names those."""
        module = self.names.checkpoint_name(prefix)
        if is_packed(self.modules.get(module, {})):
            fix = "serve a checkpoint with a dense embedding"
            fault = Fault("E_UNSUPPORTED_ALGO", module, "a dense embedding", "packed codes", fix)
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
        return DenseEmbeddingMethod(prefix)

    def _experts_method(self, layer: compat.Layer, prefix: str) -> compat.QuantizeMethodBase:
        root = self.names.parent_name(prefix)
        projections = {
            GATE: layer.ckpt_gate_proj_name,
            DOWN: layer.ckpt_down_proj_name,
            UP: layer.ckpt_up_proj_name,
        }
        site = Site(root, projections)
        experts = range(int(layer.global_num_experts))
        stacked = [f"{root}.{leaf}" for leaf in STACKED]
        is_stacked = any(leaf in self.modules for leaf in stacked)
        single = [f"{root}.{e}.{name}" for e in experts for name in projections.values()]
        leaves = stacked if is_stacked else single
        found = self._noted(resolve(leaves, prefix, self.modules, self.rules))
        if found.names is None:
            scale_name = None
            if found.form is Form.FP8:
                self.tally.expect()
                scale_name = fp8_scale_name(leaves, self.modules)
            stacks = {
                leaf: self.modules[f"{root}.{leaf}"]["weight"].shape
                for leaf in STACKED
                if is_stacked
            }
            return PlainMoEMethod(layer.moe_config, site, self.tally, scale_name, stacks=stacks)
        self.tally.expect()
        return Nvfp4MoEMethod(
            layer.moe_config,
            site,
            found.names,
            self.tally,
            route=self._settled_route(),
            stacks=self._stacks(root, found, is_stacked),
        )

    def _stacks(self, root: str, found: Resolution, is_stacked: bool) -> Stacks:
        """Return the shapes of stacked experts, none for experts stored one by one."""
        names = found.names
        if not is_stacked or names is None:
            return Stacks()
        stored = {leaf: self.modules[f"{root}.{leaf}"] for leaf in STACKED}
        return Stacks(
            {
                leaf: (parts[names.codes].shape, parts[names.scales].shape)
                for leaf, parts in stored.items()
            }
        )
