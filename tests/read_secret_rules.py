"""Loads the compiled rules for secrets when it is imported, for forks of the process (`warm`) that write snapshots:
otherwise each would take 0.4 s of processor time for that."""

from pathlib import Path

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.snapshot.secret_check import SecretCheck

SecretCheck(Exclusions(), cache=Path())
