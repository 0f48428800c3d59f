"""Integers have values in a step on fake tensors, and the step shows the bytes that a real one shows."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
import simgpu  # noqa: F401  (registers the device)
from memscale import Config
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal, Rehearsal
from memscale._profile.values import Recollection, Values
from memscale._profile.values.carried import MAX_FLOATS, MAX_INTEGERS, assume_value, keep_value, value_of
from memscale._profile.values.draws import HIGHEST_DRAW, LOWEST_DRAW
from memscale._torch import private

WIDTH = 16
IDS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 7, 1, 0, 0, 0]])


class RealStep(Rehearsal):
    """The same step with data, on a model of the test's own."""

    source = "empirical"
    is_fake = False


class Decides(nn.Module):
    """Embeds tokens, does something that depends on values, and goes on."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("stops", torch.tensor([2, 5]))
        self.way = way

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.way(ids, self.embed(ids))).square().mean()


def _split(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = torch.split(x.flatten(0, 1), [*(ids != 0).sum(1).tolist(), int((ids == 0).sum())])
    return torch.cat([part * (number + 1) for number, part in enumerate(parts)])


def _experts(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    for kind in ids.unique().tolist():
        rows, columns = torch.where(ids == kind)
        result = result.index_put((rows, columns), x[rows, columns] * 2.0)
    return result


def _written(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(10, dtype=torch.long, device=ids.device)
    view = counts[2:]
    counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
    view.add_(1)
    return x.repeat(1, int(counts[7]), 1)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "item": lambda ids, x: x[:, : int(ids.max())],
    "branch": lambda ids, x: torch.cat([x, x]) if (ids == 7).any() else x,
    "nonzero": lambda ids, x: x.flatten(0, 1)[ids.flatten().nonzero().squeeze(1)],
    "mask": lambda ids, x: x[ids != 0],
    "negated mask": lambda ids, x: torch.cat([x[ids == 0], x[~(ids == 0)]]),
    "masked_select": lambda ids, x: x.masked_select((ids != 0).unsqueeze(-1)).reshape(-1, WIDTH),
    "split by lengths": _split,
    "unique": _experts,
    "bincount": lambda ids, x: x.repeat(len(torch.bincount(ids.flatten())), 1, 1),
    "repeat_interleave": lambda ids, x: x[0].repeat_interleave(ids[0], 0),
    "loop over rows": lambda ids, x: torch.cat([row[: int((i != 0).sum())] for i, row in zip(ids, x, strict=True)]),
    "numpy": lambda ids, x: x.repeat(1, int(ids.cpu().numpy().max()), 1),
    "text": lambda ids, x: x.repeat(1, len(f"{ids[1, 1]}{ids[0, 0]:03d}"), 1),
    "memory written": _written,
    "arange compared": lambda ids, x: x[
        torch.arange(6, device=x.device).expand(2, 6) < (ids != 0).sum(1, keepdim=True)
    ],
    "floats of integers": lambda ids, x: x[:, : round(float((ids != 0).float().mean() * 6))],
}


@pytest.mark.parametrize("name", WAYS)
def test_what_integers_decide_is_followed_to_the_byte(name: str) -> None:
    model, inputs = Decides(WAYS[name]), Inputs((IDS,))
    fake = FakeRehearsal(model, inputs, "cpu").run()
    real = RealStep(model, inputs, "cpu", 1).run()
    assert fake.peak_bytes == real.peak_bytes
    assert [s.net_bytes for s in fake.segments] == [s.net_bytes for s in real.segments]


@pytest.mark.parametrize("name", WAYS)
def test_values_flow_on_another_device(name: str) -> None:
    model, inputs = Decides(WAYS[name]), Inputs((IDS,))
    elsewhere, here = (FakeRehearsal(model, inputs, device).run() for device in ("simgpu", "cpu"))
    kinds = [[(s.phase, s.module_fqn) for s in trace.segments] for trace in (elsewhere, here)]
    assert kinds[0] == kinds[1]
    assert elsewhere.peak_bytes >= here.peak_bytes  # rounded up


def test_a_buffer_of_integers_has_its_values() -> None:
    class Reads(Decides):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            start, end = self.stops.tolist()
            return self.out(self.embed(ids)[:, start:end]).sum()

    model, inputs = Reads(lambda ids, x: x), Inputs((IDS,))
    assert FakeRehearsal(model, inputs, "cpu").run().peak_bytes == RealStep(model, inputs, "cpu", 1).run().peak_bytes


def test_a_batch_without_data_is_zeros_and_masks_hide_nothing() -> None:
    class Looks(Decides):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            assert input_ids.sum().item() == 0
            assert attention_mask.all()
            return self.out(self.embed(input_ids)).sum()

    empty = torch.empty(2, 6, dtype=torch.long, device="meta")
    inputs = Inputs(kwargs={"input_ids": empty, "attention_mask": empty.clone()})
    FakeRehearsal(Looks(lambda ids, x: x), inputs, "cpu").run()


class Fake:
    """A fake mode with values above it."""

    def __enter__(self) -> Values:
        self.mode, self.values = private.fake_tensor_mode(), Values()
        self.mode.__enter__()
        return self.values.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.values.__exit__(*error)
        self.mode.__exit__(*error)


def unknown(*shape: int) -> torch.Tensor:
    """Floats without values: a part of what is above the bound."""
    return torch.empty(MAX_FLOATS + 1)[: torch.Size(shape).numel()].reshape(shape)


def test_unknown_contents_take_the_values_of_everything_in_that_memory() -> None:
    with Fake():
        table = torch.zeros(4, dtype=torch.long)
        view, copied = table[1:3], table.clone()
        table[:2].copy_(unknown(2))
        assert value_of(table) is None
        assert value_of(view) is None
        assert copied.tolist() == [0, 0, 0, 0]
        with pytest.raises(private.data_dependent_errors()):
            view[0].item()


def test_what_is_written_through_a_view_without_values_is_forgotten() -> None:
    with Fake():
        table = torch.zeros(8, dtype=torch.long)
        wide = table.unsqueeze(0).expand(2**18, 8)  # above the bound
        assert value_of(wide) is None
        wide[0].add_(unknown(8).long())
        assert value_of(table) is None


def test_large_integers_have_no_values() -> None:
    with Fake():
        assert value_of(torch.arange(MAX_INTEGERS)) is not None
        assert value_of(torch.arange(MAX_INTEGERS + 1)) is None
        assert value_of(torch.zeros(MAX_FLOATS + 1)) is None


def test_a_real_tensor_is_never_written_to() -> None:
    table = torch.arange(4)
    with Fake():
        table.add_(1)
    assert table.tolist() == [0, 1, 2, 3]


def test_the_batch_is_not_held_by_its_values() -> None:
    ids = torch.arange(4)
    with private.fake_tensor_mode():
        fake = torch.empty(4, dtype=torch.long)
    keep_value(fake, ids)
    ids.zero_()
    value = value_of(fake)
    assert value is not None
    assert value.real.tolist() == [0, 1, 2, 3]


# ---- floats


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum() > 1e9,
        lambda x: x.max().item() > 0,
        lambda x: torch.equal(x, x + 1),
        lambda x: int(x.abs().sum().long()) > 3,
    ],
)
def test_a_float_of_the_model_is_refused(question: Callable[[torch.Tensor], Any]) -> None:
    def way(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x if question(x) else -x

    with pytest.raises(private.data_dependent_errors()):
        FakeRehearsal(Decides(way), Inputs((IDS,)), "cpu").run()


def test_broken_numbers_are_not_expected() -> None:
    def way(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 1, 2 * MAX_INTEGERS // x.numel())
        broken = torch.isinf(wide).any() or torch.isnan(x).any() or not torch.isfinite(wide).all()
        assert torch.isfinite(x).all()
        return x.clamp(-1, 1) if broken else x

    FakeRehearsal(Decides(way), Inputs((IDS,)), "cpu").run()


@pytest.mark.parametrize(
    "way",
    [
        lambda ids, x: x - x.amax(1, keepdim=True),  # backward compares x with what was the highest
        lambda ids, x: torch.where(x == x.detach().clone(), x, -x),
        lambda ids, x: torch.where(x != x.flip(0), x, -x),
    ],
    ids=["amax", "eq", "ne"],
)
def test_floats_that_are_compared_with_each_other_decide_no_size(way: Callable[..., torch.Tensor]) -> None:
    model, inputs = Decides(way), Inputs((IDS,))
    assert FakeRehearsal(model, inputs, "cpu").run().peak_bytes == RealStep(model, inputs, "cpu", 1).run().peak_bytes


def test_a_mask_of_floats_shows_everything() -> None:
    model, inputs = Decides(lambda ids, x: x[x[..., 0] > 0]), Inputs((IDS,))
    whole = Decides(lambda ids, x: x[ids > -1])
    assert FakeRehearsal(model, inputs, "cpu").run().peak_bytes >= FakeRehearsal(whole, inputs, "cpu").run().peak_bytes


@pytest.mark.parametrize("num_chosen", [1, 2, 3])
def test_every_candidate_is_chosen_and_the_first_are_by_most(num_chosen: int) -> None:
    with Fake():
        scores = unknown(20, 8)
        chosen = scores.topk(num_chosen, -1).indices.tolist()
        order = scores.argsort(1).tolist()
        best = scores.argmax(1).tolist()
    counts = collections.Counter(expert for row in chosen for expert in row)
    assert sorted(counts) == list(range(8))
    assert counts[0] == max(counts.values())
    assert all(sorted(row) == list(range(8)) for row in order)
    assert set(best) == set(range(8))


def test_chosen_along_any_dimension_in_range() -> None:
    with Fake():
        scores = unknown(5, 7, 3)
        for dim in (0, 1, 2):
            rows = scores.topk(2, dim).indices.movedim(dim, -1).flatten(0, 1).tolist()
            assert all(len({*row}) == 2 and max(row) < scores.shape[dim] for row in rows)
            assert scores.max(dim).indices.max().item() == min(scores.shape[dim], len(rows)) - 1


# ---- draws


class Skips(nn.Module):
    """Layers that are dropped by one of the usual draws."""

    def __init__(self, keeps: Callable[[], bool], num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(num_layers)
        )
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.keeps():
                x = x + layer(x)
        return x


DRAWS: dict[str, Callable[[], bool]] = {
    "rand": lambda: bool(torch.rand([]) >= 0.5),
    "rand of one element": lambda: torch.rand(1).item() > 0.5,
    "rand below": lambda: bool(torch.rand(1) < 0.5),
    "uniform in place": lambda: float(torch.empty(1).uniform_(0, 1)) < 0.9,
    "bernoulli": lambda: bool(torch.bernoulli(torch.tensor(0.5))),
    "bernoulli in place": lambda: not torch.empty(()).bernoulli_(0.5).item(),
    "python": lambda: random.random() >= 0.1,
    "python below": lambda: random.uniform(0, 1) < 0.1,
    "numpy": lambda: numpy.random.rand() >= 0.1,
    "numpy below": lambda: bool(numpy.random.uniform(0, 1) < 0.1),
    "numpy array": lambda: bool((numpy.random.random(3) >= 0.1).all()),
    "neither high nor low": lambda: 0.2 < random.random() < 0.8,
    "python integer": lambda: random.randint(0, 4) > 3,
    "python range": lambda: random.randrange(1, 9, 2) == 1,
    "python choice": lambda: random.choice([True, False, False]),
    "numpy integer": lambda: numpy.random.randint(3) == 2,
    "numpy integers": lambda: bool((numpy.random.randint(1, 4, 3) == 1).all()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_worst_draw_is_planned_for(name: str) -> None:
    inputs = Inputs((torch.randn(32, 8, requires_grad=True),))
    worst = RealStep(Skips(lambda: True), inputs, "cpu", 1).run().peak_bytes
    rehearsal = FakeRehearsal(Skips(DRAWS[name]), inputs, "cpu")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    functions = random.random, random.uniform, numpy.random.rand, numpy.random.uniform
    for _ in range(2):
        assert worst <= rehearsal.run().peak_bytes <= worst + 64  # and the draws themselves
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == numpy.random.get_state()[1].tolist()
    assert functions == (random.random, random.uniform, numpy.random.rand, numpy.random.uniform)


imported_random, imported_beta = random.random, numpy.random.beta

LUCK: dict[str, Callable[[], bool]] = {
    "randint": lambda: bool(torch.randint(0, 2, ())),
    "randperm": lambda: torch.randperm(4).tolist()[0] > 1,
    "randn": lambda: torch.randn(()).item() > 0,
    "exponential": lambda: float(torch.empty(()).exponential_()) < 0.7,
    "beta, as in mixup": lambda: torch.distributions.Beta(1.0, 1.0).sample().item() > 0.5,
    "multinomial": lambda: int(torch.multinomial(torch.tensor([0.5, 0.5]), 1)) == 1,
    "as an array": lambda: bool(torch.randint(0, 2, (1,)).numpy()[0]),
    "derived": lambda: bool((torch.randint(0, 9, (3,)).sum() * 2 > 9).any()),
    "python's, imported by name": lambda: imported_random() < 0.5,
    "numpy's beta": lambda: imported_beta(1, 1) < 0.5,
}


@pytest.mark.parametrize("name", LUCK)
def test_a_draw_without_a_worst_case_is_refused(name: str) -> None:
    """The model is observed instead: nothing is planned for by luck."""
    rehearsal = FakeRehearsal(Skips(LUCK[name], 6), Inputs((torch.randn(32, 8, requires_grad=True),)), "cpu")
    with pytest.raises((NotImplementedError, RuntimeError)) as refused:
        rehearsal.run()
    assert private.asks_for_values(refused.value)


def test_a_mask_drawn_by_luck_shows_everything() -> None:
    model, inputs = Decides(lambda ids, x: x[torch.randn(ids.shape) > 0]), Inputs((IDS,))
    whole = Decides(lambda ids, x: x[torch.ones(ids.shape) > 0])
    assert FakeRehearsal(model, inputs, "cpu").run().peak_bytes >= FakeRehearsal(whole, inputs, "cpu").run().peak_bytes


def test_draws_that_decide_nothing_do_no_harm() -> None:
    def way(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        order = [*range(ids.shape[0])]
        random.shuffle(order)
        columns = numpy.random.permutation(ids.shape[1])
        noise = torch.randn(x.shape) + torch.randint(0, 9, x.shape)
        return x[order][:, torch.from_numpy(columns)][:, torch.randperm(ids.shape[1])] + noise

    model, inputs = Decides(way), Inputs((IDS,))
    assert FakeRehearsal(model, inputs, "cpu").run().peak_bytes == RealStep(model, inputs, "cpu", 1).run().peak_bytes


def test_draws_of_which_none_is_the_worst_are_refused() -> None:
    """Every second layer runs with high numbers, the others with low ones; in a real step all of them may."""

    class Opposite(Skips):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                if (random.random() < 0.5) == (index % 2 == 0):
                    x = x + layer(x)
            return x

    rehearsal = FakeRehearsal(Opposite(lambda: True), Inputs((torch.randn(32, 8),)), "cpu")
    with pytest.raises(NotImplementedError, match="does not run layers"):
        rehearsal.run()


# ---- values of the batch


@pytest.mark.parametrize("name", WAYS)
def test_inputs_whose_values_decide_are_remembered(name: str) -> None:
    rehearsal = FakeRehearsal(Decides(WAYS[name]), Inputs((IDS,)), "cpu")
    rehearsal.run()
    assert rehearsal.deciding_inputs == ("0.0",)


def test_inputs_that_are_only_looked_up_decide_nothing() -> None:
    rehearsal = FakeRehearsal(Decides(lambda ids, x: x[ids] + (ids + 1)[..., None, None]), Inputs((IDS % 2,)), "cpu")
    rehearsal.run()
    assert rehearsal.deciding_inputs == ()


def test_a_generator_of_the_user_does_not_move() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()

    def keeps() -> bool:
        return bool(torch.rand(1, generator=generator) > 0.1) and len(torch.randperm(3, generator=generator)) == 3

    FakeRehearsal(Skips(keeps), Inputs((torch.randn(4, 8),)), "cpu").run()
    assert torch.equal(before, generator.get_state())


def test_certain_draws_stay_certain() -> None:
    with Fake() as values:
        for values.share in (HIGHEST_DRAW, LOWEST_DRAW):
            assert torch.bernoulli(torch.tensor([0.0, 1.0])).tolist() == [0, 1]
            assert not (torch.rand(3) < 0.0).any()
            assert (torch.rand(3) < 1.0).all()


def test_a_step_above_the_budget_is_refused_whatever_was_drawn() -> None:
    model, x = Skips(lambda: float(torch.rand(())) >= 0.5, 6), torch.randn(128, 8)
    plan = memscale.estimate(model, x, config=Config(mode="conservative", enable_logging=False)).by_mode
    predicted = max(each.plan.baseline_peak_bytes for each in plan.values())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        with memscale.measure("cpu") as measured:
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            del loss
        assert measured.peak_bytes <= predicted + 64


def test_values_can_be_assumed() -> None:
    with Fake():
        mask = torch.empty(3, dtype=torch.bool)
        assume_value(mask, 1)
        assert mask.all()
        assert F.one_hot(mask.long(), 3).sum().item() == 3


def test_what_is_recalled_carries_the_values_that_the_operator_would_have_given() -> None:
    mode, values = private.fake_tensor_mode(), Values()
    recollection, pairs = Recollection(mode, values), []
    with mode, values:
        made, doubled = torch.zeros(3), torch.arange(4) * 2
    for func, args in (
        (torch.ops.aten.zeros.default, ([3],)),
        (torch.ops.aten.mul.Tensor, (doubled, 2)),
        (torch.ops.aten.slice.Tensor, (doubled, 0, 1)),
        (torch.ops.aten.zeros_like.default, (made,)),
    ):
        with mode, values:
            told = func(*args)
        with mode:
            known = recollection.find(func, args, {})
            assert known is not None
            pairs.append((value_of(told), value_of(recollection.again(known, func, args, {}))))
    for given, again in pairs:
        assert given is not None
        assert again is not None
        assert torch.equal(given.real, again.real)


def test_what_a_recalled_operator_writes_is_forgotten_where_it_is_not_known() -> None:
    mode, values = private.fake_tensor_mode(), Values()
    with mode:
        unknown = torch.empty(3)
    with mode, values:
        first, second = torch.zeros(3), torch.zeros(3)
        first.copy_(unknown)
    copy, recollection = torch.ops.aten.copy_.default, Recollection(mode, values)
    with mode:
        known = recollection.find(copy, (second, unknown), {})
        assert known is not None
        assert value_of(second) is not None
        recollection.again(known, copy, (second, unknown), {})
        assert value_of(first) is None
        assert value_of(second) is None
