"""The tiled cross-entropy against PyTorch's: every setting of it, on small shapes and in double precision."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale._torch.live_bytes import LiveBytes
from memscale.techniques.tiling.head import sweep
from memscale.techniques.tiling.head.lazy import LazyLogits, lazy_linear
from tests.techniques.precision.loss_bounds import LossBounds, assert_within
from tests.techniques.tiling.models import GRADIENT_BOUND, LOSS_BOUND, assert_near, relative

aten = torch.ops.aten
REDUCTIONS = ("mean", "sum", "none")


@st.composite
def losses(draw):
    """Shapes, targets and settings of one loss."""
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    width, vocabulary = draw(st.integers(1, 5)), draw(st.integers(2, 40))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    ignore_index = draw(st.sampled_from([-100, -1, 0, vocabulary - 1]))
    target = torch.randint(0, vocabulary, (batch, length), generator=generator)
    target[torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))] = ignore_index
    return {
        "hidden": torch.randn(batch, length, width, generator=generator) * draw(st.sampled_from([0.1, 1.0, 20.0])),
        "weight": torch.randn(vocabulary, width, generator=generator),
        "bias": torch.randn(vocabulary, generator=generator) if draw(st.booleans()) else None,
        "target": target,
        "class_weight": torch.rand(vocabulary, generator=generator) + 0.1 if draw(st.booleans()) else None,
        "settings": {
            "ignore_index": ignore_index,
            "reduction": draw(st.sampled_from(REDUCTIONS)),
            "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        },
        "layout": draw(st.sampled_from(["rows", "batch of sequences"])),
        "tile_rows": draw(st.integers(1, 40)),
        "upstream": torch.rand(batch, length, generator=generator),
    }


def loss_and_gradients(case, tile_rows, dtype=torch.float32):
    """Tiled with `tile_rows`, plain with None."""
    tensors = [
        None if t is None else t.to(dtype, copy=True).requires_grad_()
        for t in (case[n] for n in ("hidden", "weight", "bias"))
    ]
    logits = F.linear(*tensors) if tile_rows is None else lazy_linear(*tensors, tile_rows=tile_rows)
    target, class_weight = case["target"], case["class_weight"]
    class_weight = None if class_weight is None else class_weight.to(dtype)
    if case["layout"] == "rows":
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), class_weight, **case["settings"])
    else:
        loss = F.cross_entropy(logits.transpose(1, 2), target, class_weight, **case["settings"])
    assert tile_rows is None or logits.cache is None, "the logits were built"
    upstream = case["upstream"].to(dtype).view(loss.shape) if loss.dim() else torch.tensor(1.7, dtype=dtype)
    wanted = [t for t in tensors if t is not None]
    return loss.detach(), torch.autograd.grad(loss, wanted, upstream)


@given(losses())
@settings(max_examples=150)
def test_every_loss_is_the_plain_one(case):
    """Fp32 against the plain path in double precision, each number within its own bound. See `LossBounds`."""
    exact_loss, exact = loss_and_gradients(case, None, torch.float64)
    loss, ours = loss_and_gradients(case, case["tile_rows"])
    assert loss.shape == exact_loss.shape
    assert loss.dtype == torch.float32
    assert torch.equal(loss.isnan(), exact_loss.isnan())
    if loss.isnan().any():
        return
    bounds = LossBounds(case)
    assert_within(loss, exact_loss, bounds.loss())
    for name, mine, right in zip(("hidden", "weight", "bias"), ours, exact, strict=False):
        assert_within(mine, right, bounds.gradient(name))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_well_conditioned_loss_is_as_near_as_promised(reduction):
    """Within what the documentation says; and the bounds, which hold in the worst case, are a few times as wide."""
    case = {
        "hidden": torch.randn(4, 9, 5),
        "weight": torch.randn(40, 5),
        "bias": torch.randn(40),
        "target": torch.randint(0, 40, (4, 9)),
        "class_weight": None,
        "settings": {"ignore_index": -100, "reduction": reduction, "label_smoothing": 0.1},
        "layout": "rows",
        "tile_rows": 7,
        "upstream": torch.rand(4, 9),
    }
    plain_loss, plain = loss_and_gradients(case, None)
    loss, ours = loss_and_gradients(case, case["tile_rows"])
    bounds = LossBounds(case)
    assert_near(loss, plain_loss, LOSS_BOUND)
    assert float(bounds.loss() / plain_loss) < 10 * LOSS_BOUND
    for name, mine, theirs in zip(("hidden", "weight", "bias"), ours, plain, strict=True):
        assert_near(mine, theirs, GRADIENT_BOUND)
        assert float(bounds.gradient(name).norm() / theirs.norm()) < 10 * GRADIENT_BOUND


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction, smoothing, weighted):
    hidden, weight, bias = (torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((2, 4, 3), (5, 3), (5,)))
    target = torch.tensor([[0, 1, -100, 4], [2, -100, 3, 3]])
    class_weight = torch.rand(5, dtype=torch.double) if weighted else None

    def plain_head(hidden, weight, bias):
        logits = lazy_linear(hidden, weight, bias, tile_rows=3).transpose(1, 2)
        return F.cross_entropy(logits, target, class_weight, reduction=reduction, label_smoothing=smoothing)

    def capped_head(hidden, weight, bias):
        logits = (lazy_linear(hidden, weight, bias, tile_rows=3)[:, 1:] / 2.0).tanh().transpose(1, 2)
        return F.cross_entropy(logits, target[:, 1:], class_weight, reduction=reduction, label_smoothing=smoothing)

    for function in (plain_head, capped_head):
        assert torch.autograd.gradcheck(function, (hidden, weight, bias), nondet_tol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradgradcheck(reduction):
    hidden, weight = (torch.randn(*s, dtype=torch.double, requires_grad=True) for s in ((2, 3, 2), (4, 2)))
    target = torch.tensor([[0, 1, -100], [2, 3, 3]])

    def loss(hidden, weight):
        logits = lazy_linear(hidden, weight, tile_rows=2).transpose(1, 2)
        return F.cross_entropy(logits, target, reduction=reduction)

    assert torch.autograd.gradgradcheck(loss, (hidden, weight), nondet_tol=1e-10)


def test_confident_rows_keep_their_loss():
    """Logits near 3000 whose target leads by 9: log-sum-exp less the target's logit would have an error of 1e-4,
    as large as the loss."""
    hidden = torch.tensor([[300.0, 0.0], [0.0, 300.0]])
    weight = torch.tensor([[10.0, 9.97], [9.97, 10.0], [0.0, 0.0]])
    target = torch.tensor([0, 1])
    plain = F.cross_entropy(F.linear(hidden, weight), target)
    loss = F.cross_entropy(lazy_linear(hidden, weight, tile_rows=1), target)
    assert 1e-4 < plain < 2e-4
    assert_near(loss, plain, LOSS_BOUND)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bf16_loss_is_within_one_ulp(reduction, smoothing):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 64, 48, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(501, 48, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 501, (256,), generator=generator)
    target[::5] = -100

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), target, reduction=reduction, label_smoothing=smoothing)

    plain, tiled = loss(F.linear(hidden, weight)), loss(lazy_linear(hidden, weight, tile_rows=32))
    assert tiled.dtype == plain.dtype == torch.bfloat16
    ulp = torch.nextafter(plain.abs(), torch.full_like(plain, torch.inf)).float() - plain.abs().float()
    assert ((tiled.float() - plain.float()).abs() <= ulp).all()


def test_float_loss_of_bf16_logits_is_within_one_ulp_of_bf16():
    """The Hugging Face way: logits in bf16, loss in fp32."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(4, 64, 48, generator=generator).bfloat16()
    weight = torch.randn(501, 48, generator=generator).bfloat16()
    target = torch.randint(0, 501, (256,), generator=generator)
    plain = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), target)
    tiled = F.cross_entropy(lazy_linear(hidden, weight, tile_rows=32).float().flatten(0, 1), target)
    assert_near(tiled, plain, LOSS_BOUND)


