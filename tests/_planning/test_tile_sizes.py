"""What of a model could be tiled, and how finely."""

from __future__ import annotations

import pytest
import torch

from memscale._plan import TileAttention, TileMlp
from memscale._planning.tile_sizes import MIN_TILE_ROWS, _head_rows, _power_of_two_below, find_tiles
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from tests.models import Mlp, case

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("number", "below"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 4), (1024, 512), (1025, 1024)]
)
def test_powers_of_two(number: int, below: int) -> None:
    assert _power_of_two_below(number) == below


@pytest.mark.parametrize(
    ("num_rows", "suggested", "rows"),
    [
        (8192, 256, (256, 4096)),  # as suggested, where that is not slow
        (8192, 16, (MIN_TILE_ROWS, 4096)),  # not so few that products are slow
        (256, 16, (64, 128)),  # but a quarter of a small batch
        (64, 512, (32,)),  # always smaller than the batch
        (2, 1, (1,)),
    ],
)
def test_rows_of_a_head(num_rows: int, suggested: int, rows: tuple[int, ...]) -> None:
    assert _head_rows(num_rows, suggested) == rows


def test_a_language_model() -> None:
    """Its head; attention and MLP of every block in two tiles, in the order of the model."""
    model = case("gpt2").build()
    tiles = find_tiles(FakeRehearsal(model, Inputs.from_sample(case("gpt2").batch(0)), "cpu"), None)
    assert tiles.head is not None
    assert tiles.head.module_fqn == "lm_head"
    assert tiles.head.rows == tiles.head_rows[0]
    order = [name for name, _ in model.named_modules()]
    places = [order.index(action.module_fqn) for action in tiles.inside]
    assert places == sorted(places)
    assert {type(action) for action in tiles.inside} <= {TileAttention, TileMlp}
    assert {action.num_tiles for action in tiles.inside if isinstance(action, TileMlp)} == {2}
    assert set(tiles.num_inside) <= {2, 4, 8, 16}


def test_a_model_with_nothing_to_tile() -> None:
    tiles = find_tiles(FakeRehearsal(Mlp(), Inputs(args=(torch.empty(4, 16, device="meta"),)), "cpu"), None)
    assert (tiles.head, tiles.head_rows, tiles.inside, tiles.num_inside) == (None, (), (), (2,))
