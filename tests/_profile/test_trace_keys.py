"""What was rehearsed, as data: keys that compare, and profiles that keep their traces in JSON."""

from __future__ import annotations

import json

import pytest

from memscale._profile import CHECKPOINT, STREAM, STREAM_OFFLOAD, Profile, TraceKey, Treatment
from memscale.techniques import TREATMENTS
from tests.profiles import Block, full_profile, profile_of, with_tiled_head

KEYS = (
    *(TraceKey(treatment) for treatment in TREATMENTS),
    TraceKey(STREAM_OFFLOAD, num_tiles=4, precision="bfloat16"),
    TraceKey(head_rows=256, streams_rest=True, precision="float16"),
)


def test_profiles_keep_their_traces_in_json() -> None:
    blocks = {"a": Block(), "b": Block(keeps=70)}
    profile = with_tiled_head(full_profile(blocks), blocks, {64: 10, 128: 20})
    trace = profile.variants[TraceKey(CHECKPOINT)]
    profile.variants.update({key: trace for key in KEYS if key not in profile.variants})
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert again.to_json() == profile.to_json()


def test_the_bytes_of_a_profile_do_not_depend_on_the_order_of_its_traces() -> None:
    texts = {profile_of(2, variants=order).to_json() for order in ((CHECKPOINT, STREAM), (STREAM, CHECKPOINT))}
    assert len(texts) == 1


def test_a_profile_without_traces_comes_back() -> None:
    profile = profile_of(2, variants=())
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("key", ["checkpoint", {"type": "TraceKey", "precision": "float8"}, {"type": "Treatment"}])
def test_what_is_no_key_is_refused(key: object) -> None:
    data = json.loads(profile_of(2, variants=(CHECKPOINT,)).to_json())
    data["variants"][0][0] = key
    with pytest.raises(ValueError, match=r"TraceKey|float8"):
        Profile.from_json(json.dumps(data))
    data["variants"] = {"checkpoint": data["variants"][0][1]}
    with pytest.raises(ValueError, match="list"):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_streamed_block_is_recomputed(recompute) -> None:
    with pytest.raises(ValueError, match="recomputed in full"):
        Treatment(recompute, streams=True)


def test_keys_that_differ_in_the_size_of_tiles_alone() -> None:
    for key in KEYS:
        assert key.with_tile_size(key.tile_size) == key
    head, inside = TraceKey(head_rows=256, streams_rest=True), TraceKey(CHECKPOINT, num_tiles=4)
    assert head.with_tile_size(8) == TraceKey(head_rows=8, streams_rest=True)
    assert inside.with_tile_size(8) == TraceKey(CHECKPOINT, num_tiles=8)
    assert head.of_any_size == head.with_tile_size(512).of_any_size != inside.of_any_size
    assert TraceKey(CHECKPOINT).of_any_size == TraceKey(CHECKPOINT) != inside.of_any_size
