"""Training parity: the same losses as on the CPU, to the bit, plain and under checkpoint and save_on_cpu.

Every model is built and run in the same way on both devices; dropout draws the same numbers because both generators
are seeded alike. Attention dropout is drawn otherwise (per head, from a seed) and is off here, but for its own test.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import simgpu
from tests.lanes import in_turns

A = torch.accelerator
STEPS = 3
MODES = ("plain", "checkpoint", "save_on_cpu")
SUMMED_IN_TWO_ORDERS = ("albert", "t5")


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_races):
    pass


class Blocks(nn.Module):
    """A stem, blocks that can be checkpointed, and a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.checkpointed = False

    def gradient_checkpointing_enable(self, **_):
        self.checkpointed = True

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class ToFloat(nn.Module):
    def forward(self, x):
        return x.float()


def mlp():
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1)) for _ in range(3)]
    return Blocks(nn.Linear(16, 32), blocks, nn.Linear(32, 4)), {"x": torch.randn(8, 16)}


def cnn():
    def block():
        norm = nn.BatchNorm2d(8, momentum=None)
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU(), nn.Dropout2d(0.1), nn.Dropout(0.1))

    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4))
    return Blocks(nn.Conv2d(3, 8, 3, padding=1), [block(), block()], head), {"x": torch.randn(4, 3, 8, 8)}


def encoder():
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)]
    return Blocks(nn.Linear(16, 32), layers, nn.Linear(32, 4)), {"x": torch.randn(2, 12, 16)}


def bert():
    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), token_batch(120, masked=True)


def albert():
    config = AlbertConfig(
        vocab_size=120,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    return AlbertForMaskedLM(config), token_batch(120, masked=True)


def gpt2(attention_dropout=0.0):
    config = GPT2Config(
        vocab_size=120,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        attn_pdrop=attention_dropout,
        use_cache=False,
        loss_type="ForCausalLMLoss",
    )
    return GPT2LMHeadModel(config), token_batch(120)


def llama():
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config), token_batch(120)


def t5():
    config = T5Config(
        vocab_size=120,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,  # T5's one rate is that of attention too
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), token_batch(120)


def vit():
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.tensor([1, 3]),
    }


def token_batch(vocabulary, masked=False):
    ids = torch.randint(1, vocabulary, (2, 12))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if masked:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 9:] = 0
    return batch


MODELS = {f.__name__: f for f in (mlp, cnn, encoder, bert, albert, gpt2, llama, t5, vit)}


def loss_of(model, batch):
    if "x" in batch:
        return model(batch["x"]).square().mean()
    return model(**batch).loss


def enable_checkpointing(model):
    if getattr(model, "supports_gradient_checkpointing", True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for group in model.albert.encoder.albert_layer_groups:  # ALBERT has no switch of its own
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)


def train(make, device, mode="plain", dtype=None, optimizer=torch.optim.AdamW, steps=STEPS):
    torch.manual_seed(0)
    model, batch = make()
    model = model.to(device).train()
    batch = {name: t.to(device) for name, t in batch.items()}
    if mode == "checkpoint":
        enable_checkpointing(model)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        saving = (
            torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu")
            if mode == "save_on_cpu"
            else contextlib.nullcontext()
        )
        casting = torch.autocast(device, dtype=dtype) if dtype else contextlib.nullcontext()
        with saving, casting:
            loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "mode"), in_turns(list(MODELS), MODES, whole=["gpt2"]))
def test_losses_are_the_cpus(name, mode):
    # In the same mode: recomputing a layer that is used several times (ALBERT, T5's bias) sums gradients in another
    # order, on the CPU as well. Which of the two orders a device's thread meets differs, and may show in a last bit.
    expected = train(MODELS[name], "cpu", mode)
    orders = (
        [expected, train(MODELS[name], "cpu")] if name in SUMMED_IN_TWO_ORDERS and mode == "checkpoint" else [expected]
    )
    assert train(MODELS[name], "simgpu", mode) in orders
    assert len(set(expected)) == STEPS  # it really trains


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=["foreach", "loop", "fused"]
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_every_implementation_of_the_optimizers(optimizer, options):
    if optimizer is torch.optim.SGD:
        options = options | {"momentum": 0.9}
    chosen = functools.partial(optimizer, **options)
    assert train(mlp, "simgpu", optimizer=chosen) == train(mlp, "cpu", optimizer=chosen)