def test_half_precision_gradients_survive_the_loss_scale():
    """With fp16 logits the upstream scale comes before gradients are rounded: 6e-7 has three bits left in fp16. It is
    seen on classes that are no target."""
    hidden, weight = torch.randn(512, 16), torch.randn(3000, 16) * 0.01
    target = torch.randint(0, 10, (512,))
    found = []
    for linear in (F.linear, lambda h, w: lazy_linear(h, w, tile_rows=64)):
        h, w = hidden.half().requires_grad_(), weight.half().requires_grad_()
        loss = F.cross_entropy(linear(h, w).float(), target)
        (loss * 1e-3).backward(torch.tensor(2.0**16))
        found.append((h.grad.float(), w.grad[10:].float()))
    for plain, tiled in zip(*found, strict=True):
        assert relative(tiled, plain) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_summed_in_fp32_a_few_rows_at_a_time(dtype, monkeypatch):
    """Whatever the size of the slices, it is the same sum; the last slice is a shorter one."""
    generator = torch.Generator().manual_seed(7)
    hidden, weight = torch.randn(96, 48, generator=generator), torch.randn(501, 48, generator=generator)
    target = torch.randint(0, 501, (96,), generator=generator)
    found = []
    for slice_bytes in (sweep.PRODUCT_BYTES, 48 * 2 * 100, 1):
        monkeypatch.setattr(sweep, "PRODUCT_BYTES", slice_bytes)
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            logits = lazy_linear(hidden.requires_grad_(), w, tile_rows=32)
            F.cross_entropy(logits.float(), target, reduction="sum").backward()
        assert w.grad.dtype == torch.float32
        found.append(w.grad)
    assert torch.equal(found[0], found[1])
    assert_near(found[2], found[0], GRADIENT_BOUND)  # a row at a time is another kernel


