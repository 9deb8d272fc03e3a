"""What a layer asks of the layers below it, and the record of what it asked.

A layer that asks nothing is the same under every image and is converted once. One that does is converted once for each
set of answers: the questions are kept with the layer, and the answers are part of the name of the result.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Sequence

from bootseer.erofs.format import Attributes
from bootseer.image.merged import MergedTree, Node

Path = tuple[bytes, ...]


class LowerFile:
    """A file that lower layers show."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.mode = node.inode.mode
        self.is_directory = node.is_directory

    def attributes(self) -> Attributes:
        """Without the marks of overlayfs."""
        return self._node.attributes()

    def target(self) -> bytes:
        """Of a symbolic link."""
        return self._node.target()

    def content(self) -> Iterator[bytes]:
        """Of a regular file."""
        return self._node.content()

    def answer(self) -> str:
        """Everything that a layer may take over from this file, as a short text."""
        if not self.is_directory and not stat.S_ISLNK(self.mode):
            return f"file {self._node.identity}"  # its content counts, too
        found = self.attributes()
        facts = [found.mode, found.uid, found.gid, found.mtime_ns, *found.rdev]
        xattrs = [[name.hex(), found.xattrs[name].hex()] for name in sorted(found.xattrs)]
        target = "" if self.is_directory else self.target().hex()
        return json.dumps([facts, xattrs, target])


class Lower:
    """The layers below one layer. Not safe for several threads."""

    def __init__(self, tree: MergedTree) -> None:
        self._tree = tree
        self.asked: dict[Path, str] = {}
        """Every question with its answer; empty for nothing there."""

    def lookup(self, path: Path) -> LowerFile | None:
        """The file at a path without symbolic links."""
        node = self._tree.lookup(path)
        found = LowerFile(node) if node is not None else None
        self.asked[path] = found.answer() if found is not None else ""
        return found


def ask(lower: Lower, questions: Sequence[Path]) -> str:
    """A digest of the questions and of the answers to them."""
    for path in questions:
        lower.lookup(path)
    rows = [[[name.hex() for name in path], lower.asked[path]] for path in sorted(questions)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
