"""Odd uses of lazy logits, each next to an untouched copy of the model: the same gradients, or a refusal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale._plan import TileHead
from memscale.techniques.tiling.common import TilingError
from memscale.techniques.tiling.head.lazy import LazyLogits
from memscale.techniques.tiling.head.recipe import StaleLogitsError
from tests.techniques.tiling.models import (
    LENGTH,
    TILE_ROWS,
    VOCABULARY,
    Attached,
    HandWritten,
    assert_near,
    assert_same_gradients,
    builds,
    flat_loss,
    labels,
    pair,
    shifted_loss,
    tokens,
)

pytestmark = pytest.mark.unit
X, Y = tokens(), labels()
HEAD = TileHead("head", TILE_ROWS)


def compare(step, *, bound=1e-5, tied=(True, False)):
    """`step(model)` trains a little and returns what is to be compared besides the gradients."""
    for is_tied in tied:
        ours, plain = pair(lambda is_tied=is_tied: HandWritten(tied=is_tied, bias=not is_tied))
        results = []
        with Attached(ours, HEAD):
            for model in (ours, plain):
                torch.manual_seed(5)
                results.append([tensor.detach() for tensor in step(model)])
        assert len(results[0]) == len(results[1])
        for mine, theirs in zip(*results, strict=True):
            assert_near(mine + 0, theirs + 0, bound)
        assert_same_gradients(ours, plain, max(bound, 1e-5))


# ---- writes, through every way to the memory, before and after the loss

ALIASES = {
    "itself": lambda x: x,
    "data": lambda x: x.data,
    "ravel": torch.ravel,
    "view": lambda x: x.view(-1),
    "column": lambda x: x[..., 3:9],
    "diagonal": lambda x: x[0].diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((50,), (7,)),
    "positive": torch.positive,
    "broadcast_to": lambda x: torch.broadcast_to(x, x.shape),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1))[0],
    "atleast_3d": torch.atleast_3d,
    "hsplit": lambda x: x.hsplit([3])[1],
    "tensor_split": lambda x: x.tensor_split(2, -1)[0],
    "resolve_conj": lambda x: x.resolve_conj(),
    "cpu": lambda x: x.cpu(),
    "dropout that is off": lambda x: F.dropout(x, 0.1, training=False),
    "row": lambda x: x[1, 4],
}


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("name", list(ALIASES))
def test_writes_before_the_loss_are_seen(name, with_graph):
    def step(model):
        logits = model(X)
        with torch.set_grad_enabled(with_graph):
            ALIASES[name](logits if with_graph else logits.detach()).mul_(2)
        loss = flat_loss(logits, Y)
        loss.backward()
        return [loss, logits]

    compare(step)


@pytest.mark.parametrize("share", [lambda x: x.numpy(), lambda x: torch.from_dlpack(x)])
def test_memory_of_others(share):
    """Whoever has the memory may write to it."""

    def step(model):
        logits = model(X)
        memory = share(logits.detach())
        memory *= 2
        loss = flat_loss(logits, Y)
        loss.backward()
        return [loss, logits]

    compare(step)


def reading(logits, loss):
    """A loss a row, of log-probabilities, in double precision: what is kept of the logits must be what it was."""
    return {
        "mean": lambda: flat_loss(logits, Y),
        "none": lambda: F.cross_entropy(logits.transpose(1, 2), Y, reduction="none").square().sum(),
        "nll": lambda: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), Y),
        "cast": lambda: flat_loss(logits.double(), Y),
        "shifted": lambda: shifted_loss(logits, Y),
    }[loss]()


@pytest.mark.parametrize("kind", ["mean", "none", "nll", "cast", "shifted"])
def test_writes_after_the_loss_do_not_reach_it(kind):
    def step(model):
        logits = model(X)
        loss = reading(logits, kind)
        logits.mul_(3)
        logits[:, 0] = 4.0
        loss.backward()
        return [loss, logits]

    compare(step)


IN_PLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "hardtanh on a view": lambda x: nn.Hardtanh(-0.2, 0.2, inplace=True)(x[:, 2:]),
    "dropout": lambda x: F.dropout(x, 0.3, inplace=True),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_in_place_functions(name):
    def step(model):
        logits = model(X)
        result = IN_PLACE[name](logits)
        loss = flat_loss(result, Y[:, -result.shape[1] :]) + flat_loss(logits, Y)
        loss.backward()
        return [loss, logits]

    compare(step)


def test_data_is_not_replaced():
    model = HandWritten()
    with Attached(model, HEAD):
        logits = model(X)
        with pytest.raises(TilingError, match=r"logits.data.copy_"):
            logits.data = torch.zeros(logits.shape)
        logits.data.copy_(torch.zeros(logits.shape))
        assert not logits.any()


def test_logits_given_to_other_tensors():
    def step(model):
        logits, leaf = model(X), torch.zeros(*X.shape, VOCABULARY, requires_grad=True)
        leaf.grad = logits.detach()
        buffer = torch.zeros(*X.shape, VOCABULARY)
        buffer[:, 1:] = logits.detach()[:, :-1]
        out = torch.empty_like(buffer)
        torch.exp(logits.detach(), out=out)
        loss = flat_loss(logits, Y)
        loss.backward()
        return [leaf.grad, buffer, out, loss]

    compare(step)


# ---- whoever wants the gradient of the logits gets it


def second_order(model, loss):
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    return [loss, *gradients]


def hooked(change, *, late):
    def step(model):
        logits = model(X)
        shown = logits[:, 1:].double()
        if not late:
            shown.register_hook(change)
        loss = flat_loss(shown, Y[:, 1:])
        if late:
            shown.register_hook(change)
        return second_order(model, loss)

    return step


def written_after(model):
    logits = model(X)
    loss = flat_loss(logits, Y)
    logits.mul_(3)
    return second_order(model, loss)


def penalised(model):
    logits = model(X)
    probabilities = logits.log_softmax(-1)
    loss = F.nll_loss(probabilities.flatten(0, 1), Y.flatten())
    found = torch.autograd.grad(loss, [logits, probabilities], create_graph=True)
    (loss + sum(gradient.square().sum() for gradient in found)).backward()
    return [loss, *found]


SECOND_ORDER = {
    "plain": lambda model: second_order(model, flat_loss(model(X), Y)),
    "hook": hooked(torch.tanh, late=False),
    "late hook": hooked(torch.tanh, late=True),
    "written after the loss": written_after,
    "penalty on the logits' own gradient": penalised,
}


@pytest.mark.parametrize("name", list(SECOND_ORDER))
def test_double_backward(name):
    compare(SECOND_ORDER[name])


def node_hook(*, late):
    def step(model):
        logits = model(X)
        loss = flat_loss(logits, Y) if late else None
        logits.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        loss = loss if late else flat_loss(logits, Y)
        loss.backward()
        return [loss]

    return step


def hook_from_a_module_named_as_ddps(model):
    """Who asks for the node is not known by the name of a module."""
    names = {"__name__": "torch.nn.parallel.distributed"}
    exec("def double(x): x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))", names)
    logits = model(X)
    names["double"](logits)
    loss = flat_loss(logits, Y)
    loss.backward()
    return [loss]


def edge(model):
    logits = model(X)
    loss = flat_loss(logits, Y)
    found = torch.autograd.grad(loss, torch.autograd.graph.get_gradient_edge(logits), retain_graph=True)[0]
    loss.backward()
    return [loss, found]


def many_hooks(model):
    seen, logits = [], model(X)
    for mode in ("all", "any"):
        torch.autograd.graph.register_multi_grad_hook([logits], lambda g: seen.extend(g), mode=mode)
    loss = shifted_loss(logits, Y)
    loss.backward()
    return [loss, *seen]


def module_hooks(model):
    seen = []
    handles = [
        model.head.register_full_backward_hook(lambda _, inputs, outputs: seen.extend([*inputs, *outputs])),
        model.register_full_backward_pre_hook(lambda _, outputs: seen.extend(outputs)),
        model.head.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,)),
        model.head.register_forward_hook(lambda _, inputs, output: output * 2),
    ]
    loss = flat_loss(model(X), Y)
    loss.backward()
    for handle in handles:
        handle.remove()
    return [loss, *seen]


def hidden_hooks(model):
    seen, hidden = [], model.hidden(X)
    hidden.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    hidden.retain_grad()
    logits = model.head(hidden)
    loss = flat_loss(logits, Y) + shifted_loss(logits, Y)
    loss.backward()
    return [loss, hidden.grad, *seen]


WATCHED = {
    "node": node_hook(late=False),
    "node, late": node_hook(late=True),
    "node, by a module named as DDP's": hook_from_a_module_named_as_ddps,
    "edge": edge,
    "many": many_hooks,
    "modules": module_hooks,
    "hidden states": hidden_hooks,
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", list(WATCHED))
def test_whoever_watches_sees_the_plain_gradient(name):
    compare(WATCHED[name])


def test_logits_as_a_leaf():
    """Detached, and optimized by themselves."""

    def step(model):
        logits = model(X)
        leaf = logits.detach().requires_grad_()
        optimizer = torch.optim.SGD([leaf], 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            loss = flat_loss(leaf, Y)
            loss.backward()
            optimizer.step()
        logits.backward(leaf.grad)
        return [loss, leaf, leaf.grad]

    compare(step)


# ---- loops


def twice(model):
    """One head, two hidden states, every combination of their logits."""
    hidden = model.hidden(X)
    a, b = model.head(hidden), model.head(hidden * 2)
    loss = (
        flat_loss(a, Y)
        + flat_loss(a + b, Y)
        + flat_loss(a + a.tanh(), Y)
        + flat_loss(torch.cat([a, b]), Y.repeat(2, 1))
    )
    loss.backward()
    return [loss]


def kept_for_later(model):
    """All logits first, then all losses."""
    kept = [model(tokens(seed)) for seed in range(3)]
    loss = sum(flat_loss(logits, Y) for logits in kept)
    loss.backward()
    return [loss]


def adversary(model):
    """The gradient of the embedding changes the input of a second forward."""
    embedded = model.embedding(X).detach().requires_grad_()
    loss = flat_loss(model.head(model.blocks[0](embedded)), Y)
    (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
    loss = loss + flat_loss(model.head(model.blocks[0](embedded + 0.1 * gradient.sign())), Y)
    loss.backward()
    return [loss, embedded.grad]


def take_a_step(parameter):
    parameter.data.sub_(parameter.grad * 0.1)
    parameter.grad = None


def step_in_backward(model):
    handles = [parameter.register_post_accumulate_grad_hook(take_a_step) for parameter in model.parameters()]
    losses = []
    for seed in range(3):
        losses.append(shifted_loss(model(tokens(seed)), Y))
        losses[-1].backward()
    for handle in handles:
        handle.remove()
    return [*losses, *model.parameters()]


def second_order_optimizer(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = flat_loss(model(X), Y)
        loss.backward()
        return loss

    return [optimizer.step(closure), flat_loss(model(X), Y)]


def policy(model):
    """Log-probabilities of what was done, an entropy bonus, the hardest tokens."""
    logits = model(X)
    probabilities = torch.log_softmax(logits[:, :-1] / 0.7, -1)
    chosen = probabilities.gather(2, X[:, 1:, None]).squeeze(-1)
    entropy = -(probabilities.exp() * probabilities).sum(-1).mean()
    hardest = F.cross_entropy(logits.transpose(1, 2), X, reduction="none").flatten().topk(10).values.mean()
    picked = logits.log_softmax(-1).flatten(0, 1)[torch.arange(X.numel()), X.flatten()].mean()
    loss = -chosen.sum() - 0.01 * entropy + hardest - picked
    loss.backward()
    return [loss]


def views_without_graph(model):
    logits = model(X)
    with torch.no_grad():
        view = logits[:, :-1]
    outside, loss = flat_loss(view, X[:, :-1]), flat_loss(logits, Y)
    (outside + loss).backward()
    return [outside, loss]


def written_losses(model):
    """In place on what came out: losses a row, chosen log-probabilities."""
    logits = model(X)
    losses = F.cross_entropy(logits.transpose(1, 2), X, reduction="none")
    losses[Y == -100] = 0.0
    losses.mul_(torch.linspace(0, 1, LENGTH))
    chosen = logits.log_softmax(-1).gather(-1, X[..., None])
    chosen.masked_fill_((Y == -100)[..., None], 0.0)
    loss = losses.sum() - chosen.sum()
    loss.backward()
    return [loss, losses, chosen]


def label_smoother(model):
    """As the trainer of transformers smooths labels, outside of the model."""
    from transformers.trainer_pt_utils import LabelSmoother

    loss = LabelSmoother(0.1)({"logits": model(X)}, Y.clone(), shift_labels=True)
    loss.backward()
    return [loss]


def perplexity(model):
    loss = flat_loss(model(X), Y)
    (torch.exp(loss) / 3 + loss**2).backward()
    return [loss]


LOOPS = {
    "written losses": written_losses,
    "label smoother": label_smoother,
    "perplexity": perplexity,
    "head called twice": twice,
    "kept for later": kept_for_later,
    "adversary": adversary,
    "step in backward": step_in_backward,
    "closure": second_order_optimizer,
    "policy": policy,
    "views without graph": views_without_graph,
}


@pytest.mark.parametrize("name", list(LOOPS))
def test_loops(name):
    compare(LOOPS[name], bound=1e-4 if name == "closure" else 1e-5)  # which divides by differences of gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_scaling(dtype):
    def step(model):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = flat_loss(model(X), Y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0
        return [loss]

    compare(step, bound=2e-2)


@pytest.mark.parametrize("keep", [lambda x: x.detach().cpu(), lambda x: x.detach().clone()])
def test_copies_outlive_the_step(keep):
    def step(model):
        optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
        for seed in range(3):
            logits = model(tokens(seed))
            kept.append(keep(logits))
            optimizer.zero_grad()
            flat_loss(logits, Y).backward()
            optimizer.step()
        return [torch.cat(kept)]

    compare(step)


def test_what_is_only_detached_does_not():
    model = HandWritten()
    with Attached(model, HEAD):
        kept = model(X).detach()
        flat_loss(model(X), Y).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(StaleLogitsError):
            torch.cat([kept])


def test_a_weight_or_input_that_changes_before_the_loss_is_noticed():
    model = HandWritten()
    with Attached(model, HEAD):
        logits = model(X)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(StaleLogitsError):
            flat_loss(logits, Y)
        hidden = model.hidden(X) * 1
        logits = model.head(hidden)
        hidden.mul_(2)
        with pytest.raises(StaleLogitsError):
            flat_loss(logits, Y)


# ---- other worlds


def functional(model):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, x, y):
        return flat_loss(torch.func.functional_call(model, parameters, (x,)), y)

    each = torch.vmap(torch.func.grad(lambda p, x, y: loss(p, x[None], y[None])), in_dims=(None, 0, 0))
    gradients, of_samples = torch.func.grad(loss)(parameters, X, Y), each(parameters, X, X)
    return [*gradients.values(), *of_samples.values()]


def forward_mode(model):
    import torch.autograd.forward_ad as forward_ad

    hidden = model.hidden(X).detach()
    with forward_ad.dual_level():
        logits = model.head(forward_ad.make_dual(hidden, torch.ones_like(hidden)))
        return [forward_ad.unpack_dual(flat_loss(logits, Y)).tangent.clone()]


def traced(model):
    loss = torch.jit.trace(flat_loss, (torch.randn(*X.shape, VOCABULARY), Y))(model(X), Y)
    loss.backward()
    return [loss]


def watched(model):
    with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
        loss = flat_loss(model(X).log_softmax(-1), Y)
        loss.backward()
    return [loss]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("step", [functional, forward_mode, traced, watched])
def test_other_worlds(step):
    compare(step, tied=(False,))


def test_autocast_around_the_head_or_the_loss_only():
    def around_loss(model):
        logits = model(X)
        with torch.autocast("cpu", torch.bfloat16):
            loss = flat_loss(logits, Y)
        loss.backward()
        return [loss]

    def around_head(model):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(X)
        loss = flat_loss(logits.float(), Y)
        loss.backward()
        return [loss]

    compare(around_loss)
    compare(around_head, bound=1e-2)


def test_sums_reach_the_hooks_of_their_parts():
    def step(model):
        hidden = model.hidden(X)
        a, b = model.head(hidden), model.head(hidden * 2)
        both = a + b
        loss = flat_loss(both, Y)
        a.register_hook(lambda gradient: gradient * 5)
        both.register_hook(lambda gradient: gradient * 3)
        loss = loss + flat_loss(b, Y)
        loss.backward()
        return [loss]

    compare(step)


def test_long_chains_of_views_stay_lazy():
    def step(model):
        logits = model(X)
        view = logits.unsqueeze(1).expand(-1, 2, -1, -1).permute(1, 0, 2, 3)[1].transpose(0, 1)[2:9:3].movedim(0, 1)
        last = torch.tensor([-1, 0, 0, -2])
        mask = (Y != -100)[:, 1:]
        loss = F.cross_entropy(view.reshape(-1, VOCABULARY), X[:, 2:9:3].reshape(-1))
        loss = (
            loss + flat_loss(logits[:, last], X[:, last]) + F.cross_entropy(logits[..., :-1, :][mask], Y[:, 1:][mask])
        )
        loss = loss + sum(flat_loss(part, X[:, : part.shape[1]]) for part in logits.tensor_split(3, 1))
        assert not isinstance(view, LazyLogits) or view.shape == (len(X), 3, VOCABULARY)
        (loss / LENGTH).backward()
        return [loss]

    with builds() as built:
        compare(step)
    assert not [each for each in built if each.requires_grad]
