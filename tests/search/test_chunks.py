"""What equal chunks make of the order of layers, against every legal split."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from toys import legal_counts

from planner.schedule.orders import placement
from planner.search.chunks import fewest_of_kinds
from planner.specs.model import LayerKind

DENSE, MOE, CHUNKED = LayerKind("full", "dense"), LayerKind("full", "moe"), LayerKind("chunked", "dense")
MODELS = {
    "experts after dense layers": (DENSE,) * 3 + (MOE,) * 10,
    "every second": (DENSE, MOE) * 6,
    "three kinds": (CHUNKED, MOE, CHUNKED, DENSE) * 3,
    "no pattern": (MOE, DENSE, DENSE, MOE, MOE, MOE, DENSE, CHUNKED, MOE, DENSE, DENSE),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_a_rank_never_holds_fewer_of_a_kind(name: str, schedule: str) -> None:
    layers, some = MODELS[name], False
    kinds = list(dict.fromkeys(layers))
    for pp, vpp, empty_ends in product((2, 3, 4), (2,) if schedule == "zb-v" else (2, 3, 4), (False, True)):
        ranks = placement(schedule, pp, vpp)
        found = []
        for counts in legal_counts(len(layers), pp, vpp, empty_ends):
            ends = np.cumsum([0, *counts])
            held = [[layers[a:b].count(kind) for a, b in pairwise(ends)] for kind in kinds]
            found.append([[sum(np.array(row)[np.array(ranks) == rank]) for rank in range(pp)] for row in held])
        fewest = fewest_of_kinds(layers, ranks, empty_ends)
        assert fewest.shape == (len(kinds), pp)
        if found:
            np.testing.assert_array_equal(fewest, np.min(found, axis=0))
            some = some or bool(fewest.any())
        else:
            assert not fewest.any()
    assert some
