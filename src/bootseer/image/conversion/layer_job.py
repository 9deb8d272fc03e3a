"""Convert one layer, or find its earlier conversion in the store.

Runs in a thread of `convert`. The layer's document is published only after the uncompressed bytes were verified against
their digest and all blocks are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bootseer.artifact.objects import missing, put, read_all
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.blocks.codec import FAST_LEVEL
from bootseer.blocks.writer import DEFAULT_BLOCK_SIZE, BlockWriter
from bootseer.erofs.format import BLOCK
from bootseer.erofs.merged import MergedLayers
from bootseer.erofs.writer import ErofsWriter
from bootseer.errors import BootseerError, CorruptError, NotFoundError, SignatureError
from bootseer.image.conversion.layer import LayerConversion, LayerLimits
from bootseer.image.conversion.layer_document import (
    MAX_BYTES,
    ConvertedLayer,
    encode,
    layer_name,
    parse,
)
from bootseer.image.sources.decompress import decompressed
from bootseer.image.sources.source import SourceLayer, check_content, check_size, read_resumed
from bootseer.io.retry import retrying
from bootseer.logs import logger
from bootseer.store.store import Store

_ATTEMPTS = 3
_LAYER_DEADLINE_S = 24 * 3600.0
_PUBLISH_S = 120.0
_LOG = logger(__name__)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How images are converted. Block size (bytes) and compression level are part of a layer's name."""

    block_size: int = DEFAULT_BLOCK_SIZE
    level: int = FAST_LEVEL
    limits: LayerLimits = field(default_factory=LayerLimits)
    signatures: Signatures = UNSIGNED
    """Keys that sign the documents of layers and images."""


class CancelledError(BootseerError):
    """The conversion ends because another layer failed or the user cancelled it."""


@dataclass(frozen=True, slots=True)
class LayerJob:
    """The conversion of one layer."""

    layer: SourceLayer
    store: Store
    options: ConvertOptions
    where: str
    """The layer's name in messages."""
    below: str
    """The digest of the layers below (`stack_digest`): part of the result's name if that depends on them."""
    lower: Callable[[], MergedLayers] | None
    """Waits for the layers below; None at the bottom."""
    progress: Callable[[int], None]
    """Called with the number of source bytes done. Raises `CancelledError` after the conversion was cancelled."""

    def run(self) -> ConvertedLayer:
        """The converted layer. Raises `CorruptError`, `PermanentError`, `CancelledError` and the store's errors."""
        found = self._find("") or self._find(self.below)
        if found is not None:
            _LOG.info("%s: converted before", self.where)
            self.progress(self.layer.size_bytes)
            return found
        # An upload cannot be resumed in the middle, so the whole layer is retried.
        return retrying(lambda _: self._convert(), attempts=_ATTEMPTS, deadline_s=_LAYER_DEADLINE_S)

    def _find(self, below: str) -> ConvertedLayer | None:
        """The layer's document, if the store has all objects that it refers to. `below`: see `layer_name`."""
        try:
            name = self._name(below)
            data = read_all(self.store, name, stored_limit(MAX_BYTES))
            found = parse(self.options.signatures.open(name, data, self.store.uri, reuse=True))
        except (NotFoundError, CorruptError, SignatureError):
            return None  # missing, damaged or not signed by a trusted key: converted again
        return None if missing(self.store, found.file.objects) else found

    def _convert(self) -> ConvertedLayer:
        layer = self.layer
        options = self.options
        with BlockWriter(self.store, block_size=options.block_size, level=options.level, head_bytes=BLOCK) as blocks:
            writer = ErofsWriter(blocks)
            conversion = LayerConversion(
                writer,
                where=self.where,
                lower=self.lower,
                limits=options.limits,
                compressed_bytes=layer.size_bytes,
            )
            stored = check_size(self._with_progress(read_resumed(layer)), layer)
            tree = conversion.run(check_content(decompressed(stored), layer))
            file = blocks.finish(writer.finish())
        converted = ConvertedLayer(file, tree.root, tree.root_opaque)
        _LOG.info(
            "%s: converted, %d bytes stored as %d%s",
            self.where,
            file.size_bytes,
            file.stored_bytes,
            ", depends on the layers below" if tree.depends_on_lower else "",
        )
        name = self._name(self.below if tree.depends_on_lower else "")
        put(self.store, name, options.signatures.seal(name, encode(converted)), file.objects, timeout_s=_PUBLISH_S)
        return converted

    def _with_progress(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        done = 0
        for piece in pieces:
            done += len(piece)
            self.progress(done)
            yield piece

    def _name(self, below: str) -> str:
        options = self.options
        return layer_name(self.layer.diff_id, block_size=options.block_size, level=options.level, below=below)
