"""The one error of this job: something that its user can put right."""


class JobError(Exception):
    """One line: what is wrong, where, and what to do. `train.py` prints it and ends with exit code 1."""
