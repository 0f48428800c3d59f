"""Small programs of plain operators, as Liger's scripts measure them: what exists beforehand, and what is repeated.

A program makes its tensors and returns the step. What the script keeps alive beside them (the other implementation's
weights, an output gradient) is made, too, and kept by `holding`. Values are of no interest: tensors are left empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], object]
Settings = dict[str, Any]
"""A row's: dimensions by their names, `dtype`, `mode`."""
BF16 = torch.bfloat16
HALF_LOG = math.log(0.5)


def holding(step: Step, *kept: object) -> Step:
    """The step, which keeps these alive."""

    def held() -> object:
        assert kept is not None
        return step()

    return held


def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def head(width: int, vocabulary: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(width, vocabulary, bias=bias, dtype=BF16)


def _in_mode(mode: str, forward: Callable[[], Tensor]) -> Step:
    """As the scripts repeat a layer: forward alone, backward of one forward, or both."""
    if mode == "forward":
        return forward
    if mode == "backward":
        output = forward()
        gradient = torch.empty_like(output)
        return lambda: output.backward(gradient, retain_graph=True)
    return _both(forward)


def _both(forward: Callable[[], Tensor], gradient: Tensor | None = None) -> Step:
    def step() -> None:
        output = forward()
        output.backward(torch.empty_like(output) if gradient is None else gradient, retain_graph=True)

    return step


def _loss(forward: Callable[[], Tensor], *, retain: bool = False) -> Step:
    def step() -> None:
        forward().backward(retain_graph=retain)

    return step


# ---- losses on probabilities


def cross_entropy(s: Settings) -> Step:
    rows = s["B"] * s["T"]
    logits, target = empty(rows, s["V"], grad=True), ids(rows)
    return _loss(lambda: F.cross_entropy(logits, target))


def kl_div(s: Settings) -> Step:
    rows = s["B"] * s["T"]
    logits = empty(rows, s["V"], grad=True).log_softmax(-1)
    target = empty(rows, s["V"]).softmax(-1)
    return _loss(lambda: F.kl_div(logits, target, reduction="batchmean"), retain=True)


def tvd(s: Settings) -> Step:
    rows = s["B"] * s["T"]
    first = empty(rows, s["V"], grad=True).softmax(-1)
    second = empty(rows, s["V"]).softmax(-1)
    return _loss(lambda: ((first - second).abs() / 2.0).sum() / rows, retain=True)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen's and Shannon's, of logarithms; the middle's logarithm is taken twice."""
    middle = torch.lerp(first.exp(), second.exp(), 0.5)

    def distance(other: Tensor) -> Tensor:
        return F.kl_div(middle.log(), other, reduction="none", log_target=True).sum(-1)

    total = 0.5 * distance(second) + 0.5 * distance(first)
    return (total / first.shape[0]).sum()


def jsd(s: Settings) -> Step:
    rows, width = (s["BT"], s["vocab_size"]) if "BT" in s else (s["B"] * s["T"], s["V"])
    first = empty(rows, width, grad=True).log_softmax(-1)
    second = empty(rows, width).log_softmax(-1)
    return _loss(lambda: _divergence(first, second), retain=True)


# ---- norms and activations


def layer_norm(s: Settings) -> Step:
    other, layer = nn.LayerNorm(s["N"]), nn.LayerNorm(s["N"])
    x, gradient = empty(s["M"], s["N"], grad=True), empty(s["M"], s["N"])
    return holding(_both(lambda: layer(x), gradient), other)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    square = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(square + 1e-6)
    return weight * wide.to(x.dtype)


def rms_norm(s: Settings) -> Step:
    other, weight = (nn.Parameter(empty(s["H"])) for _ in range(2))
    x, gradient = empty(s["M"], s["H"], dtype=s["dtype"], grad=True), empty(s["M"], s["H"], dtype=s["dtype"])
    return holding(_both(lambda: _rms(x, weight), gradient), other)


def fused_add_rms_norm(s: Settings) -> Step:
    others = [nn.Parameter(empty(s["H"])) for _ in range(3)]
    weight = nn.Parameter(empty(s["H"]))
    x, residual = (empty(s["M"], s["H"], grad=True) for _ in range(2))
    gradients = empty(s["M"], s["H"]), empty(s["M"], s["H"])

    def forward() -> tuple[Tensor, Tensor]:
        total = x + residual
        return _rms(total, weight), total

    def step() -> None:
        torch.autograd.backward(forward(), gradients)

    return holding(step, others)


def megatron_rms_norm(s: Settings) -> Step:
    layer = nn.RMSNorm(s["H"], eps=1e-6, dtype=BF16)
    x = empty(s["S"], s["B"], s["H"], dtype=BF16, grad=True)

    def step() -> None:
        output = layer(x)
        output.sum().backward()

    return step


def group_norm(s: Settings) -> Step:
    other, layer = (nn.GroupNorm(s["C"] // s["channels_per_group"], s["C"]) for _ in range(2))
    x = empty(s["M"], s["C"], s["H"], grad=True)
    return holding(_both(lambda: layer(x)), other)


def softmax(s: Settings) -> Step:
    x = empty(1, s["N"], dtype=s["dtype"], grad=True)
    return _both(lambda: x.softmax(-1))


def relu_squared(s: Settings) -> Step:
    x = empty(1, s["N"], dtype=s["dtype"], grad=True)
    return _both(lambda: x.relu().square())


def sparsemax(s: Settings) -> Step:
    x = empty(s["B"] * s["T"], s["V"], grad=True)
    gradient = torch.empty_like(x)

    def forward() -> Tensor:
        falling, _ = torch.sort(x, dim=-1, descending=True)
        sums = falling.cumsum(-1)
        counts = torch.arange(1, s["V"] + 1, dtype=x.dtype).view(1, -1)
        bound = 1 + counts * falling
        is_in = bound > sums
        number = is_in.sum(-1, keepdim=True).clamp(min=1)
        total = (falling * is_in).sum(-1, keepdim=True)
        level = (total - 1) / number
        return (x - level).clamp(min=0)

    return _both(forward, gradient)


# ---- layers


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=BF16)
        self.is_gelu = "gelu" in activation

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = F.gelu(gate, approximate="tanh") if self.is_gelu else F.silu(gate)
        return self.down(gate * self.up(x))


def mlp(s: Settings) -> Step:
    batch = s["bsz"] if "bsz" in s else s["B"]
    x = empty(batch, s["T"], s["hidden_size"], dtype=BF16, grad=True)
    layer = GatedMlp(s["hidden_size"], s["intermediate_size"], s["hidden_act"])
    return _in_mode(s["mode"], lambda: layer(x))


def megatron_swiglu(s: Settings) -> Step:
    x = empty(s["S"], s["B"], 2 * s["ffn_local"], dtype=BF16, grad=True)

    def forward() -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def step() -> None:
        x.grad = None
        output = forward()
        output.sum().backward()

    return step


def embedding(s: Settings) -> Step:
    words = ids(s["B"], s["T"])
    other, layer = (nn.Embedding(s["V"], s["D"]) for _ in range(2))

    def step() -> None:
        output = layer(words)
        output.backward(torch.empty_like(output))

    return holding(step, other)


def fused_neighborhood_attention(s: Settings) -> Step:
    batch, length, width, num_heads = s["batch_size"], s["seq_len"], s["hidden_size"], s["num_heads"]
    others = [nn.Linear(width, width) for _ in range(4)]
    to_query, to_key, to_value, out = (nn.Linear(width, width) for _ in range(4))
    x = empty(batch, length, width, grad=True)
    gradient = torch.empty_like(x)

    def heads_of(projection: nn.Linear) -> Tensor:
        return projection(x).view(batch, length, num_heads, -1).transpose(1, 2)

    def forward() -> Tensor:
        query, key, value = heads_of(to_query), heads_of(to_key), heads_of(to_value)
        scores = (query @ key.transpose(-2, -1)) * 0.125
        near = torch.zeros(length, length, dtype=torch.bool)
        scores = scores.masked_fill(~near, float("-inf"))
        weights = scores.softmax(-1)
        output = weights @ value
        output = output.transpose(1, 2).contiguous().view(batch, length, width)
        return out(output)

    return holding(_both(forward, gradient), others)


def _attention_scores(s: Settings) -> tuple[Tensor, Tensor, nn.Conv2d, nn.Conv2d]:
    size, channels = s["L"], s["C_in"]
    other, layer = (nn.Conv2d(channels, channels, s["K"], padding=s["K"] // 2, dtype=s["dtype"]) for _ in range(2))
    x = empty(s["B"], channels, size, size, dtype=s["dtype"], grad=True)
    return x, torch.empty_like(x), other, layer


def _lower(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size, dtype=torch.bool)).view(1, 1, size, size)


def multi_token_attention(s: Settings) -> Step:
    x, gradient, other, layer = _attention_scores(s)

    def forward() -> Tensor:
        mask = _lower(s["L"])
        low, zero = empty(dtype=s["dtype"]), empty(dtype=s["dtype"])
        weights = x.masked_fill(~mask, low).softmax(-1)
        output = layer(weights)
        return output.masked_fill(~mask, zero)

    return holding(_both(forward, gradient), other)


def sparse_multi_token_attention(s: Settings) -> Step:
    x, gradient, other, layer = _attention_scores(s)

    def forward() -> Tensor:
        mask = _lower(s["L"])
        low, zero = empty(dtype=s["dtype"]), empty(dtype=s["dtype"])
        scores = x.masked_fill(~mask, low)
        falling, _ = torch.sort(scores, dim=-1, descending=True)
        sums = falling.cumsum(-1)
        counts = torch.arange(1, s["L"] + 1, dtype=x.dtype).view(1, 1, 1, -1)
        is_seen = falling > -1e8
        is_in = (1 + counts * falling > sums) & is_seen
        number = is_in.sum(-1, keepdim=True)
        safe = torch.max(number, torch.ones_like(number))
        level = sums.gather(-1, safe - 1)
        level = (level - 1) / safe.to(x.dtype)
        level = torch.where(number == 0, torch.full_like(level, float("inf")), level)
        output = layer((scores - level).clamp(min=0))
        return output.masked_fill(~mask, zero)

    return holding(_both(forward, gradient), other)


# ---- rotary embeddings


def _rotary(s: Settings) -> tuple[int, int, Tensor, Tensor]:
    """Length and width of a head; positions, and angles, which are products of them: cuBLAS takes its workspace."""
    width = s["H"] if "H" in s else s["hidden_size"]
    length = s["T"] if "T" in s else s["seq_len"]
    size = width // s["num_q_heads"]
    frequencies, positions = empty(size // 2), ids(1, length)
    angles = frequencies[None, :, None] @ positions[:, None, :].float()
    del angles
    return length, size, frequencies, positions


def rope(s: Settings) -> Step:
    length, size, *kept = _rotary(s)
    query, key = (
        empty(1, length, s[name], size, dtype=BF16, grad=True).transpose(1, 2)
        for name in ("num_q_heads", "num_kv_heads")
    )
    gradients = torch.empty_like(query), torch.empty_like(key)
    cos, sin = (empty(1, length, size, dtype=BF16) for _ in range(2))

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)

    def forward() -> tuple[Tensor, Tensor]:
        return (
            (query * cos.unsqueeze(1)) + (turned(query) * sin.unsqueeze(1)),
            (key * cos.unsqueeze(1)) + (turned(key) * sin.unsqueeze(1)),
        )

    return holding(_gradients_of(forward, (query, key), gradients), kept)


def llama4_rope(s: Settings) -> Step:
    length, size, *kept = _rotary(s)
    query, key = (empty(1, length, s[name], size, dtype=BF16, grad=True) for name in ("num_q_heads", "num_kv_heads"))
    gradients = torch.empty_like(query), torch.empty_like(key)
    factors = empty(1, length, size // 2, dtype=torch.complex64)

    def forward() -> tuple[Tensor, Tensor]:
        pairs = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (query, key)]
        first, second = (torch.view_as_real(x * factors[:, :, None, :]).flatten(3) for x in pairs)
        return first.to(BF16), second.to(BF16)

    return holding(_gradients_of(forward, (query, key), gradients), kept)


def _gradients_of(
    forward: Callable[[], tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Step:
    def step() -> None:
        outputs = forward()
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return step


# ---- language-model heads with their losses


def fused_linear_cross_entropy(s: Settings) -> Step:
    x, target = empty(s["BT"], s["H"], dtype=BF16, grad=True), ids(s["BT"])
    other, layer = head(s["H"], s["V"]), head(s["H"], s["V"])
    return holding(_loss(lambda: F.cross_entropy(layer(x), target)), other)


def fused_linear_jsd(s: Settings) -> Step:
    student, teacher = head(s["H"], s["V"]), head(s["H"], s["V"])
    x, fixed = empty(s["BT"], s["H"], dtype=BF16, grad=True), empty(s["BT"], s["H"], dtype=BF16)

    def forward() -> Tensor:
        mine, theirs = student(x), teacher(fixed)
        first = (mine / 1.0).log_softmax(-1)
        second = (theirs / 1.0).log_softmax(-1)
        return _wide_divergence(first, second)

    return _loss(forward)


def _wide_divergence(first: Tensor, second: Tensor) -> Tensor:
    second, first = second.float(), first.float()
    return _divergence(first, second).to(BF16)


def _distillation(s: Settings, soft_loss: Callable[[Tensor, Tensor], Tensor], *, is_early: bool) -> Step:
    """A student of half the width; both implementations' heads, the plain input and both students' inputs exist.

    Early versions took the teacher's gradients as well, and did not divide by the temperature in place.
    """
    width, vocabulary, rows = s["H"], s["V"], s["BT"]
    others = head(width // 2, vocabulary), head(width, vocabulary)
    student, teacher = head(width // 2, vocabulary), head(width, vocabulary)
    kept = empty(rows, width // 2, dtype=BF16), empty(rows, width // 2, dtype=BF16)
    x = empty(rows, width // 2, dtype=BF16, grad=True)
    fixed, target = empty(rows, width, dtype=BF16), ids(rows)

    def logits() -> tuple[Tensor, Tensor, Tensor]:
        mine = x @ student.weight.t()
        with torch.set_grad_enabled(is_early):
            theirs = fixed @ teacher.weight.t()
        mine, theirs = mine.float(), theirs.float()
        return mine, theirs, F.cross_entropy(mine, target)

    def forward() -> Tensor:
        mine, theirs, hard = logits()
        if is_early:
            mine = mine / 1.0
            theirs = theirs / 1.0
        else:
            mine /= 1.0
            theirs /= 1.0
        return 0.5 * hard + 0.5 * soft_loss(mine, theirs)

    return holding(_loss(forward), others, kept)


def distill_cosine_loss(s: Settings) -> Step:
    def soft_loss(mine: Tensor, theirs: Tensor) -> Tensor:
        first, second = F.normalize(mine, dim=-1), F.normalize(theirs, dim=-1)
        return (1 - F.cosine_similarity(first, second, dim=-1)).mean()

    return _distillation(s, soft_loss, is_early=False)


def distill_jsd_loss(s: Settings) -> Step:
    def soft_loss(mine: Tensor, theirs: Tensor) -> Tensor:
        first, second = mine.log_softmax(-1), theirs.log_softmax(-1)
        middle_log = torch.logsumexp(torch.stack((first + HALF_LOG, second + HALF_LOG)), 0)
        one = F.kl_div(middle_log, first, reduction="batchmean", log_target=True)
        two = F.kl_div(middle_log, second, reduction="batchmean", log_target=True)
        return 0.5 * two + 0.5 * one

    return _distillation(s, soft_loss, is_early=True)


def _mean_log_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    safe = torch.where(target == -100, 0, target)
    picked = logits.log_softmax(-1).gather(2, safe.unsqueeze(2)).squeeze(2)
    return (picked * mask).sum(-1) / mask.sum(-1)


def preference_loss(s: Settings) -> Step:
    """Half of the batch is preferred to the other half; both implementations' heads exist."""
    if s["T"] != 1024:
        return _early_preference_loss(s)
    half, vocabulary = s["B"] // 2, s["V"]
    other, layer = head(s["H"], vocabulary), head(s["H"], vocabulary)
    x, target = empty(s["B"], s["T"], s["H"], dtype=BF16, grad=True), ids(s["B"], s["T"])

    def logits_and_loss() -> tuple[Tensor, Tensor, Tensor]:
        output = x @ layer.weight.t()
        wide = output.float()
        likely = F.cross_entropy(wide[:half].view(-1, vocabulary), target[:half].view(-1))
        return wide, likely, _mean_log_probabilities(wide, target)

    def forward() -> Tensor:
        _, likely, logs = logits_and_loss()
        return likely - _odds(logs[:half], logs[half:]).mean()

    return holding(_loss(forward), other)


def _odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return 0.1 * F.logsigmoid(odds)


def _early_preference_loss(s: Settings) -> Step:
    """All in 16 bits, and the mean over the vocabulary instead of the target's logarithm."""
    half, vocabulary = s["B"] // 2, s["V"]
    layer, other = head(s["H"], vocabulary), head(s["H"], vocabulary)
    x, target = empty(s["B"], s["T"], s["H"], dtype=BF16, grad=True), ids(s["B"], s["T"])

    def forward() -> Tensor:
        logits = layer(x)
        likely = F.cross_entropy(logits[:half].view(-1, vocabulary), target[:half].view(-1))
        logs = logits.log_softmax(-1).mean(-1)
        return likely - _odds(logs[:half], logs[half:]).mean()

    return holding(_loss(forward), other)


def grpo_loss(s: Settings) -> Step:
    """The policy's and the reference's heads, of both implementations."""
    policy, reference, *others = (head(s["H"], s["V"]) for _ in range(4))
    x, target = empty(s["B"], s["T"], s["H"], dtype=BF16, grad=True), ids(s["B"], s["T"])
    mask, advantages = empty(s["B"], s["T"]), empty(s["B"], dtype=BF16)
    fixed = empty(s["B"], s["T"], s["H"], dtype=BF16)

    def forward() -> Tensor:
        logits = x @ policy.weight.t()
        all_logs = logits.float().log_softmax(-1)
        logs = all_logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            fixed_logits = fixed @ reference.weight.t()
            all_fixed_logs = fixed_logits.float().log_softmax(-1)
            fixed_logs = all_fixed_logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        ratio = (logs - logs.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.min(ratio * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
        distance = (fixed_logs - logs).exp() - (fixed_logs - logs) - 1.0
        return ((0.1 * distance - gain) * mask).sum() / mask.sum().clamp(min=1.0)

    return holding(_loss(forward), others)


def kto_loss(s: Settings) -> Step:
    """Each half of the batch is one kind; heads with biases, of policy and reference, of both implementations."""
    policy, reference, *others = (head(s["H"], s["V"], bias=True) for _ in range(4))
    x, fixed = (empty(s["B"], s["T"], s["H"], dtype=BF16) for _ in range(2))
    target, kinds, distance = ids(s["B"], s["T"]), torch.empty(s["B"], dtype=torch.bool), empty(1, dtype=BF16)
    good, bad = ids(s["B"] // 2), ids(s["B"] - s["B"] // 2)

    def policy_logs() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        output = x @ policy.weight.t()
        output = output + policy.bias
        logits = output.float()
        logs = _mean_log_probabilities(logits, target)
        return logs[good], logs[bad], (logits[good], logits[bad])

    def reference_logs() -> tuple[Tensor, Tensor]:
        logits = fixed @ reference.weight.t()
        logits = logits + reference.bias
        logs = _mean_log_probabilities(logits, target)
        return logs[good], logs[bad]

    def forward() -> Tensor:
        won, lost, halves = policy_logs()
        with torch.no_grad():
            fixed_won, fixed_lost = reference_logs()
        won = 1 - torch.sigmoid(0.1 * (won - fixed_won - distance))
        lost = 1 - torch.sigmoid(0.1 * (distance - (lost - fixed_lost)))
        del halves
        return torch.cat((won, lost)).mean()

    return holding(_loss(forward), others, kinds)


# ---- a mixture of experts


def fused_moe(s: Settings, rows_of: list[int]) -> Step:
    """A loop over experts, with the rows that the router sent to each.

    Both weights are products of a parameter and a number: parameter and product exist.
    """
    length, width, inner, chosen, dtype = s["T"], s["H"], s["intermediate_dim"], s["K"], s["dtype"]
    experts = len(rows_of)
    x = empty(length, width, dtype=dtype, grad=True)
    into = empty(experts, 2 * inner, width, dtype=dtype, grad=True) * 0.02
    back = empty(experts, width, inner, dtype=dtype, grad=True) * 0.02
    index = torch.empty(length, chosen, dtype=torch.int32)
    weights = empty(length, chosen, dtype=dtype, grad=True)

    def forward() -> Tensor:
        total = torch.zeros_like(x)
        with torch.no_grad():
            is_sent = F.one_hot(index.long(), experts).permute(2, 1, 0)
            hit = torch.empty(experts, 1, dtype=torch.int64)
        for expert, num_rows in enumerate(rows_of):
            place, row = torch.empty(num_rows, 2, dtype=torch.int64).unbind(1)
            taken = x[row]
            gate, up = F.linear(taken, into[expert]).chunk(2, -1)
            taken = F.silu(gate) * up
            taken = F.linear(taken, back[expert])
            taken = taken * weights[row, place, None]
            total.index_add_(0, row, taken)
        assert is_sent is not None
        assert hit is not None
        return total

    return _in_mode(s["mode"], forward)
