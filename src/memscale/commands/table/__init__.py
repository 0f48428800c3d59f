"""`memscale table`: the largest model of each family that trains on common cards, in full and with LoRA. Predicted.

    log = Log.load(path)                           # what was planned before
    for log in plan_all(log, stairs_of(...)): log.save(path)
    page.markdown(log)

Each question ("does this model train on that card?") is planned as `memscale plan` does and kept in a log, so that a
table that was stopped goes on where it was. The cards of one model are asked about in a row: what single techniques do
to its step was tried for the first of them and is known for the others.

NOTE [stairs]: what does not fit a card fits no smaller one, and neither does a larger model of its family. So a family
is asked about like a walk down stairs, from its largest model on the largest card: after a "no" the next smaller model
is next, after a "yes" the next smaller card. Each cell of the table ends with a plan of its own, and no more plans are
made than there are cards and models of the family together, instead of their product.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from memscale import _json, zoo
from memscale._config import Config
from memscale._errors import MemScaleError, shortened
from memscale._hardware import Hardware

if TYPE_CHECKING:
    from torch import nn

    from memscale._plan import Plan
    from memscale._planning.planner import Planner

Kind = Literal["full", "lora"]
KINDS: tuple[Kind, ...] = ("full", "lora")
CARDS = {8: "RTX 3070", 10: "RTX 3080", 12: "RTX 3060", 16: "RTX 4080", 24: "RTX 3090", 48: "RTX A6000"}
"""Cards by their memory, in the GiB that their boxes say."""
FAMILIES = {
    "GPT-2": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "Llama": ("tinyllama-1.1b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-3-8b", "llama-2-13b"),
    "Qwen": ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"),
    "Gemma": ("gemma-2b", "gemma-2-2b"),
    "ViT": ("vit-tiny", "vit-small", "vit-base", "vit-large", "vit-huge"),
    "SDXL": ("sdxl-unet",),
    "FLUX": ("flux.1-dev-transformer",),
}
"""The smallest first. Of diffusion models the network that is trained; text encoders and VAE are not beside it."""
NUM_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-2-13b": 13_015_864_320,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
    "sdxl-unet": 2_567_463_684,
    "flux.1-dev-transformer": 11_901_408_320,
}
"""The parameters of the zoo's models, counted: a rule of thumb needs nothing else."""
RANK = 16
HOST_GB = 64.0
BYTES_A_PARAMETER = {"full": 16, "lora": 2}
"""What a parameter takes without MemScale: fp32 weight, gradient and two moments of AdamW; a frozen weight in bf16."""
ACTIVATIONS_SHARE = 0.2
"""What the rule of thumb leaves of a card for activations and everything else."""
LEAST_BYTES_A_PARAMETER = {"full": 12, "lora": 2}
"""What must be somewhere at every time: weight and moments, however gradients come and go; a frozen weight."""
IMAGES = ("ViT", "SDXL", "FLUX")
"""Families that take no sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Does this model train on this card?"""

    card: str
    model: str
    kind: Kind

    @property
    def family(self) -> str:
        return next(name for name, models in FAMILIES.items() if self.model in models)

    @property
    def batch(self) -> int:
        return 16 if self.family == "ViT" else 1

    @property
    def seq(self) -> int | None:
        """The length of sequences; None: images."""
        return None if self.family in IMAGES else 1024

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.seq}" if self.seq is not None else f"{self.batch} images"

    @property
    def size(self) -> int:
        """The card's memory in GiB."""
        return next(size for size, name in CARDS.items() if name == self.card)

    def cannot_fit(self, host_gb: float) -> bool:
        """Whether weights and optimizer state alone are more than card and host together have."""
        least_bytes = NUM_PARAMETERS[self.model] * LEAST_BYTES_A_PARAMETER[self.kind]
        return least_bytes > self.size * 2**30 + host_gb * 1e9

    def command(self, host_gb: float) -> str:
        """What gives this very plan."""
        seq = "" if self.seq is None else f" --seq {self.seq}"
        lora = f" --lora {RANK}" if self.kind == "lora" else ""
        card = f'--gpu "{self.card}" --host {host_gb:g}'
        return f"memscale plan {self.model} --batch {self.batch}{seq}{lora} {card} --mode balanced"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What planning said."""

    question: Question
    num_parameters: int
    fits: bool
    total_bytes: int | None = None
    """The bytes on the card, with its context."""
    host_bytes: int | None = None
    step_ms: float | None = None
    slowdown: float | None = None
    what: str = ""
    """What the plan does; "nothing" where the model fits as it is."""
    planning_s: float = 0.0
    error: str = ""
    """Why there is no answer."""
    version: str = ""
    """The version of MemScale that planned it; "": that of the log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """All answers so far."""

    host_gb: float = HOST_GB
    version: str = ""
    answers: tuple[Answer, ...] = ()

    def answer(self, question: Question) -> Answer | None:
        return next((each for each in self.answers if each.question == question), None)

    def with_answer(self, answer: Answer) -> Log:
        others = tuple(each for each in self.answers if each.question != answer.question)
        return dataclasses.replace(self, answers=(*others, answer))

    def save(self, path: pathlib.Path) -> None:
        _json.save(self, path)

    @classmethod
    def load(cls, path: pathlib.Path) -> Log:
        """What `save` wrote; `MemScaleError` says why a file is none."""
        return _json.load(cls, path, "a log of memscale table")


