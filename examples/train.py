"""The smallest use of MemScale: one line more, and the loop stays as it was.

python examples/train.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memscale

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)

config = GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(device)
tokens = torch.randint(512, (4, 128), device=device)  # stands for your data
batch = {"input_ids": tokens, "labels": tokens}

# The one line. A budget below what the model needs makes it work; without one, 85 % of the device may be filled,
# and this small model would be left alone.
model = memscale.wrap(model, memscale.Config(memory_budget_gb=0.07), sample_input=batch)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

memscale.detach(model)  # the model is as it was
