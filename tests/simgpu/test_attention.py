"""Attention: a fused path that saves what a card's memory-efficient kernel saves, and computes as the CPU does."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_races):
    torch.manual_seed(0)


def heads(batch=2, count=4, length=40, size=16, dtype=torch.float32):
    return torch.randn(batch, count, length, size, dtype=dtype)


def on_both(function, *tensors):
    """Outputs and gradients of the CPU and of simgpu."""
    results = []
    for device in ("cpu", "simgpu"):
        leaves = [t.clone().to(device).requires_grad_() for t in tensors]
        out = function(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(device, out.dtype))
        results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    return results


def bool_mask(device):
    return torch.ones(40, 40, dtype=torch.bool, device=device).tril(3)


CASES = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "boolean mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bool_mask(q.device)),
    "float mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.linspace(-2, 2, 1600, device=q.device).view(1, 1, 40, 40).to(q.dtype)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_without_dropout_every_bit_is_the_cpus(case, dtype):
    cpu, device = on_both(CASES[case], *(heads(dtype=dtype) for _ in range(3)))
    for want, have in zip(cpu, device, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("length", [1, 7, 33])
def test_odd_lengths(length):
    q, k, v = heads(length=length), heads(length=2 * length), heads(length=2 * length)
    cpu, device = on_both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
    for want, have in zip(cpu, device, strict=True):
        assert torch.equal(have, want)


def test_grouped_heads():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    cpu, device = on_both(attend, heads(), heads(count=2), heads(count=2))
    for want, have in zip(cpu, device, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("broadcast", [(2, 4), (1, 4), (1, 1)])
def test_a_mask_that_wants_a_gradient(broadcast):
    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.randn(*broadcast, 40, 40)
    cpu, device = on_both(attend, heads(), heads(), heads(), mask)
    for want, have in zip(cpu[:-1], device[:-1], strict=True):
        assert torch.equal(have, want)
    # The card's kernel pads the rows of the mask's gradient, so the sum over broadcast dimensions may be ordered anew.
    torch.testing.assert_close(device[-1], cpu[-1])


def test_values_of_another_head_size():
    cpu, device = on_both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), heads(), heads(), heads(size=8))
    for want, have in zip(cpu, device, strict=True):
        assert torch.equal(have, want)


class Operators(TorchDispatchMode):
    """Which operators ran, and the seeds that attention saved."""

    def __init__(self):
        super().__init__()
        self.names, self.seeds = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(str(function))
        if function is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            self.seeds.append(result[2].item())
        if function is torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default:
            self.seeds.append(result[6].item())
        return result


def reference_with_mask(q, k, v, keep, dropout, causal=False, bias=None):
    """Plain mathematics with a given dropout mask."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) * keep / (1 - dropout)) @ v


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "variant", ["plain", "causal", (2, 4, 40, 40), (2, 1, 1, 40), (1, 4, 40, 1), (4, 1, 40), (40, 40)]
)
def test_with_dropout_it_equals_plain_mathematics_with_the_same_mask(variant, kv_heads):
    dropout = 0.3
    bias = torch.randn(variant) if isinstance(variant, tuple) else None
    host = [heads(), heads(count=kv_heads), heads(count=kv_heads)] + ([bias] if bias is not None else [])
    leaves = [t.to("simgpu").requires_grad_() for t in host]
    with Operators() as operators:
        out = F.scaled_dot_product_attention(
            *leaves[:3],
            attn_mask=leaves[3] if bias is not None else None,
            dropout_p=dropout,
            is_causal=variant == "causal",
            enable_gqa=kv_heads != 4,
        )
    out.sum().backward()
    keep = torch.ops.simgpu.attention_dropout_mask(operators.seeds[0], 2, 4, 40, 40, dropout)
    assert keep.float().mean().item() == pytest.approx(0.7, abs=0.02)
    expected_leaves = [t.clone().requires_grad_() for t in host]
    expected = reference_with_mask(
        *expected_leaves[:3],
        keep,
        dropout,
        causal=variant == "causal",
        bias=expected_leaves[3] if bias is not None else None,
    )
    expected.sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected.detach())
    for have, want in zip(leaves, expected_leaves, strict=True):
        torch.testing.assert_close(have.grad.cpu(), want.grad)


