from __future__ import annotations

from math import inf

import pytest

from bootseer.checkpoint.reading.settings import ReadingSettings, chunk_to_replace, chunk_to_skip, is_late


@pytest.mark.parametrize(
    ("delays", "wanted", "parity_s", "expected"),
    [
        ({0: 0.0, 1: 0.0, 2: 0.0}, {0, 1, 2}, 0.0, None),
        ({0: 0.1, 1: 0.5, 2: 0.1}, {0, 1, 2}, 0.1, 1),
        ({0: 0.1, 1: 0.12, 2: 0.1}, {0, 1, 2}, 0.1, None),  # not worth the computation
        ({0: 0.1, 1: 0.5, 2: 0.1}, {0, 1, 2}, 0.5, None),  # parity would be as late
        ({0: 0.1, 1: 0.5, 2: 0.1}, {1}, 0.1, 1),  # much later than all others together
        ({0: 0.4, 1: 0.5, 2: 0.1}, {1}, 0.1, None),  # the others would have to be read, and are late as well
        ({0: inf, 1: 0.0, 2: 0.0}, {1, 2}, 0.0, None),  # the late one is not requested
        ({0: inf, 1: inf, 2: 0.0}, {0, 1, 2}, 0.0, 0),  # parity replaces one
        ({7: inf}, {7}, 0.0, 7),  # a row of one chunk: parity is its copy
    ],
)
def test_parity_is_read_for_the_latest_chunk_if_that_is_faster(delays, wanted, parity_s, expected):
    assert chunk_to_skip(delays, frozenset(wanted), parity_s) == expected


@pytest.mark.parametrize(
    ("left", "others_s", "parity_s", "alone", "expected"),
    [
        ({}, 0.0, 0.0, False, None),
        ({0: 0.0, 1: 0.0}, 0.0, 0.0, False, None),  # nothing is known
        ({0: 0.1, 1: 2.0, 2: 0.1}, 0.0, 0.1, False, 1),
        ({0: 0.1, 1: 0.2, 2: 0.1}, 0.0, 0.1, False, None),  # it arrives soon anyway
        ({0: 0.1, 1: 2.0, 2: 0.1}, 0.0, 1.5, False, None),  # parity is not earlier
        ({0: 1.9, 1: 2.0, 2: 0.1}, 0.0, 0.1, False, None),  # the other one is needed, too
        ({1: 2.0}, 1.9, 0.1, False, None),  # ... or one that was not requested yet
        ({1: 0.5}, 0.1, 0.1, False, 1),
        ({1: 0.5}, 0.1, 0.1, True, 1),
        ({1: 0.4}, 0.1, 0.1, True, None),  # not worth reading others for it
        ({1: inf}, 0.1, 0.1, True, 1),
        ({1: inf}, 0.1, inf, True, None),
        ({0: inf, 1: inf}, 0.0, 0.0, False, None),  # parity replaces only one
    ],
)
def test_a_requested_chunk_is_cancelled_if_parity_is_faster(left, others_s, parity_s, alone, expected):
    assert chunk_to_replace(left, others_s, parity_s, alone=alone) == expected


@pytest.mark.parametrize(
    ("waited_s", "expected_s", "expected"),
    [(0.2, 0.0, False), (0.3, 0.0, True), (0.9, 0.5, False), (1.0, 0.5, True), (0.2, inf, False), (0.3, inf, True)],
)
def test_a_read_that_takes_twice_as_long_as_expected_is_late(waited_s, expected_s, expected):
    assert is_late(waited_s, expected_s, ReadingSettings(late_s=0.3, late_factor=2.0)) == expected
