"""The error of this job: a problem that its user can correct."""


class JobError(Exception):
    """One line with the problem and its correction. `train.py` prints it and exits with code 1."""