@pytest.mark.parametrize(
    "optimizer", ["Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
def test_the_other_optimizers(optimizer):
    chosen = getattr(torch.optim, optimizer)
    assert train(mlp, "simgpu", optimizer=functools.partial(chosen, foreach=True)) == train(
        mlp, "cpu", optimizer=functools.partial(chosen, foreach=True)
    )


def test_the_default_optimizer_implementation_is_foreach_as_on_a_gpu():
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameters = [nn.Parameter(torch.ones(3, device="simgpu"))]
    assert _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False) == (False, True)


@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(mode, dtype):
    losses = train(mlp, "simgpu", mode, dtype=dtype)
    assert losses == train(mlp, "simgpu", dtype=dtype)
    assert losses != train(mlp, "simgpu")
    for have, want in zip(losses, train(mlp, "simgpu"), strict=True):
        assert have == pytest.approx(want, rel=0.05)


def test_bfloat16_autocast_of_a_linear_network_is_the_cpus():
    def net():
        head = nn.Sequential(nn.Linear(32, 4), ToFloat())  # the two devices' lists differ in what the loss is made of
        return Blocks(nn.Linear(16, 32), [nn.Linear(32, 32), nn.ReLU()], head), {"x": torch.randn(8, 16)}

    assert train(net, "simgpu", dtype=torch.bfloat16) == train(net, "cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
def test_attention_dropout_trains_and_repeats_in_every_mode(mode):
    noisy = functools.partial(gpt2, attention_dropout=0.2)
    losses = train(noisy, "simgpu", mode, steps=6)
    assert losses == train(noisy, "simgpu", "plain", steps=6)
    assert losses != train(gpt2, "simgpu", steps=6)
    assert losses[-1] < losses[0]


def test_reentrant_checkpoint_restores_the_device_random_state():
    class Reentrant(Blocks):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    def make():
        model, batch = mlp()
        return Reentrant(model.stem, list(model.blocks), model.head), batch

    assert train(make, "simgpu") == train(mlp, "cpu")


def test_checkpoint_and_save_on_cpu_really_lower_the_peak():
    def peak(mode):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)]
        model = Blocks(nn.Identity(), blocks, nn.Identity()).to("simgpu")
        x = torch.randn(512, 128, device="simgpu")
        model.checkpointed = mode == "checkpoint"
        before = A.memory_allocated()
        A.reset_peak_memory_stats()
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if mode == "save_on_cpu" else contextlib.nullcontext():
            loss = model(x).square().sum()
        loss.backward()
        return A.max_memory_allocated() - before

    plain = peak("plain")
    assert peak("checkpoint") < 0.7 * plain
    assert peak("save_on_cpu") < 0.7 * plain


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(cell):
    torch.manual_seed(0)
    model = cell(8, 16, 2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 7, 8)
    results = {}
    for device in ("cpu", "simgpu"):
        model.zero_grad()
        model.to(device)
        y, _ = model(x.to(device))
        y.square().sum().backward()
        results[device] = [y.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
    for want, have in zip(results["cpu"], results["simgpu"], strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_pass_gradcheck_without_bias_too(cell):
    for bias in (True, False):
        model = cell(3, 4, bias=bias).double().to("simgpu")
        x = torch.randn(2, 3, dtype=torch.float64, device="simgpu", requires_grad=True)

        def run(x, model=model):
            out = model(x)
            return out if isinstance(out, torch.Tensor) else out[1]

        assert torch.autograd.gradcheck(run, (x,))


def test_packed_sequences():
    torch.manual_seed(0)
    model = nn.LSTM(8, 16, batch_first=True)
    x = torch.randn(3, 7, 8)
    packed = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2], batch_first=True)
    want, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(x.to("simgpu"), [7, 5, 2], batch_first=True)
    have, _ = nn.utils.rnn.pad_packed_sequence(model.to("simgpu")(packed)[0], batch_first=True)
    torch.testing.assert_close(have.cpu(), want)


def test_grad_scaler_scales_skips_and_recovers():
    scaler = torch.amp.GradScaler("simgpu", init_scale=2.0**10)
    layer = nn.Linear(4, 4).to("simgpu")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    with torch.autocast("simgpu", dtype=torch.float16):
        loss = layer(torch.ones(2, 4, device="simgpu")).sum()
    scaler.scale(loss * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(layer.weight, before)
    optimizer.zero_grad()
    with torch.autocast("simgpu", dtype=torch.float16):
        loss = layer(torch.ones(2, 4, device="simgpu")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(layer.weight, before)


def test_no_kernel_is_launched_without_being_counted():
    before = simgpu.counters().kernels
    x = torch.ones(4, 4, device="simgpu")
    x @ x
    assert simgpu.counters().kernels == before + 2  # fill, mm
    F.relu(x).t().reshape(2, 8)
