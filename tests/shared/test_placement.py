"""Placements: what the ranks of named axes hold of a parameter, which of them counts it, and where its gradients are partial."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.placement import DENSE, Partial, Placement, Replicate, Shard, counts, local_part, resolved
from trainer.shared.parallel.shards import vocabulary_rows

DEGREES = st.fixed_dictionaries({"tensor": st.integers(1, 5), "expert": st.integers(1, 4)})
PLACES = st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()])
PLACEMENTS = st.fixed_dictionaries({"tensor": PLACES, "expert": PLACES}).filter(lambda p: p["tensor"] != p["expert"] or not cuts(p))


def cuts(placement: Placement) -> list[str]:
    return [axis for axis, place in placement.items() if isinstance(place, Shard)]


@given(st.tuples(*[st.integers(1, 7)] * 3), DEGREES, PLACEMENTS)
def test_the_ranks_that_count_hold_every_element_once(shape: tuple[int, ...], degrees: dict[str, int], placement: Placement) -> None:
    """Along any number of axes; a rank's box fits into its local tensor, which is as large on every rank."""
    held, shapes = [], set()
    for place in itertools.product(*map(range, degrees.values())):
        at = dict(zip(degrees, place))
        box, local = local_part(shape, placement, degrees, at)
        shapes.add(local)
        assert all(stop - start <= n for (start, stop), n in zip(box, local))
        if counts(placement, at):
            held += itertools.product(*(range(start, stop) for start, stop in box))
    assert sorted(held) == list(itertools.product(*map(range, shape)))
    assert len(shapes) == 1


def test_parts_of_a_vocabulary_are_padded_to_whole_tiles() -> None:
    box, local = local_part((50257, 8), {"tensor": Shard(0, tiles=True)}, {"tensor": 4}, {"tensor": 3})
    width = vocabulary_rows(50257, 4)
    assert box == ((3 * width, 50257), (0, 8)) and local == (width, 8)
    assert width % 128 == 0 and width > math.ceil(50257 / 4)


def test_what_is_repeated_where_a_sequence_is_shared_has_partial_gradients() -> None:
    degrees = {"tensor": 2, "tied": 1}
    assert resolved({}, degrees, ["tensor"]) == DENSE | {"tensor": Partial()}
    assert resolved({}, degrees, []) == DENSE
    assert resolved({"tensor": Shard(1)}, degrees, ["tensor"]) == DENSE | {"tensor": Shard(1)}
    assert resolved({"tied": Partial()}, degrees, [])["tied"] == Replicate(), "a single rank has the sum"
    assert resolved({"tied": Partial()}, degrees | {"tied": 2}, [])["tied"] == Partial()


def test_an_axis_that_does_not_concern_a_parameter_does_not_keep_it_from_counting() -> None:
    at = {"tensor": 0, "tied": 1}
    assert counts(DENSE, at) and not counts({**DENSE, "tied": Partial()}, at)
