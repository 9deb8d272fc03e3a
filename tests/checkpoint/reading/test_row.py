from __future__ import annotations

import pytest

from bootseer.checkpoint.reading.row import skipped


@pytest.mark.parametrize(
    ("delays", "wanted", "parity_s", "expected"),
    [
        ({0: 0.0, 1: 0.0, 2: 0.0}, {0, 1, 2}, 0.0, None),
        ({0: 0.1, 1: 0.5, 2: 0.1}, {0, 1, 2}, 0.1, 1),
        ({0: 0.1, 1: 0.12, 2: 0.1}, {0, 1, 2}, 0.1, None),  # not worth the computing
        ({0: 0.1, 1: 0.5, 2: 0.1}, {0, 1, 2}, 0.5, None),  # parity would come as late
        ({0: 0.1, 1: 0.5, 2: 0.1}, {1}, 0.1, 1),  # much later than all others together
        ({0: 0.4, 1: 0.5, 2: 0.1}, {1}, 0.1, None),  # the others would have to be read, and are late as well
        ({0: 60.0, 1: 0.0, 2: 0.0}, {1, 2}, 0.0, None),  # nobody wants the one that is late
        ({0: 60.0, 1: 60.0, 2: 0.0}, {0, 1, 2}, 0.0, 0),  # one can be helped
        ({7: 60.0}, {7}, 0.0, 7),  # a row of one chunk: parity is its copy
    ],
)
def test_parity_is_read_for_the_chunk_that_comes_last_where_that_pays(delays, wanted, parity_s, expected):
    assert skipped(delays, frozenset(wanted), parity_s) == expected
