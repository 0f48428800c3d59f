"""Fake tensors on the device: a fake run predicts the bytes of the real one."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

A = torch.accelerator


@pytest.fixture(autouse=True)
def _device(simgpu_device):
    gc.collect()


class LiveBytes(TorchDispatchMode):
    """Bytes of the device storages that operators returned and that are still alive, rounded to 512."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0
        self.lock = threading.RLock()

    def see(self, tensor):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "simgpu":
            return
        storage = tensor.untyped_storage()
        with self.lock:
            key = storage._cdata
            if key not in self.live:
                weakref.finalize(storage, self.live.pop, key, None)
            self.live[key] = -(-storage.nbytes() // 512) * 512
            self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.see(leaf)
        return result


class Attention(nn.Module):
    def __init__(self, kv_heads=4, dropout=0.1, mask=None):
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 2 * 16 * kv_heads)
        self.kv_heads, self.dropout, self.mask = kv_heads, dropout, mask

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 16).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.kv_heads, 16).permute(2, 0, 3, 1, 4)
        mask = None
        if self.mask == "bool":
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.mask == "float":
            mask = torch.zeros(batch, 1, length, length, device=x.device)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=self.kv_heads != 4,
        )


def encoder():
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1) for _ in range(2)]
    return nn.Sequential(*layers), torch.randn(2, 24, 64)


def cnn():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 4)
    )
    return net, torch.randn(2, 3, 8, 8)


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


CASES = {
    "encoder": encoder,
    "cnn": cnn,
    "lstm": lambda: (First(nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)), torch.randn(3, 7, 8)),
    "gru": lambda: (First(nn.GRU(8, 16, 2, batch_first=True)), torch.randn(3, 7, 8)),
    "attention": lambda: (Attention(), torch.randn(2, 24, 64)),
    "attention without dropout": lambda: (Attention(dropout=0.0), torch.randn(2, 24, 64)),
    "attention, odd length": lambda: (Attention(), torch.randn(2, 37, 64)),
    "attention, boolean mask": lambda: (Attention(mask="bool"), torch.randn(2, 24, 64)),
    "attention, float mask": lambda: (Attention(mask="float"), torch.randn(2, 37, 64)),
    "attention, grouped heads": lambda: (Attention(kv_heads=2), torch.randn(2, 24, 64)),
}


def run(make, fake):
    """Tracked peak of the second of two training steps, and the device's own count of it."""
    with FakeTensorMode() if fake else contextlib.nullcontext(), torch.device("simgpu"):
        model, x = make()
        # Said out loud: torch picks foreach by itself for real parameters on this device, but never for fake ones.
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with LiveBytes() as tracked:
            for tensor in [x, *model.parameters(), *model.buffers()]:
                tracked.see(tensor)
            for _ in range(2):
                tracked.peak = 0
                A.reset_peak_memory_stats()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return tracked.peak, A.max_memory_allocated()


@pytest.mark.parametrize("case", CASES)
def test_a_fake_run_predicts_the_real_bytes(case):
    before = A.memory_allocated()
    predicted, none = run(CASES[case], fake=True)
    assert none - before <= 2048  # a fake run costs nothing but the generators' and devices' guards
    gc.collect()
    before = A.memory_allocated()
    tracked, counted = run(CASES[case], fake=False)
    assert tracked == predicted
    assert counted - before == predicted


def test_real_tensors_can_be_faked():
    real = torch.ones(4, device="simgpu")
    mode = FakeTensorMode()
    fake = mode.from_tensor(real)
    with mode:
        assert (fake + 1).device == torch.device("simgpu:0")
        assert F.layer_norm(fake, (4,)).shape == (4,)
    assert real.tolist() == [1.0] * 4
