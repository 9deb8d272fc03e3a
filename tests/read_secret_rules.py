"""Read the compiled rules for secrets when this module is imported, for copies of the process (`warm`) that write
snapshots: each would take 0.4 s of processor time for that."""

from pathlib import Path

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.snapshot.secret_check import SecretCheck

SecretCheck(Exclusions(), cache=Path())
