"""What ran on the card before a plan is made: workspaces of its matrix products stay, in segments that it has made."""

import pytest
import torch
import transformers

import memscale

BUDGET_GB = 0.35


def built():
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).train().cuda()


@pytest.mark.parametrize("runs_before", ["nothing", "a plain step"])
def test_what_is_reserved_is_what_was_promised(monkeypatch, tmp_path, runs_before):
    """Both keep their plans in one place: that of the other is not taken."""
    monkeypatch.setenv("MEMSCALE_CACHE_DIR", str(tmp_path.parent))
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    model, ids = built(), torch.zeros(8, 128, dtype=torch.long)
    if runs_before != "nothing":
        model(input_ids=ids.cuda(), labels=ids.cuda()).loss.backward()
        model.zero_grad()
    config = memscale.Config(memory_budget_gb=BUDGET_GB, enable_logging=False)
    memscale.wrap(model, config, sample_input={"input_ids": ids, "labels": ids})
    plan = memscale.executor_of(model).plan
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids.cuda(), labels=ids.cuda()).loss.backward()
        optimizer.step()
    assert -0.005 <= plan.predicted_reserved_bytes / torch.cuda.max_memory_reserved() - 1 <= 0.03
    memscale.detach(model)
