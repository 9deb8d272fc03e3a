"""Record how long ranks take to connect: each store connection, process groups, and causes of delay.

PyTorch's TCPStore makes a reverse DNS lookup of each address, for a log line. After a slow connection, one such lookup
is timed in a thread, so that the report can say whether DNS was the reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bootseer.hook.state import State, active, guarded
from bootseer.hook.wrap import replace, replace_decorated
from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import Tracer

_SLOW_S = 1.0
_MAX_GROUPS = 100
"""Recorded one by one; an event's attributes have 1,024 characters."""
_MAX_NAME = 40


def _timed(note: Callable[[tuple[Any, ...], Mapping[str, Any], float], object]) -> Callable[..., Any]:
    """Makes wrappers that call `note` with the arguments and the seconds of each call that succeeded."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            result = original(*args, **kwargs)
            note(args, kwargs, time.monotonic() - began_s)
            return result

        return timed

    return make


def mark_stores(module: ModuleType) -> None:
    """Record each connection by the `TCPStore` of this module."""
    replace(module, "TCPStore", _timed(_note_store))


@guarded
def _note_store(args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float) -> None:
    state = active()
    if state is None:
        return
    given = {**dict(zip(("host_name", "port", "world_size", "is_master"), args, strict=False)), **kwargs}
    facts = {"seconds": round(seconds, 3), "serves": bool(given.get("is_master"))}
    state.tracer.emit("store_connected", INSTANT, attrs=facts)
    if seconds > _SLOW_S:
        work = functools.partial(_time_reverse_dns, state.tracer, str(given.get("host_name", "")))
        threading.Thread(target=work, name="bootseer-name", daemon=True).start()


def _time_reverse_dns(tracer: Tracer, host: str) -> None:
    with contextlib.suppress(Exception):
        address = socket.gethostbyname(host)
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # "no such name" is timed, too
            socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)
        tracer.emit("reverse_dns", INSTANT, attrs={"seconds": round(time.monotonic() - began_s, 3), "address": address})


def mark_groups(c10d: ModuleType) -> None:
    """Record how long each process group after the first takes.

    They are not stages, because a rank that waits for another one would count as slow. They are not barriers, because
    it depends on the backend whether the ranks wait for each other.
    """
    for name in ("new_group", "split_group"):
        replace_decorated(getattr(c10d, name, None), _timed(functools.partial(_note_group, c10d)))


@guarded
def _note_group(c10d: ModuleType, args: tuple[Any, ...], kwargs: Mapping[str, Any], took_s: float) -> None:
    state = active()
    if state is not None and state.groups is not None:
        name = str(kwargs.get("group_desc") or "").replace("\n", " ")[:_MAX_NAME]
        state.groups.append((name, took_s, _num_keys(c10d, state) if len(state.groups) < _MAX_GROUPS else 0))


def _num_keys(c10d: ModuleType, state: State) -> int:
    """Keys in the store, for rank 0 only; 0 if unknown."""
    if state.tracer.identity.rank == 0:
        with contextlib.suppress(Exception):
            return int(c10d._get_default_store().num_keys())
    return 0


@guarded
def ranks_connected(c10d: ModuleType) -> None:
    """Called after the first collective: write what is known of the connections."""
    state = active()
    if state is None or state.groups is None:
        return
    groups, state.groups = state.groups, None
    facts: dict[str, Any] = {"groups": len(groups), "groups_s": round(sum(took_s for _, took_s, _ in groups), 3)}
    if groups:
        facts["group_ms"] = " ".join(str(round(1000 * took_s)) for _, took_s, _ in groups[:_MAX_GROUPS])
    if state.tracer.identity.rank == 0:
        if groups:
            facts["group_names"] = "\n".join(name for name, _, _ in groups[:_MAX_GROUPS])
            facts["group_keys"] = " ".join(str(keys) for _, _, keys in groups[:_MAX_GROUPS])
        facts["libuv"] = os.environ.get("USE_LIBUV", "1") != "0"
        facts["open_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with contextlib.suppress(Exception), open("/proc/sys/net/core/somaxconn", "rb") as file:
            facts["somaxconn"] = int(file.read())
        facts["keys"] = _num_keys(c10d, state)
        with contextlib.suppress(Exception):
            if "nccl" in str(c10d.get_backend()):
                facts["nccl"] = ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
    state.tracer.emit("ranks_connected", INSTANT, attrs=facts)
