"""A loop that adds up gradients gets numbers of its own."""

import torch
from torch import nn

import memscale
from memscale._decide.allocator import CachingAllocator
from memscale._planning.reserved.found_memory import find_memory
from memscale._profile.inputs import Inputs


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


def test_the_card_tells_where_gradients_lie():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    batch = torch.zeros(512, 1024, device="cuda")
    inputs = Inputs((batch,), {})
    assert find_memory(model, inputs, "cuda") is None, "no step has begun"
    model(batch).square().mean().backward()
    found = find_memory(model, inputs, "cuda")
    memory = CachingAllocator()
    blocks = memory.adopt(found.segments)
    assert memory.reserved_bytes == torch.cuda.memory_reserved()
    assert memory.allocated_bytes == torch.cuda.memory_allocated()
    sizes = {origin: blocks[address].requested_bytes for origin, address in found.addresses.items()}
    parameters = list(model.parameters())
    assert sizes == {
        ("input", 0): batch.nbytes,
        **{("parameter", number): each.nbytes for number, each in enumerate(parameters)},
        **{("gradient", number): each.nbytes for number, each in enumerate(parameters)},
    }