def test_errors_are_raised_as_in_the_plain_path():
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    for target in (torch.full((6,), 9), torch.zeros(5, dtype=torch.long), torch.zeros(6, dtype=torch.int32)):
        for logits in (F.linear(hidden, weight), lazy_linear(hidden, weight, tile_rows=2)):
            with pytest.raises((IndexError, ValueError, RuntimeError)):
                F.cross_entropy(logits, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_that_is_ignored_altogether(reduction):
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.full((6,), -100)
    plain = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
    tiled = F.cross_entropy(lazy_linear(hidden, weight, tile_rows=2), target, reduction=reduction)
    assert torch.equal(plain.nan_to_num(7.0), tiled.nan_to_num(7.0))
    for loss in (plain, tiled):
        assert all(not g.any() for g in torch.autograd.grad(loss.sum(), (hidden, weight)))


class Operators(LiveBytes):
    """Which shapes the products of a step had."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.addmm.default, aten.addmm_.default):
            self.rows.append(args[1].shape[1] if func is aten.addmm_.default else args[-2].shape[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_ignored_rows_cost_nothing():
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(50, 8)
    target = torch.full((64,), -100)
    target[[3, 17, 40, 41, 60]] = 7
    logits = lazy_linear(hidden, weight, tile_rows=4)
    with Operators() as operators:
        F.cross_entropy(logits, target).backward()
    assert sorted(operators.rows) == [1, 1, 4, 4]  # two tiles of 5 rows, logits and gradient
    assert hidden.grad[[0, 1, 2]].abs().sum() == 0


@pytest.mark.parametrize("tile_rows", [8, 32, 100])
def test_gradients_formed_in_forward_cost_three_products_a_tile(tile_rows):
    hidden, weight = torch.randn(96, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    target = torch.randint(0, 50, (96,))
    num_tiles = -(-96 // tile_rows)
    with Operators() as operators:
        loss = F.cross_entropy(lazy_linear(hidden, weight, tile_rows=tile_rows), target)
        assert len(operators.rows) == 3 * num_tiles
        loss.backward(retain_graph=True)
        assert len(operators.rows) == 3 * num_tiles
    first = hidden.grad.clone()
    hidden.grad = None
    loss.backward()  # made anew
    assert_near(hidden.grad, first, 1e-6)


def test_peak_grows_with_the_rows_of_a_tile_not_with_the_batch():
    """Absolute bytes: above hidden states, gradients and row statistics there is one tile of logits."""
    vocabulary, width, num_rows = 4000, 16, 512
    hidden, weight = (
        torch.randn(num_rows, width, requires_grad=True),
        torch.randn(vocabulary, width, requires_grad=True),
    )
    target = torch.randint(0, vocabulary, (num_rows,))

    def peak(tile_rows):
        hidden.grad = weight.grad = None
        books = LiveBytes("cpu")
        books.see_all((hidden, weight, target))
        before = books.total_bytes
        with books:
            logits = F.linear(hidden, weight) if tile_rows is None else lazy_linear(hidden, weight, tile_rows=tile_rows)
            F.cross_entropy(logits, target).backward()
        return books.peak_bytes - before

    tile_bytes = {rows: 4 * rows * vocabulary for rows in (16, 32, 64)}
    gradient_bytes = 4 * (weight.numel() + hidden.numel())
    row_bytes = num_rows * (3 * 8 + 3 * 4 + 1)  # ids, order and targets; statistics and losses; what is ignored
    for rows, expected in tile_bytes.items():
        above = peak(rows) - expected - gradient_bytes - row_bytes
        assert 0 <= above <= rows * (2 * 4 * width + 100) + 1024, (rows, above)
    assert peak(None) >= 3 * 4 * num_rows * vocabulary


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_loss_that_lives_on_holds_no_hidden_states(reduction):
    """As a plain one, unless its graph is kept: then a second backward finds them."""
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    inner = hidden * 2
    watched = weakref.ref(inner)
    loss = F.cross_entropy(lazy_linear(inner, weight, tile_rows=2), torch.arange(6), reduction=reduction)
    del inner
    upstream = torch.ones_like(loss)
    loss.backward(upstream, retain_graph=True)
    assert watched() is not None
    first, weight.grad = weight.grad, None
    loss.backward(upstream)
    assert torch.equal(weight.grad, first)
    assert watched() is None
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward(upstream)


def test_log_softmax_and_nll_loss_run_in_tiles():
    hidden, weight = torch.randn(2, 9, 8), torch.randn(31, 8)
    target = torch.randint(0, 31, (2, 9))
    target[0, 3] = -100
    class_weight = torch.rand(31) + 0.1
    writings = (
        lambda x: F.nll_loss(F.log_softmax(x, -1).flatten(0, 1), target.flatten()),
        lambda x: F.nll_loss(x.log_softmax(-1).view(-1, 31), target.view(-1), class_weight, reduction="sum"),
        lambda x: F.nll_loss(torch.log_softmax(x.transpose(1, 2), 1), target, reduction="none").square().sum(),
        lambda x: torch.nn.NLLLoss()(torch.nn.LogSoftmax(-1)(x.float()).flatten(0, 1), target.flatten()),
        lambda x: -x.log_softmax(-1).gather(-1, target.clamp(0).unsqueeze(-1)).squeeze(-1).mean(),
        lambda x: torch.gather(F.log_softmax(x, -1), 2, target.clamp(0)[..., None]).square().sum(),
    )
    for writing in writings:
        results = []
        for linear in (F.linear, lambda h, w: lazy_linear(h, w, tile_rows=4)):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            logits = linear(h, w)
            loss = writing(logits)
            assert not isinstance(logits, LazyLogits) or logits.cache is None
            results.append((loss.detach(), *torch.autograd.grad(loss, (h, w))))
        assert_near(results[1][0], results[0][0], LOSS_BOUND)
        for mine, plain in zip(results[1][1:], results[0][1:], strict=True):
            assert_near(mine, plain, GRADIENT_BOUND)
