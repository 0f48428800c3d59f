"""Profiles as data, and what is said when there can be none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import ProfileError
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from memscale._profile.optimizer_twin import SteppedModel, optimizer_cost
from memscale._profile.profiler import open_rehearsal, profile_model, try_variant
from tests.models import Mlp, case, odd
from tests.parity import SELECTIVE, checkpoint_all

CPU = torch.device("cpu")


def profile_of(name: str) -> Profile:
    entry = case(name)
    model, inputs = entry.build(), Inputs.from_sample(entry.batch(0))
    rehearsal, plain = open_rehearsal(model, inputs, CPU)
    return profile_model(model, rehearsal, plain, optimizer_cost(SteppedModel(model, "adamw", "cpu")), inputs)


def test_a_profile_counts_every_kind_once() -> None:
    model: Any = case("gpt2").build()
    profile = profile_of("gpt2")
    unique = {id(p): p for p in model.parameters()}.values()
    assert profile.parameter_bytes == sum(p.nbytes for p in unique)
    assert profile.buffer_bytes == sum(b.nbytes for b in model.buffers())
    assert profile.input_bytes == 2 * 4 * 32 * 8
    assert profile.source == "static"
    assert [spec.name for spec in profile.inputs] == ["input_ids", "labels"]
    assert profile.optimizer.state_bytes == sum(2 * p.nbytes + 4 for p in unique)


def test_a_profile_reads_what_it_wrote() -> None:
    profile = profile_of("resnet")
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.to_json() == profile.to_json()


@pytest.mark.parametrize(
    ("static", "words"), [(True, "on fake tensors"), (False, "use_static_profiling is off")], ids=["tried", "off"]
)
def test_what_cannot_be_profiled_says_why(static: bool, words: str) -> None:
    with pytest.raises(ProfileError, match=words) as caught:
        open_rehearsal(Mlp(), Inputs((torch.ones(2, 3),)), CPU, static=static)
    assert "sample_input" in str(caught.value)


def test_a_model_that_looks_at_values_is_not_run() -> None:
    """Whoever asks for a profile gets an error; nothing of the model is called."""
    model = Picky()
    calls: list[int] = []
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ProfileError, match="from its first training steps"):
        open_rehearsal(model, Inputs((torch.ones(2, 4),)), CPU)
    with pytest.raises(ProfileError, match="from its first training steps"):
        memscale.estimate(model, torch.ones(2, 4))
    assert calls == []


def test_torchs_own_traceback_is_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    """What it says is in our error."""
    with pytest.raises(ProfileError, match="reduction dim"):
        open_rehearsal(nn.Linear(3, 3), Inputs((torch.zeros(2, 4),)), torch.device("cpu"))
    assert not [record for record in caplog.records if record.name.startswith("torch")]


def test_a_model_without_weights_is_never_run_for_real() -> None:
    with torch.device("meta"):
        model = case("data-dependent").build()
    with pytest.raises(ProfileError, match="on fake tensors"):
        open_rehearsal(model, Inputs((torch.ones(4, 64),)), CPU)


def test_a_variant_that_does_not_run_is_left_out() -> None:
    entry = odd("in-place on kept outputs")
    rehearsal, _ = open_rehearsal(entry.build(), Inputs.from_sample(entry.batch(0)), CPU)
    assert try_variant(rehearsal, checkpoint_all, "checkpoint") is not None
    assert try_variant(rehearsal, lambda model: checkpoint_all(model, keep=SELECTIVE), "selective") is None


# ---- optimizers

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


def real_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("name", MAKERS)
def test_optimizer_state_is_predicted_to_the_byte(name: str) -> None:
    model = Mlp(depth=2)
    optimizer = MAKERS[name](model.parameters())
    cost = optimizer_cost(SteppedModel(model, optimizer, "cpu"))
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert cost.state_bytes == real_state_bytes(optimizer)
    assert cost.name == type(optimizer).__name__
    again = optimizer_cost(SteppedModel(model, optimizer, "cpu"))
    assert again.state_bytes == cost.state_bytes, "an optimizer at work costs what a fresh one does"


def test_frozen_parameters_have_no_state() -> None:
    model = Mlp(depth=2)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    cost = optimizer_cost(SteppedModel(model, "adamw", "cpu"))
    assert cost.state_bytes == sum(2 * p.nbytes + 4 for p in model.head.parameters())


def test_no_optimizer() -> None:
    assert optimizer_cost(SteppedModel(Mlp(), "none", "cpu")).state_bytes == 0


@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a scheduler"])
def test_the_users_optimizer_is_never_stepped(scheduled: bool) -> None:
    """A scheduler binds `step` to its own optimizer; a twin that inherited it once trained the user's model."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    model(torch.ones(2, 4)).sum().backward()
    weights = [p.detach().clone() for p in model.parameters()]
    state = optimizer.state_dict()["state"].copy()
    optimizer_cost(SteppedModel(model, optimizer, "cpu"))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert optimizer.state_dict()["state"] == state
    assert all(p.grad is not None for p in model.parameters())
    if scheduler is not None:
        assert scheduler.last_epoch == 0


def test_the_users_optimizer_hooks_do_not_fire() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer_cost(SteppedModel(model, optimizer, "cpu"))
    assert calls == []


def test_an_optimizer_that_cannot_be_tried_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp(depth=1)
    cost = optimizer_cost(SteppedModel(model, torch.optim.LBFGS(model.parameters()), "cpu"))
    assert "LBFGS" in cost.name
    assert "taken" in caplog.text
    caplog.clear()  # the record holds the error, the error its frames


class Picky(nn.Module):
    """Looks at values, so that fake tensors do not suffice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else self.linear(-x)
