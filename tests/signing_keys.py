"""Keys for signatures in tests, created like users do.

key = make_key(tmp_path / "key.pem")
trust(tmp_path / "trusted.pem", key)
"""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_key(path: Path, algorithm: str = "ed25519") -> Path:
    """Create a private key, and its public key with the suffix `.pub` in the same folder."""
    command = ["openssl", "genpkey", "-algorithm", algorithm, "-out", path]
    subprocess.run(command, check=True, capture_output=True, umask=0o077)
    subprocess.run(["openssl", "pkey", "-in", path, "-pubout", "-out", path.with_suffix(".pub")], check=True)
    return path


def trust(path: Path, *keys: Path) -> str:
    """Write a file of trusted keys: public keys with comments between them."""
    path.write_text("".join(f"# {key.name}\n{key.with_suffix('.pub').read_text()}" for key in keys))
    return str(path)