def test_a_mask_without_heads_is_not_taken_for_one_with_them():
    # As many heads as keys: the rows of the mask could be mistaken for batches, its columns for heads.
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    with Operators() as operators:
        out = F.scaled_dot_product_attention(
            q.to("simgpu"), k.to("simgpu"), k.to("simgpu"), mask.to("simgpu"), dropout_p=0.3, enable_gqa=True
        )
    keep = torch.ops.simgpu.attention_dropout_mask(operators.seeds[0], 2, 4, 4, 4, 0.3)
    torch.testing.assert_close(out.cpu(), reference_with_mask(q, k, k, keep, 0.3, causal=True))


def test_dropout_repeats_with_the_seed_and_under_checkpoint():
    from torch.utils.checkpoint import checkpoint

    q = heads().to("simgpu").requires_grad_()

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).square().sum()

    gradients = []
    for run in (attend, attend, lambda x: checkpoint(attend, x, use_reentrant=False)):
        torch.manual_seed(7)
        q.grad = None
        run(q).backward()
        gradients.append(q.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    torch.manual_seed(8)
    q.grad = None
    attend(q).backward()
    assert not torch.equal(q.grad, gradients[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saved_memory_is_output_logsumexp_seed_and_offset(dropout):
    q, k, v = (heads(2, 3, 100, 16).to("simgpu").requires_grad_() for _ in range(3))
    before = A.memory_allocated()
    A.reset_peak_memory_stats()
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    output, logsumexp = 2 * 3 * 100 * 16 * 4, 2 * 3 * 128 * 4
    expected = -(-output // 512) * 512 + logsumexp + 2 * 512
    assert A.memory_allocated() - before == expected
    assert A.max_memory_allocated() - before == expected  # no score matrix, ever
    out.sum().backward()


def test_peak_with_a_long_sequence_is_linear_in_its_length():
    def peak(length: int) -> int:
        q = heads(1, 2, length, 16).to("simgpu").requires_grad_()
        before = A.memory_allocated()
        A.reset_peak_memory_stats()
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
        return A.max_memory_allocated() - before

    assert peak(1024) < 2.2 * peak(512)


def test_inference_saves_no_logsumexp():
    q = heads().to("simgpu")
    before = A.memory_allocated()
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, q, q)
    assert A.memory_allocated() - before == out.numel() * 4


def test_which_operator_runs():
    q, kv = heads().to("simgpu"), heads(count=2).to("simgpu")

    def names(**options):
        with Operators() as operators:
            F.scaled_dot_product_attention(q, options.pop("k", q), options.pop("v", q), **options)
        return " ".join(operators.names)

    assert "_scaled_dot_product_efficient_attention" in names()
    assert "_scaled_dot_product_efficient_attention" in names(dropout_p=0.1)
    assert "fused_attention_overrideable" in names(k=kv, v=kv, enable_gqa=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert "bmm" in names()


def test_a_double_is_left_to_the_math_path():
    cpu, device = on_both(lambda q: F.scaled_dot_product_attention(q, q, q), heads(dtype=torch.float64))
    for want, have in zip(cpu, device, strict=True):
        torch.testing.assert_close(have, want)


def test_autocast_runs_attention_in_16_bits():
    q = heads().to("simgpu")
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16


def test_a_fully_masked_row_gives_no_nan_with_dropout():
    q = heads().to("simgpu").requires_grad_()
    mask = torch.ones(40, 40, dtype=torch.bool, device="simgpu")
    mask[3] = False
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
