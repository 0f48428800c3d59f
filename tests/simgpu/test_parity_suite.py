"""Every model of the parity suite trains on simgpu with the losses, gradients and weights of the CPU, to the bit.

Attention dropout is off: simgpu draws its numbers otherwise (see test_attention.py). All other dropout is on.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from memscale._profile.layers import find_blocks
from tests.lanes import in_turns
from tests.models import SUITE

STEPS = 2


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_races):
    pass


@pytest.fixture(autouse=True)
def _no_attention_dropout(monkeypatch):
    attention = F.scaled_dot_product_attention

    def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        return attention(query, key, value, attn_mask, 0.0, is_causal, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_dropout)


def checkpoint_blocks(model: nn.Module) -> int:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # a recomputation would fill the cache twice
    fqns = find_blocks(model)
    for fqn in fqns:
        block = model.get_submodule(fqn)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return len(fqns)


def saving(mode):
    """Pinned on both devices: pinned copies are contiguous, their products differ from strided ones in a last bit."""
    if mode != "save_on_cpu":
        return contextlib.nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="simgpu")


def train(case, device, mode):
    torch.manual_seed(0)
    model = case.build().to(device).train()
    assert mode != "checkpoint" or checkpoint_blocks(model) >= 1
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(7)
    seen = []
    for step in range(STEPS):
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, case.batch(step))
        with saving(mode):
            loss = case.loss(model(**batch))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [t.cpu() for t in (*seen, *model.state_dict().values())]


@pytest.mark.parametrize(("case", "mode"), in_turns(SUITE, ["plain", "checkpoint", "save_on_cpu"], whole=["gpt2"]))
def test_training_is_the_cpus(case, mode):
    expected = train(case, "cpu", mode)
    actual = train(case, "simgpu", mode)
    assert len(actual) == len(expected)
    assert all(torch.equal(have, want) for have, want in zip(actual, expected, strict=True))
