"""Convert one layer, or find its earlier conversion in the store.

Runs in a thread of `convert`. The layer's document is published only after the uncompressed bytes were verified against
their digest and all blocks are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bootseer.artifact.objects import missing, put, read_all
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.blocks.codec import FAST_LEVEL
from bootseer.blocks.writer import DEFAULT_BLOCK_SIZE, BlockWriter
from bootseer.erofs.format import BLOCK
from bootseer.erofs.writer import ErofsWriter
from bootseer.errors import BootseerError, CorruptError, NotFoundError, SignatureError
from bootseer.image.conversion.layer import LayerLimits, write_layer
from bootseer.image.conversion.layer_document import (
    MAX_BYTES,
    MAX_QUESTIONS,
    ConvertedLayer,
    Questions,
    encode,
    layer_name,
    parse,
)
from bootseer.image.conversion.layer_tree import Lower, ask
from bootseer.image.merged import MergedTree
from bootseer.image.sources.source import SourceLayer, check_content, check_size, read_resumed
from bootseer.io.retry import retrying
from bootseer.logs import logger
from bootseer.store.store import Store, Stored

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
    lower: Callable[[], Lower] | None
    """Waits for the layers below; None at the bottom."""
    progress: Callable[[int], None]
    """Called with the number of source bytes done. Raises `CancelledError` after the conversion was cancelled."""

    def run(self) -> ConvertedLayer:
        """The converted layer. Raises `CorruptError`, `PermanentError`, `CancelledError` and the store's errors."""
        found = self._find("")
        questions: Questions = ()
        if found is not None and not isinstance(found, ConvertedLayer):
            questions = found
            found = self._find(ask(self._lower_layers(), questions))
        if isinstance(found, ConvertedLayer):
            _LOG.info("%s: converted before", self.where)
            self.progress(self.layer.size_bytes)
            return found
        # An upload cannot be resumed in the middle, so the whole layer is retried.
        return retrying(lambda _: self._convert(questions), attempts=_ATTEMPTS, deadline_s=_LAYER_DEADLINE_S)

    def _find(self, answers: str) -> ConvertedLayer | Questions | None:
        """The layer's document for a digest of answers, if the store has all objects that it refers to."""
        try:
            name = self._name(answers)
            data = read_all(self.store, name, stored_limit(MAX_BYTES))
            found = parse(self.options.signatures.open(name, data, self.store.uri, reuse=True))
            if isinstance(found, ConvertedLayer) and missing(self.store, found.file.objects):
                return None
        except (NotFoundError, CorruptError, SignatureError):
            return None  # missing, damaged or not signed by a trusted key: converted again
        return found

    def _convert(self, questions: Questions) -> ConvertedLayer:
        layer = self.layer
        options = self.options
        with BlockWriter(self.store, block_size=options.block_size, level=options.level, head_bytes=BLOCK) as blocks:
            writer = ErofsWriter(blocks)
            facts = write_layer(
                writer,
                check_size(self._with_progress(read_resumed(layer)), layer),
                where=self.where,
                lower=self.lower,
                limits=options.limits,
                compressed_bytes=layer.size_bytes,
                uncompressed=lambda pieces: check_content(pieces, layer),
            )
            file = blocks.finish(writer.finish())
        converted = ConvertedLayer(file, facts.root, facts.opaque)
        _LOG.info(
            "%s: converted, %d bytes stored as %d, %d questions to lower layers",
            self.where,
            file.size_bytes,
            file.stored_bytes,
            len(facts.asked),
        )
        self._publish_result(converted, questions, tuple(facts.asked))
        return converted

    def _publish_result(self, converted: ConvertedLayer, known: Questions, asked: Questions) -> None:
        """Publish the layer under the answers to `known` and `asked` together.

        Over other lower layers a conversion may ask different questions (a link there leads elsewhere). The list under
        the plain name is therefore the union of all, and each result is named by the answers to this union.
        """
        questions = tuple(sorted({*known, *asked}))
        if len(questions) > MAX_QUESTIONS:
            return
        answers = ask(self._lower_layers(), questions) if questions else ""
        self._publish(answers, converted, converted.file.objects)
        if questions != known:
            self._publish("", questions, ())

    def _lower_layers(self) -> Lower:
        """The layers below; an empty tree for the bottom layer."""
        return self.lower() if self.lower is not None else Lower(MergedTree([]))

    def _with_progress(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        done = 0
        for piece in pieces:
            done += len(piece)
            self.progress(done)
            yield piece

    def _publish(self, answers: str, layer: ConvertedLayer | Questions, refs: Sequence[Stored]) -> None:
        name = self._name(answers)
        put(self.store, name, self.options.signatures.seal(name, encode(layer)), refs, timeout_s=_PUBLISH_S)

    def _name(self, answers: str) -> str:
        options = self.options
        return layer_name(self.layer.diff_id, block_size=options.block_size, level=options.level, answers=answers)