@dataclasses.dataclass(frozen=True, slots=True)
class Stairs:
    """One family, trained in one way, on some cards. See NOTE [stairs]."""

    family: str
    kind: Kind
    sizes: tuple[int, ...] = tuple(CARDS)

    def next_question(self, log: Log) -> Question | None:
        """What is to be planned next; None: every cell has its answer."""
        models = list(FAMILIES[self.family])
        for size in sorted(self.sizes, reverse=True):
            while models:
                question = Question(CARDS[size], models[-1], self.kind)
                if not question.cannot_fit(log.host_gb):
                    answer = log.answer(question)
                    if answer is None:
                        return question
                    if answer.fits:
                        break
                models.pop()
        return None


def stairs_of(sizes: Iterable[int], families: Iterable[str], kinds: Iterable[Kind] = KINDS) -> list[Stairs]:
    """These parts of the table."""
    sizes, kinds = tuple(sizes), tuple(kinds)
    return [Stairs(family, kind, sizes) for family in families for kind in kinds]


def fits(log: Log, question: Question) -> bool | None:
    """Whether the model trains on the card, as far as the log says or it follows from that; None: not known.

    It fits if the same or a larger model of its family fits the same or a smaller card, and the other way round.
    """
    if question.cannot_fit(log.host_gb):
        return False
    models = FAMILIES[question.family]
    place = models.index(question.model)
    for answer in log.answers:
        other = answer.question
        if answer.error or (other.family, other.kind) != (question.family, question.kind):
            continue
        larger_model, larger_card = models.index(other.model) - place, other.size - question.size
        if answer.fits and larger_model >= 0 >= larger_card:
            return True
        if not answer.fits and larger_model <= 0 <= larger_card:
            return False
    return None


def plan_all(log: Log, parts: Iterable[Stairs], say: Callable[[str], None] = lambda _: None) -> Iterator[Log]:
    """The log after each answer."""
    subject = _Subject()
    for stairs in parts:
        while (question := stairs.next_question(log)) is not None:
            kind = "in full" if question.kind == "full" else "with LoRA"
            say(f"{question.model} {kind}, {question.shape}, on {question.card}")
            log = log.with_answer(subject.ask(question, log.host_gb))
            yield log


def ask(question: Question, host_gb: float = HOST_GB) -> Answer:
    """Plan it."""
    return _Subject().ask(question, host_gb)


class _Subject:
    """The model that was asked about last, and what is known of its step."""

    def __init__(self) -> None:
        self._name: tuple[str, Kind] | None = None
        self._planner: Planner | None = None
        self.num_parameters = 0

    def ask(self, question: Question, host_gb: float) -> Answer:
        """Plan it on this card."""
        from memscale._decide.policy import choose_strategy

        start = time.perf_counter()
        hardware = with_host(Hardware.from_name(question.card), host_gb)
        try:
            self._planner = planner = self._planner_on(hardware, question)
            plan = planner.plan(choose_strategy(planner.job.eligible))
        except MemScaleError as error:
            return Answer(question, self.num_parameters, False, error=shortened(str(error)))
        return _answer_of(question, self.num_parameters, plan, time.perf_counter() - start)

    def _planner_on(self, hardware: Hardware, question: Question) -> Planner:
        from memscale._planning.job import Job
        from memscale._planning.planner import Planner

        name = question.model, question.kind
        if self._planner is not None and name == self._name:
            return self._planner.on(hardware)
        self._name, self._planner = name, None  # two models at once would be large
        model, inputs = _build(question)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return Planner(Job(model, Config(enable_logging=False), hardware), inputs)


def with_host(hardware: Hardware, host_gb: float) -> Hardware:
    """The same card in a machine with so much memory."""
    host_bytes = int(host_gb * 1e9)
    return dataclasses.replace(hardware, host_total_bytes=host_bytes, host_available_bytes=host_bytes)


def _answer_of(question: Question, num_parameters: int, plan: Plan, seconds: float) -> Answer:
    import memscale
    from memscale.report.explain import what_is_done

    return Answer(
        question,
        num_parameters,
        plan.fits,
        plan.predicted_total_bytes,
        plan.host_bytes + plan.movable_bytes,
        plan.predicted_step_ms,
        plan.predicted_slowdown,
        what_is_done(plan),
        round(seconds, 1),
        version=memscale.__version__,
    )


def _build(question: Question) -> tuple[nn.Module, Any]:
    """The model on the meta device, and its batch."""
    from memscale._profile.inputs import derive_inputs

    model = zoo.build(question.model)
    inputs = derive_inputs(model, question.batch, question.seq)
    assert inputs is not None, "the zoo's models have inputs"
    return zoo.with_adapters_for(model, inputs, RANK) if question.kind == "lora" else (model, inputs)


def rule_of_thumb(family: str, kind: Kind, size: int) -> str | None:
    """The largest model of the family for a card of so many GiB, by the usual rule; None: not even the smallest."""
    room_bytes = size * 2**30 * (1 - ACTIVATIONS_SHARE)
    fitting = [name for name in FAMILIES[family] if NUM_PARAMETERS[name] * BYTES_A_PARAMETER[kind] <= room_bytes]
    return fitting[-1] if fitting else None
