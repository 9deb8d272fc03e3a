"""A Kerberos server for tests: MIT's krb5kdc on loopback, with its keys and configuration in one folder.

with Kdc(tmp_path, ["nn/localhost", "alice"]) as kdc:
    os.environ.update(kdc.environment)
    kdc.log_in("alice")
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import hadoop
from bootseer.hdfs.sasl import PROTECTIONS
from registry import free_port

REALM = "EXAMPLE.COM"
_START_S = 60.0
_TOOLS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def kdc_missing() -> str:
    """The reason why Kerberos cannot be started here; "" if it can."""
    gone = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    return f"{', '.join(gone)} not installed (Debian: krb5-kdc krb5-admin-server krb5-user)" if gone else ""


def secured(kdc: Kdc) -> dict[str, str]:
    """Settings of an HDFS that requires Kerberos and offers all protections; its NameNodes are nn/localhost."""
    settings = {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "dfs.permissions.enabled": "true",
        "dfs.block.access.token.enable": "true",
        "dfs.data.transfer.protection": ",".join(PROTECTIONS),
        "dfs.encrypt.data.transfer.cipher.suites": "AES/CTR/NoPadding",
        "hadoop.rpc.protection": ",".join(PROTECTIONS),
        # Hadoop would require TLS for its web pages or ports below 1024, neither of which matters here.
        "ignore.secure.ports.for.testing": "true",
        "dfs.cluster.administrators": "*",
    }
    for server, name in (("namenode", "nn"), ("datanode", "dn"), ("web.authentication", "HTTP")):
        keytab = "dfs.web.authentication.kerberos.keytab" if name == "HTTP" else f"dfs.{server}.keytab.file"
        settings |= {f"dfs.{server}.kerberos.principal": f"{name}/localhost@{REALM}", keytab: str(kdc.keytab)}
    return settings


def write_client_conf(folder: Path, uri: str, protection: str) -> None:
    """Write the configuration of clients of such an HDFS that require this protection."""
    settings = {
        "fs.defaultFS": uri,
        "hadoop.security.authentication": "kerberos",
        "hadoop.rpc.protection": protection,
        "dfs.data.transfer.protection": protection,
        "dfs.namenode.kerberos.principal": f"nn/_HOST@{REALM}",
    }
    hadoop.write_conf(folder, {"hdfs-site.xml": settings})


def java_options(kdc: Kdc) -> str:
    """The value of `JAVA_TOOL_OPTIONS` for Hadoop's servers and tools."""
    return f"-Djava.security.krb5.conf={kdc.conf} --add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED"


class Kdc:
    """A server for a `with` block. The keys of all `principals` are in `keytab`."""

    def __init__(self, folder: Path, principals: Sequence[str]) -> None:
        self.folder = folder / "kdc"
        self.keytab = self.folder / "keytab"
        self.conf = self.folder / "krb5.conf"
        self.environment = {
            "KRB5_CONFIG": str(self.conf),
            "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
            "KRB5CCNAME": f"FILE:{self.folder}/tickets",
        }
        """Environment variables for clients."""
        self._principals = principals
        self._port = free_port()
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Kdc:
        self.folder.mkdir()
        self.conf.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_canonicalize_hostname = false\n"
            f" rdns = false\n udp_preference_limit = 1\n[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{self._port}\n }}\n"
            f"[domain_realm]\n localhost = {REALM}\n"
        )
        (self.folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{self._port}\n kdc_tcp_listen = 127.0.0.1:{self._port}\n"
            f"[realms]\n {REALM} = {{\n"
            f"  database_name = {self.folder}/principal\n  key_stash_file = {self.folder}/stash\n }}\n"
            f"[logging]\n kdc = FILE:{self.folder}/kdc.log\n"
        )
        self._run("kdb5_util", "create", "-s", "-P", "secret", "-r", REALM)
        for name in self._principals:
            self.rekey(name, self.keytab)
        self.start()
        return self

    def start(self) -> None:
        """Start the server, the first time or after `kill`."""
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(["krb5kdc", "-n"], stdout=log, stderr=log, env=self._environment())
        until = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > until or self._server.poll() is not None:
                    self.kill()
                    raise
            time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the server with SIGKILL; existing tickets are kept."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def log_in(self, name: str, *, lifetime: str = "1d") -> None:
        """Get a ticket (`kinit`)."""
        self._run("kinit", "-l", lifetime, "-k", "-t", str(self.keytab), name)

    def rekey(self, name: str, keytab: Path) -> None:
        """Give a new key to a principal, which is created if needed: earlier keytabs become invalid."""
        self._run("kadmin.local", "-q", f"addprinc -randkey {name}")
        self._run("kadmin.local", "-q", f"ktadd -k {keytab} {name}")

    def _run(self, *words: str) -> None:
        subprocess.run(words, env=self._environment(), capture_output=True, check=True, timeout=_START_S)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "PATH": _PATH}
