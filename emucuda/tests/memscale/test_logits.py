"""Logits that a model returns beside its loss stay lazy under a tiled head, so that the plan's numbers hold."""

import torch

import memscale


def test_a_tiled_head_whose_logits_are_returned():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(n_embd=128, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(sizes).cuda()
    tokens = torch.zeros(8, 256, dtype=torch.long, device="cuda")
    batch = {"input_ids": tokens, "labels": tokens}
    config = memscale.Config(
        memory_budget_gb=0.6,
        enable_tiling=True,
        enable_offloading=False,
        use_mixed_precision=False,
        use_8bit_optimizer=False,
        enable_logging=False,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    memscale.wrap(model, config, batch)
    plan = model._memscale_executor.plan
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(type(action).__name__ == "TileHead" for action in plan.actions)
    assert abs(plan.predicted_allocated_bytes / torch.cuda.max_memory_allocated() - 1) <= 0.005
    memscale.detach(model)
