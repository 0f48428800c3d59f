"""How far a cross-entropy and its gradients in fp32 may be from the exact ones, for a given case: a derivation.

Notation: one row has logits z_c = h . w_c + b_c over V classes, their maximum m, s_c = z_c - m <= 0, S = sum exp(s_c),
p_c = exp(s_c) / S, the target t. u = 2^-24 is the unit roundoff of fp32. A sum of n products or numbers, in any order
and with or without fused multiply-adds, is off by at most gamma(n) = n u / (1 - n u) times the sum of the magnitudes
(Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4). `exp` and `log` are within one unit in the
last place, 2 u relative.

1. Logits. The computed z' has |z'_c - z_c| <= E_c = gamma(K + 1) (|h| . |w_c| + |b_c|) for K hidden features. This is
   the conditioning of the case: large terms that cancel give a small logit with a large error, in any summation.
2. Logarithm of the sum. The derivatives of m + log S are the p_c, so moving z to z' moves it by at most max_c E_c.
   Given z', each s_c is rounded once (u |s_c|), exp is within 2 u and the sum within gamma(V), so S has a relative
   error of at most u sum_c p_c |s_c| + gamma(V + 2). That sum is the entropy of p less log S, at most log V. The
   logarithm adds 2 u log S, and log S <= log V. Together log S is off by at most L = 3 u log V + gamma(V + 2).
3. Loss of a row, w_t (log S + (m - z_t)): off by w_t (E_t + max E + L + u |m - z_t| + a few u of the loss itself).
   Smoothing adds share * (W log S - sum_c v_c s_c), with class weights v and W = sum v: off by
   share * sum_c v_c (E_c + max E + L + gamma(V + 1) (log S + |s_c|)).
4. Probabilities. p'_c / p_c lies within exp(+-rho_c) with rho_c = E_c + max E + u |s_c| + 2 L + a few u. Underflow
   adds at most the smallest normal number.
5. Gradients of logits, g_c = a p_c - hit [c = t] - up share v_c, where a = hit + up share W. So
   |dg_c| <= a p_c (exp(rho_c) - 1) + gamma(few) (a p_c + hit [c = t] + up share v_c): the last bracket, not |g_c|, is
   what a confident row's gradient is measured with, for it is a probability less 1.
6. Gradients of hidden states, weights and bias are products of g with the weights, the hidden states and ones:
   |dg| |x| + gamma(number of terms) (|g| + |dg|) |x|, and a few roundings of scales.

Everything is evaluated in double precision, whose own errors are 2^-29 of these; `ROOM` covers them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

UNIT = 2.0**-24
FEW = 16
"""Single roundings of scales, smoothing and class weights: there are fewer than these on any way."""
ROOM = 1.001
SMALLEST_NORMAL = 2.0**-126


def gamma(num_terms: int) -> float:
    return num_terms * UNIT / (1 - num_terms * UNIT)


def assert_within(ours: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    error = (ours.double() - exact).abs().view(bound.shape)
    worst = float((error / (bound + 1e-300)).max()) if error.numel() else 0.0
    assert bool((error <= bound).all()), f"an error of {worst:.2f} times its bound"


class LossBounds:
    """The bounds of one case of `tests/techniques/test_tiling_loss.py`, number by number."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.hidden = case["hidden"].double().flatten(0, 1)
        self.weight = case["weight"].double()
        self.vocabulary, self.width = self.weight.shape
        bias = torch.zeros(self.vocabulary) if case["bias"] is None else case["bias"]
        self.bias = bias.double()
        self.target = case["target"].flatten()
        self.kept = self.target != case["settings"]["ignore_index"]
        self.column = self.target.where(self.kept, 0)[:, None]
        weight = case["class_weight"]
        self.class_weight = (torch.ones(self.vocabulary) if weight is None else weight).double()
        self.smoothing = case["settings"]["label_smoothing"]
        self._statistics()

    def _statistics(self) -> None:
        """Steps 1 and 2."""
        logits = self.hidden @ self.weight.T + self.bias
        self.logit_error = gamma(self.width + 1) * (self.hidden.abs() @ self.weight.abs().T + self.bias.abs())
        self.largest_error = self.logit_error.amax(1, keepdim=True)
        self.below_max = logits - logits.amax(1, keepdim=True)
        self.log_sum = self.below_max.exp().sum(1).log()
        self.log_sum_error = 3 * UNIT * math.log(self.vocabulary) + gamma(self.vocabulary + 2)
        self.shift_error = self.logit_error + self.largest_error + self.log_sum_error

    def _at_target(self, table: torch.Tensor) -> torch.Tensor:
        return table.gather(1, self.column)[:, 0]

    @property
    def _hit(self) -> torch.Tensor:
        return (1 - self.smoothing) * self.class_weight[self.column[:, 0]]

    def _row_losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Magnitudes of each row's terms, and errors: step 3."""
        share = self.smoothing / self.vocabulary
        size = self._hit * (self.log_sum - self._at_target(self.below_max))
        size = size + share * ((self.log_sum[:, None] - self.below_max) @ self.class_weight)
        of_target = self._at_target(self.shift_error - UNIT * self.below_max)
        of_all = self.shift_error + gamma(self.vocabulary + 1) * (self.log_sum[:, None] - self.below_max)
        error = self._hit * of_target + share * (of_all @ self.class_weight) + gamma(FEW) * size
        return size * self.kept, error * self.kept

    def _scale(self) -> float:
        if self.case["settings"]["reduction"] != "mean":
            return 1.0
        return 1.0 / float((self.class_weight[self.column[:, 0]] * self.kept).sum())

    def loss(self) -> torch.Tensor:
        size, error = self._row_losses()
        if self.case["settings"]["reduction"] == "none":
            return ROOM * error.view(self.case["target"].shape)
        return ROOM * self._scale() * (error.sum() + gamma(2 * len(size) + FEW) * (size + error).sum())

    def _logit_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Magnitudes of the terms, and errors: steps 4 and 5."""
        per_row = self.case["settings"]["reduction"] == "none"
        upstream = self.case["upstream"].double().flatten() if per_row else torch.tensor(1.7 * self._scale())
        upstream = (upstream * self.kept)[:, None]
        smooth = upstream * self.smoothing / self.vocabulary * self.class_weight
        hit = upstream[:, 0] * self._hit
        probability = (self.below_max - self.log_sum[:, None]).exp()
        spread = (hit[:, None] + smooth.sum(1, keepdim=True)) * probability
        terms = (spread + smooth).scatter_add(1, self.column, hit[:, None])
        log_error = self.shift_error + self.log_sum_error - UNIT * self.below_max + gamma(FEW)
        counted = gamma(2 * len(self.target) + self.vocabulary + FEW)  # scales are sums themselves
        return terms, spread * torch.expm1(log_error) + counted * terms + upstream * SMALLEST_NORMAL

    def gradient(self, name: str) -> torch.Tensor:
        """Step 6."""
        size, error = self._logit_gradients()
        if name == "hidden":
            other, num_terms = self.weight, self.vocabulary
        else:
            other, num_terms = self.hidden if name == "weight" else torch.ones(len(size), 1).double(), len(size)
            size, error = size.T, error.T
        bound = (error + gamma(num_terms + FEW) * (size + error)) @ other.abs()
        return ROOM * bound.view(self.case[name].shape)
