"""Holds the tensors outside the layers against the model: embedding, last norm, head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.layers import leave_unknown, take_others
from appliance.checkpoint.linears import PARTS, Entry, Tally, take_linear
from appliance.checkpoint.outline import Linear, Other
from appliance.checkpoint.rules import Form
from appliance.checkpoint.summary import Cut, Kind

if TYPE_CHECKING:
    from appliance.checkpoint.layers import Signature
    from appliance.checkpoint.outline import Outline

HEAD = "lm_head"
EMBEDDING = "embed_tokens"


def tally_top(top: Signature, outline: Outline) -> Tally:
    """Return sums, forms and faults of the tensors outside the layers."""
    tally = Tally()
    geometry = outline.geometry
    loose = dict(top)
    modules = _modules(loose)
    matrix = Linear(geometry.vocab_size, geometry.hidden_size, Cut.ROWS)
    take_linear(tally, EMBEDDING, matrix, modules.pop(EMBEDDING, {}), Kind.EMBEDDING)
    if tally.forms.pop(EMBEDDING, Form.DENSE) is not Form.DENSE:
        fix = "serve a checkpoint whose embedding is not quantized"
        tally.fault("E_UNSUPPORTED_ALGO", EMBEDDING, "BF16, F16 or F32", "a quantized one", fix)
    head = modules.pop(HEAD, {})
    if head or not geometry.tied_embeddings:
        take_linear(tally, HEAD, matrix, head, Kind.LM_HEAD)
    if geometry.tied_embeddings and tally.forms.get(HEAD, Form.DENSE) is not Form.DENSE:
        what, fix = "the embedding, which tie_word_embeddings makes the head", "repair that field"
        tally.fault("E_CONFIG_TENSOR_MISMATCH", HEAD, what, "a quantized head of its own", fix)
    take_others(tally, {"norm.weight": Other((geometry.hidden_size,))}, loose)
    leave_unknown(tally, modules, loose)
    return tally


def _modules(loose: Signature) -> dict[str, dict[str, Entry]]:
    """Move the parts of embedding and head out of the loose tensors."""
    modules: dict[str, dict[str, Entry]] = {}
    for name in list(loose):
        module, _, part = name.rpartition(".")
        if module in (HEAD, EMBEDDING) and part in PARTS:
            modules.setdefault(module, {})[part] = loose.pop(name)
    return modules
