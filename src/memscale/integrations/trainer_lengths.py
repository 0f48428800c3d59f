"""The batches that a Trainer's dataset will give, as far as its lengths can be read without running anybody's code.

When training begins, the trainer has its data loader. Where the lengths of the samples are known (a sampler that groups
by length has them, a column of the dataset, or `input_ids` of a dataset that is in memory), the longest sample, as
often as a batch is large, goes through the trainer's own collator: that is the largest batch that can come. The lengths
of the others say which shorter batches there will be.

Known limits: a dataset that makes its samples when asked, and one that is only iterated over, are not read; a collator
that mixes samples (packing) may make other batches than copies of the longest show.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memscale._torch.moment import Moment

logger = logging.getLogger("memscale")

_IDS = "input_ids"
_MAX_SAMPLES = 1_000_000
"""Larger datasets are not read."""


class Coming(NamedTuple):
    """What a trainer's dataset will give."""

    batch: dict[str, torch.Tensor]
    """The longest batch."""
    lengths: list[int]
    """Those of all batches, in ascending order."""


def batches_of(loader: Any, args: Any, model: nn.Module, *, counts_items: bool | None) -> Coming | None:
    """The batches that will come; None where nothing is known of them, or where all are of one length: then the first
    batch tells.

    `counts_items`: whether the trainer tells the model how many labels a step has; None: by the model's signature.
    """
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    lengths = _lengths_of(dataset, getattr(loader, "sampler", None), getattr(args, "length_column_name", "length"))
    if not lengths or collate is None or min(lengths) == max(lengths):
        return None
    try:
        with _same_random_state():
            longest, shortest = (
                dict(collate([dataset[lengths.index(of)]] * _batch_size(loader, args)))
                for of in (max(lengths), min(lengths))
            )
        most, least = (int(batch[_IDS].shape[1]) for batch in (longest, shortest))
    except Exception as error:  # the collator is the user's, and may want batches of another kind
        logger.debug("the longest batch of the dataset is not known: %s: %s", type(error).__name__, str(error))
        return None
    if least >= most or not all(isinstance(value, torch.Tensor) for value in longest.values()):
        return None  # all are padded to one length
    if "labels" in longest and (_takes_any(model) if counts_items is None else counts_items):
        longest["num_items_in_batch"] = torch.tensor(1)
    return Coming(longest, sorted({min(length, most) for length in lengths} | {most}))


def _batch_size(loader: Any, args: Any) -> int:
    """The trainer may have lowered it (`auto_find_batch_size`)."""
    found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else int(args.train_batch_size)


def _takes_any(model: nn.Module) -> bool:
    """Whether the trainer would pass on what only a loss needs."""
    stated = getattr(model, "accepts_loss_kwargs", None)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters) if stated is None else bool(stated)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Collators draw: what is drawn here is drawn again."""
    moment = Moment(torch.device("cpu"))
    try:
        yield
    finally:
        moment.restore()


def _lengths_of(dataset: Any, sampler: Any, column: str) -> list[int]:
    """The length of each sample, in the order of the dataset; none where they cannot be read cheaply."""
    found: Any = getattr(sampler, "lengths", None)  # it groups by length
    if found is None and isinstance(dataset, list | tuple):
        found = _lengths_of_list(dataset)
    elif found is None and hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):
        found = _lengths_of_table(dataset, column)
    if not isinstance(found, Sequence) or not 0 < len(found) <= _MAX_SAMPLES or len(found) != len(dataset):
        return []
    return [int(length) for length in found] if all(isinstance(each, int) and each > 0 for each in found) else []


def _lengths_of_list(dataset: Sequence[Any]) -> list[int] | None:
    if len(dataset) > _MAX_SAMPLES or not all(isinstance(sample, Mapping) and _IDS in sample for sample in dataset):
        return None
    return [len(sample[_IDS]) for sample in dataset]


def _lengths_of_table(dataset: Any, column: str) -> list[int] | None:
    """The lengths of a `datasets.Dataset`, from its Arrow table: no sample is made."""
    is_transformed = dataset.format["type"] == "custom"
    name = column if column in dataset.column_names else _IDS
    if is_transformed or len(dataset) > _MAX_SAMPLES or name not in dataset.column_names:
        return None
    pyarrow: Any = importlib.import_module("pyarrow")
    compute: Any = importlib.import_module("pyarrow.compute")

    values = dataset.select_columns([name]).with_format("arrow")[:][name]
    try:
        return list((values if name == column else compute.list_value_length(values)).to_pylist())
    except pyarrow.lib.ArrowNotImplementedError:  # it holds no lists
        return None
