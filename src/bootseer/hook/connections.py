"""Tell what connecting the ranks costs: each store that a process connects to, process groups, and what slows them.

PyTorch's TCPStore asks for the name of each address, for a log line. Where connecting took long, one such question is
timed in a thread, behind the wait, so that the report can say whether names were the reason.
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

from bootseer.hook.state import STAGE, active, guarded, keep_undo
from bootseer.hook.wrap import replace, replace_decorated
from bootseer.trace.event import BEGIN, END, INSTANT, OK
from bootseer.trace.tracer import Tracer

_SLOW_S = 1.0
_LONG_GROUP_S = 0.1
_MAX_GROUPS = 64
"""Of the groups that take long, so many are told one by one."""
_MAKERS = ("new_group", "split_group")


def mark_stores(module: ModuleType) -> None:
    """A module of PyTorch that connects to stores: `TCPStore` there is told of."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(*args: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            store = original(*args, **kwargs)
            _connected(args, kwargs, time.monotonic() - began_s)
            return store

        return connect

    keep_undo(replace(module, "TCPStore", make))


@guarded
def _connected(args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float) -> None:
    state = active()
    if state is None:
        return
    given = {**dict(zip(("host_name", "port", "world_size", "is_master"), args, strict=False)), **kwargs}
    facts = {"seconds": round(seconds, 3), "serves": bool(given.get("is_master"))}
    state.tracer.emit("store_connected", INSTANT, attrs=facts)
    if seconds > _SLOW_S:
        work = functools.partial(_time_name, state.tracer, str(given.get("host_name", "")))
        threading.Thread(target=work, name="bootseer-name", daemon=True).start()


def _time_name(tracer: Tracer, host: str) -> None:
    with contextlib.suppress(Exception):
        address = socket.gethostbyname(host)
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # that there is no name is an answer
            socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)
        tracer.emit("reverse_dns", INSTANT, attrs={"seconds": round(time.monotonic() - began_s, 3), "address": address})


def mark_groups(c10d: ModuleType) -> None:
    """Groups behind the first are counted; those that take long are stages."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.monotonic_ns()
            group = original(*args, **kwargs)
            _group_made(group, kwargs, began_ns)
            return group

        return new_group

    for name in _MAKERS:
        keep_undo(replace_decorated(getattr(c10d, name, None), make))


@guarded
def _group_made(group: Any, kwargs: Mapping[str, Any], began_ns: int) -> None:
    state = active()
    if state is None:
        return
    took_s = (time.monotonic_ns() - began_ns) / 1e9
    state.groups += 1
    state.groups_s += took_s
    if took_s >= _LONG_GROUP_S and state.groups <= _MAX_GROUPS:
        size = getattr(group, "size", None)
        facts = {"number": state.groups, "group": str(kwargs.get("group_desc") or "")}
        if callable(size):  # what a rank gets of a group that it is not in has none
            facts["ranks"] = int(size())
        span = state.tracer.emit(STAGE + "new_group", BEGIN, mono_ns=began_ns, attrs=facts)
        state.tracer.emit(STAGE + "new_group", END, span=span, outcome=OK)


@guarded
def ranks_connected(c10d: ModuleType) -> None:
    """The first collective is over: what is known of the connections by now."""
    state = active()
    if state is None:
        return
    facts: dict[str, Any] = {"groups": state.groups, "groups_s": round(state.groups_s, 3)}
    if state.tracer.identity.rank == 0:
        facts["libuv"] = os.environ.get("USE_LIBUV", "1") != "0"
        facts["open_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with contextlib.suppress(Exception), open("/proc/sys/net/core/somaxconn", "rb") as file:
            facts["somaxconn"] = int(file.read())
        with contextlib.suppress(Exception):
            facts["keys"] = int(c10d._get_default_store().num_keys())
        with contextlib.suppress(Exception):
            if "nccl" in str(c10d.get_backend()):
                facts["nccl"] = ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
    state.tracer.emit("ranks_connected", INSTANT, attrs=facts)
