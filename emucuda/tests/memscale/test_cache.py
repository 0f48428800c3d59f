"""What the allocator had cached before a plan is not held beside what the plan reserves."""

import torch
from torch import nn

import memscale

MIB = 1 << 20


def test_a_plan_begins_with_an_empty_cache():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3))).cuda()
    left = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    del left
    assert torch.cuda.memory_reserved() > 200 * MIB
    config = memscale.Config(enable_logging=False)
    memscale.wrap(model, config, sample_input=torch.zeros(16, 256, device="cuda"))
    assert torch.cuda.memory_reserved() < 100 * MIB
    memscale.detach(model)
