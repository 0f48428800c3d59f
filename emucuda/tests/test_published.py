"""The instrument itself: a plain training peak that was published for a real RTX 3090, to the second decimal."""

PUBLISHED_GIB = 3.14  # BERT-Base, 16 x 128, fp32, AdamW

TRAINING = """
import json, torch, transformers
with torch.device("cuda"):
    model = transformers.BertForMaskedLM(transformers.BertConfig()).train()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 30000, (16, 128)).cuda()
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
print(json.dumps(torch.cuda.max_memory_allocated()))
"""


def test_the_published_peak_of_bert_base(on_the_card):
    peak_bytes = on_the_card(TRAINING)
    assert peak_bytes == 3_365_969_408
    assert abs(peak_bytes / 2**30 - PUBLISHED_GIB) < 0.01
