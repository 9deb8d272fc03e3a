"""One request to one DataNode: pieces of a block that follow each other.

Made and changed by `schedule`, under its lock; carried out by `serving`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bootseer.hdfs.pieces import Piece, State

if TYPE_CHECKING:
    from bootseer.hdfs.lines import Line


class Stoppable(Protocol):
    """A connection, as far as a run needs it."""

    def stop(self) -> None:
        """What waits for it fails at once."""

    def close(self) -> None:
        """End it for this process."""


@dataclass(eq=False, slots=True)
class Run:
    """A request on its way."""

    line: Line
    pieces: list[Piece]
    length: int
    """Of all its pieces, in bytes."""
    began_s: float
    progress_s: float
    """When bytes came last, or when it began."""
    bytes_before: int
    """What the line had served when it began."""
    packets: int = 1
    """So many are received at once."""
    claimed: int = 0
    """Bytes that are being received."""
    index: int = 0
    """The piece that the next byte belongs to."""
    filled: int = 0
    """Bytes of that piece that are there."""
    received: int = 0
    stopped: bool = False
    is_late: bool = False
    """Others were asked for what it has."""
    connection: Stoppable | None = None
    """That its thread may wait for; None while it does not."""

    def owns(self, piece: Piece) -> bool:
        """Whether it is to fill this piece still."""
        return piece.run is self and piece.state in (State.TAKEN, State.HELD)

    def live(self) -> list[Piece]:
        """The pieces that it is to fill still."""
        return [piece for piece in self.pieces[self.index :] if self.owns(piece)]

    def halt(self) -> None:
        """End it now. Its thread hears of it and gives back the pieces."""
        self.stopped = True
        if self.connection is not None:
            self.connection.stop()
