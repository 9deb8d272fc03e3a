"""Keys for signatures in tests, made as users make them.

key = make_key(tmp_path / "key.pem")
trust(tmp_path / "trusted.pem", key)
"""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_key(path: Path, algorithm: str = "ed25519") -> Path:
    """A private key, and its public half beside it with the suffix `.pub`."""
    command = ["openssl", "genpkey", "-algorithm", algorithm, "-out", path]
    subprocess.run(command, check=True, capture_output=True, umask=0o077)
    subprocess.run(["openssl", "pkey", "-in", path, "-pubout", "-out", path.with_suffix(".pub")], check=True)
    return path


def trust(path: Path, *keys: Path) -> str:
    """A file with the public halves of some keys, and words between them."""
    path.write_text("".join(f"# {key.name}\n{key.with_suffix('.pub').read_text()}" for key in keys))
    return str(path)
