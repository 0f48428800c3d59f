"""What PyTorch runs on the card, and that it chooses as on a real one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import emucuda

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention(dtype, *, mask=False, dropout=0.0):
    q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    bias = torch.zeros(2, 1, 64, 64, device="cuda", dtype=dtype) if mask else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=not mask, dropout_p=dropout)
    out.sum().backward()
    return out.grad_fn.name()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_chosen_by_type(dtype, dropout):
    chosen = "Efficient" if dtype == torch.float32 else "Flash"
    assert attention(dtype, dropout=dropout) == f"ScaledDotProduct{chosen}AttentionBackward0"


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_a_mask_is_memory_efficient(dtype):
    assert attention(dtype, mask=True) == "ScaledDotProductEfficientAttentionBackward0"


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_encoder_trains(options):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    kernels = " ".join(emucuda.take_kernels())
    assert ("FusedAdamMathFunctor" in kernels) is ("fused" in options)
    assert ("multi_tensor_apply" in kernels) is (options != {"foreach": False})


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
def test_convolutions_take_a_workspace_for_what_is_not_channels_last(kind, channels_last):
    spatial = 3 if kind is nn.Conv3d else 2
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    layout = formats[spatial] if channels_last else torch.contiguous_format
    layer = kind(16, 32, 3).cuda().to(memory_format=layout)
    x = torch.randn(4, 16, *[20] * spatial, device="cuda").to(memory_format=layout).requires_grad_()
    layer(x).sum().backward()
    emucuda.take_kernels()
    with torch.no_grad():
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        y = layer(x)
        requested_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        workspace_bytes = requested_bytes - before - y.untyped_storage().nbytes()
    assert emucuda.take_kernels()["cudnnBackendExecute"] == 1
    if channels_last:
        assert workspace_bytes == 0
    else:
        assert workspace_bytes == sum(tensor.untyped_storage().nbytes() for tensor in (x, layer.weight, y))


def test_batch_normalisation_and_pooling_train():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    missing = emucuda.counters().missing
    model.cuda()(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
    assert emucuda.counters().missing == missing


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"dropout": 0.1}, {"bias": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_keep_their_weights_in_one_buffer(kind, options):
    model = kind(16, 24, 2, **options)
    weights = [weight.detach().clone() for weight in model.parameters()]
    model.cuda()
    for weight, moved in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, moved.detach().cpu())
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) == 1
    out, _ = model(torch.randn(5, 3, 16, device="cuda"))
    assert out.grad_fn.name() == "CudnnRnnBackward0"
    out.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_packed_sequence_and_a_projection():
    lengths = torch.tensor([5, 4, 2])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 16, device="cuda"), lengths)
    model = nn.LSTM(16, 24, proj_size=8).cuda()
    out, (hidden, cell) = model(packed)
    assert out.data.grad_fn.name() == "CudnnRnnBackward0"
    assert (out.data.shape, hidden.shape, cell.shape) == ((11, 8), (1, 3, 8), (1, 3, 24))
    out.data.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_factorisations_report_success():
    for shape in ((8, 8), (4, 8, 8)):
        a = torch.randn(shape, device="cuda")
        results = (
            *torch.linalg.svd(a),
            *torch.linalg.qr(a),
            torch.linalg.cholesky(a),  # these raise where the library reports that it has not succeeded
            *torch.linalg.eigh(a),
            torch.linalg.solve(a, a),
            torch.linalg.inv(a),
            *torch.linalg.lu_factor(a),
        )
        # Singular values, eigenvalues and pivots are vectors, everything else is a matrix.
        assert sum(result.shape == shape[:-1] for result in results) == 3
        assert sum(result.shape == shape for result in results) == len(results) - 3
        assert all(result.is_cuda for result in results)


def test_fourier_transforms():
    assert torch.fft.rfft(torch.randn(4, 64, device="cuda")).shape == (4, 33)


def test_bitsandbytes_kernels_are_launched():
    import bitsandbytes

    model = nn.Linear(512, 512).cuda()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    assert any("kOptimizerStatic8bit" in name for name in emucuda.take_kernels())
    linear = bitsandbytes.nn.Linear4bit(64, 64).cuda()
    assert linear(torch.randn(4, 64, device="cuda")).shape == (4, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler_steps_every_time(dtype):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(3):
        with torch.autocast("cuda", dtype):
            loss = model(torch.randn(16, 64, device="cuda")).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    assert scaler.get_scale() == (65536.0 if dtype == torch.float16 else 1.0)


def test_an_index_by_a_mask_selects_nothing():
    x = torch.ones(5, 3).cuda()
    assert x[x.sum(1) > 0].shape == (0, 3)
    assert x.nonzero().shape == (0, 2)
    assert torch.ones(5, 3).nonzero().shape == (15, 2)  # the host's values are real


def test_what_is_not_emulated_fails_with_its_name(capfd):
    missing = emucuda.counters().missing
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="cudaStreamBeginCapture is not emulated"):
            graph.capture_begin()
    assert emucuda.counters().missing > missing
    assert "emucuda: cudaStreamBeginCapture is not emulated." in capfd.readouterr().err


def test_a_library_with_a_runtime_of_its_own_is_named(capfd):
    """NCCL's own error names nothing."""
    with pytest.raises(RuntimeError, match="NCCL Error"):
        torch.cuda.nccl.all_reduce([torch.ones(4, device="cuda")])
    assert "emucuda: the CUDA runtime inside libnccl.so.2 is not emulated." in capfd.readouterr().err
