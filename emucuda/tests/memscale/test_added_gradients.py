"""A loop that adds up gradients gets numbers of its own."""

import torch
from torch import nn

import memscale


def test_where_nothing_is_done_the_numbers_are_made_anew():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4))).cuda()
    batch = torch.zeros(2048, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, memscale.Config(async_offload=False, enable_logging=False), sample_input=batch)
    promised = model._memscale_executor.plan
    assert not promised.actions
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        for _ in range(2):
            model(batch).square().mean().backward()
        optimizer.step()
    plan = model._memscale_executor.plan
    assert plan.predicted_allocated_bytes > promised.predicted_allocated_bytes
    assert abs(plan.predicted_allocated_bytes / torch.cuda.max_memory_allocated() - 1) < 0.005
    assert 0 <= plan.predicted_reserved_bytes / torch.cuda.max_memory_reserved() - 1 < 0.03
    memscale.detach(model)
