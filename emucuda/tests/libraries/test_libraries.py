"""Models of libraries that cannot run in the other tests, wrapped, on the card: the plan does what it says."""

import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memscale
from memscale._execute.executor import Executor
from memscale._plan import Checkpoint, StreamParameters


@pytest.fixture
def plans(monkeypatch):
    """The plans of executors as they end, with what was measured under them."""
    seen = []
    detach = Executor.detach

    def see(executor):
        if executor.plan is not None:
            seen.append((executor.plan, executor.stats()))
        detach(executor)

    monkeypatch.setattr(Executor, "detach", see)
    return seen


def peak_of(train, **options):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(**options)
    return torch.cuda.max_memory_allocated() - before


def test_the_example_of_timm(example, plans):
    train = example("timm_classifier").main
    train(wrapped=False)  # takes the workspaces of cuBLAS
    plain = peak_of(train, wrapped=False)
    assert peak_of(train, wrapped=True) < plain
    (plan, stats), *_ = plans
    assert any(isinstance(action, Checkpoint) for action in plan.actions)
    assert plan.predicted_reserved_bytes == stats.reserved_peak_bytes


def test_the_example_of_liger(example, plans):
    """Triton launches its kernels through pointers, which fake tensors have none of: such a model is observed."""
    train = example("liger_llama").main
    train(wrapped=False)
    plain = peak_of(train, wrapped=False)
    assert peak_of(train, wrapped=True) < 0.6 * plain
    (plan, _), *_ = plans
    assert not plan.provisional
    assert any(isinstance(action, Checkpoint) for action in plan.actions)


def test_the_head_that_liger_reads_stays_on_the_card_when_blocks_are_streamed():
    """Its fused loss takes the head's weight without calling the head: one that lies on the host would be an error."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).cuda()
    memscale.wrap(model, memscale.Config(memory_budget_gb=0.075, enable_logging=False))
    tokens = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # these are observed
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert any(isinstance(action, StreamParameters) for action in model._memscale_executor.plan.actions)
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "cpu"
    assert model.lm_head.weight.device.type == "cuda"
    memscale.detach(model)
