"""Run by each Python child of `bootseer run` before its program, because this folder is first in PYTHONPATH.

It does nothing until the program imports a module that the hook watches (`bootseer.hook.watch`) or ends with an
exception (`bootseer.hook.import_errors`), which costs other programs well under a millisecond. It must work in an
interpreter without BootSeer, and be valid Python 3.6, which system tools still use: hence no `__future__` import. The
package that contains this file is made importable as `bootseer`, unless the environment has one. Afterwards the
sitecustomize that this one hides is run. A failure here may cost the trace, but never the program.
"""

import sys

TRIGGERS = ("torch", "jax", "safetensors")
"""Top-level packages of `hook.marks.after_import_of`, without those that themselves import one of these."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _watch_imports() -> None:
    import atexit
    import os
    import time

    if not os.environ.get("BOOTSEER_TRACE") or os.environ.get("BOOTSEER_HOOK") == "0" or sys.version_info < (3, 11):
        return
    started_ns, stat = time.monotonic_ns(), b""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = tuple(sys.path)
    warm = os.environ.get("BOOTSEER_WARM", "")

    class Finder:
        """First on the meta path, until the first import of a framework: then it starts `bootseer.hook.watch`."""

        @classmethod
        def find_spec(cls, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
            if name == "bootseer":  # by the program itself, for stages of its own
                Package.install()
                return Package.find_spec(name) if sys.meta_path[0] is Package else None
            if name not in TRIGGERS:
                return None
            try:
                sys.meta_path.remove(cls)  # raises if another thread was first and has started the watch
                Package.install()
                from bootseer.hook import watch

                _call(watch.start, started_ns, warm, paths, stat)
                return watch.find_spec(name, path, target)
            except Exception:
                return None

    class Package:
        """Last on the meta path: finds this file's `bootseer` if the environment has none. First on it if there is just
        a folder of this name, such as one beside the program, which Python would take for a package."""

        begin: "Any" = None
        """In a warm parent: starts marking in a copy of it."""

        @classmethod
        def install(cls) -> None:
            if cls not in sys.meta_path:
                from importlib.machinery import PathFinder

                found = PathFinder.find_spec("bootseer")
                is_folder = found is not None and found.origin is None
                sys.meta_path.insert(0 if is_folder else len(sys.meta_path), cls)

        @staticmethod
        def find_spec(name: str, path: "Any" = None, target: "Any" = None) -> "Any":
            if name != "bootseer":
                return None
            from importlib.util import spec_from_file_location

            init = os.path.join(package, "__init__.py")
            return spec_from_file_location(name, init, submodule_search_locations=[package])

    def at_exit() -> None:
        """Report an import error that ended the program: only such an exception is in `sys.last_value` at exit."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception):
            try:
                Package.install()
                from bootseer.hook import import_errors

                # In version 0.2, which images still contain, it is `tell`.
                _call(vars(import_errors).get("report") or vars(import_errors)["tell"], error)
            except Exception:
                pass

    def begin(now_ns: int) -> None:
        """Start marking this process: at once in a copy of a warm parent, which has imported the frameworks already."""
        nonlocal started_ns, stat, warm
        # Now, before the program has children of its own. A restored warm parent's folder was that of another run.
        started_ns, stat, warm = now_ns, _read_stat(), os.environ.get("BOOTSEER_WARM", "")
        atexit.register(at_exit)
        if any(name in sys.modules for name in TRIGGERS):
            from bootseer.hook import watch

            _call(watch.start, started_ns, warm, paths, stat)
        else:
            sys.meta_path.insert(0, Finder)
        if os.environ.get("BOOTSEER_IMPORTS") == "1" and os.environ.get("LOCAL_RANK", "0") == "0":
            Package.install()
            from bootseer.hook import imports

            imports.start()
        # Not a rank: it may have the launcher's program, or start one once, and each would import all modules again.
        if warm and not os.environ.get("LOCAL_RANK") and is_launcher():
            Package.install()
            from bootseer.hook import warm_launcher

            warm_launcher.start(warm)

    def is_launcher() -> bool:
        """Whether this program is recorded as a launcher: a text search, because parsing would delay all programs."""
        try:
            with open(os.path.join(warm, "warm.json"), encoding="utf-8") as file:
                text = file.read()
        except OSError:
            return False
        names = (os.path.basename(word) for word in sys.orig_argv[1:5] if not word.startswith("-"))
        return any(f'{name}": {{' in text for name in names)

    if any(word == os.path.join(package, "hook", "warm_parent.py") for word in sys.orig_argv[1:4]):
        Package.install()
        Package.begin = begin
    else:
        begin(started_ns)


def _call(function: "Any", *given: "Any") -> None:
    """Call a function of the environment's BootSeer, which may be an earlier one with fewer parameters."""
    function(*given[: function.__code__.co_argcount])


def _read_stat() -> bytes:
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _run_next_sitecustomize() -> None:
    """Import the sitecustomize that this one hides. Its errors are raised, for `site` to report."""
    here = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


try:
    _watch_imports()
except Exception:  # never fail the program
    pass
_run_next_sitecustomize()
