"""The paper's seven buckets of job size, and its medians to compare with.

Source of the medians: box plot on the first author's public project page of BootSeer (arXiv 2507.12619), digitised,
about ±3 s. Decides and touches nothing.
"""

from __future__ import annotations

# (upper bound in GPUs, inclusive; name; the paper's median startup overhead in seconds)
_BUCKETS: tuple[tuple[float, str, float], ...] = (
    (10, "1-10", 44),
    (100, "10-100", 127),
    (500, "100-500", 334),
    (1000, "500-1000", 314),
    (2000, "1000-2000", 409),
    (3000, "2000-3000", 431),
    (float("inf"), ">3000", 501),
)


def bucket(num_gpus: int | None) -> str:
    """Name of the bucket, empty when the number of GPUs is unknown or 0."""
    if not num_gpus:
        return ""
    return next(name for limit, name, _ in _BUCKETS if num_gpus <= limit)


def paper_median_s(name: str) -> float | None:
    """The paper's median startup overhead for a bucket, seconds."""
    return next((median for _, bucket_name, median in _BUCKETS if bucket_name == name), None)
