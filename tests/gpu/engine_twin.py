"""The dequantized FP32 model in plain transformers, which judges an engine's answers.

A sparse layer sends a token to the experts of the largest shares. Where two shares are as good as
equal, FP16 may send it elsewhere, and everything after that token differs. So where an answer is
far from the twin, the twin tries what it would have said with such ties broken the other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TIE = 2e-3
"""Shares of two experts that lie closer are a tie that rounding may break: FP16 moves a logit of 4
by up to 2^-10 of itself, so two shares of a quarter by 1e-3 each, towards each other at worst."""

FAR = 0.05
"""A log-probability that differs by more is looked into."""

NEARLY = 2e-2
"""Shares that lie closer are looked at where no tie explains an answer; what is found is told."""

MOST_FLIPS = 3
"""Ties of one answer that are broken the other way at most."""


@dataclass(frozen=True)
class Tie:
    """The last chosen and the first left expert of one token in one sparse layer."""

    layer: int
    place: int
    margin: float


@dataclass(frozen=True)
class Judgement:
    """What the twin holds of one answer, with the ties that it broke as the engine did.

    `gaps` and `differences` have one number a token of the answer: what the twin's likeliest token
    has in log-probability above the answer's, and how far the engine's own log-probability is off.
    """

    gaps: torch.Tensor
    differences: torch.Tensor
    flipped: tuple[Tie, ...]

    @property
    def worst(self) -> float:
        """The largest difference of a log-probability; NaN counts as infinite."""
        return float(self.differences.nan_to_num(nan=torch.inf).max())

    @property
    def excess(self) -> float:
        """What all differences have above FAR, together: each tie that explains one lowers it."""
        return float((self.differences.nan_to_num(nan=torch.inf) - FAR).clamp(min=0).sum())


class Twin:
    """One dequantized model, and which ties of its routers are broken the other way."""

    def __init__(self, folder: str) -> None:
        """Load the model from a folder in FP32."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.top_k: int = getattr(self.model.config, "num_experts_per_tok", 0)
        self._flips: tuple[Tie, ...] = ()
        self._shares: list[torch.Tensor] = []
        gates = [layer.mlp.gate for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        for number, gate in enumerate(gates if self.top_k else ()):
            gate.register_forward_hook(self._routed(number))

    def judge(self, prompt: list[int], answer: list[int], said: list[float]) -> Judgement:
        """Judge an answer and the log-probabilities `said` of its tokens."""
        best, ties = self._judge(prompt, answer, said, ())
        while best.worst > FAR and len(best.flipped) < MOST_FLIPS:
            tried = [
                self._judge(prompt, answer, said, (*best.flipped, tie))
                for tie in ties
                if tie not in best.flipped
            ]
            if not tried:
                break
            better, new_ties = min(tried, key=lambda each: each[0].excess)
            if better.excess >= best.excess:
                break
            best, ties = better, new_ties
        return best

    def nearly(self, prompt: list[int], answer: list[int], said: list[float]) -> Tie | None:
        """Return the closest choice that would explain a far answer but is no tie; None without."""
        best = self.judge(prompt, answer, said)
        self._judge(prompt, answer, said, best.flipped)
        for tie in sorted(self._ties(NEARLY), key=lambda each: each.margin):
            if tie.margin >= TIE:
                judged, _ = self._judge(prompt, answer, said, (*best.flipped, tie))
                if judged.worst <= FAR:
                    return tie
        return None

    def _judge(
        self, prompt: list[int], answer: list[int], said: list[float], flips: tuple[Tie, ...]
    ) -> tuple[Judgement, list[Tie]]:
        right = self.log_probabilities(prompt + answer[:-1], flips)[-len(answer) :]
        chosen = right.gather(1, torch.tensor(answer)[:, None])[:, 0]
        off = (chosen - torch.tensor(said)).abs()
        return Judgement(right.max(-1).values - chosen, off, flips), self._ties()

    def log_probabilities(self, tokens: list[int], flips: tuple[Tie, ...] = ()) -> torch.Tensor:
        """Return those of every next token, [tokens, vocabulary]."""
        self._flips = flips
        self._shares.clear()
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]

    def _ties(self, below: float = TIE) -> list[Tie]:
        """Return the ties of the tokens that were read last, those of the flips among them."""
        found: list[Tie] = []
        for layer, shares in enumerate(self._shares):
            ordered = shares.sort(-1, descending=True).values
            margins = ordered[:, self.top_k - 1] - ordered[:, self.top_k]
            places = (margins < below).nonzero().flatten().tolist()
            found += [Tie(layer, place, float(margins[place])) for place in places]
        return found

    def _routed(self, layer: int) -> Any:
        """A hook that sends the flipped tokens to the first expert left instead of the last."""

        def hook(_gate: object, _given: object, routed: tuple[torch.Tensor, ...]) -> Any:
            logits, weights, experts = routed
            shares = logits.float().softmax(-1)
            self._shares.append(shares)
            for tie in self._flips:
                if tie.layer == layer and tie.place < len(shares):
                    order = shares[tie.place].argsort(descending=True)
                    kept = torch.cat((order[: self.top_k - 1], order[self.top_k : self.top_k + 1]))
                    chosen = shares[tie.place, kept]
                    experts[tie.place] = kept
                    weights[tie.place] = chosen / chosen.sum()
            return logits, weights, experts

        return hook
