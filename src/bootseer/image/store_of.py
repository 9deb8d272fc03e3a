"""Which store has the converted form of an image. Touches nothing."""

from __future__ import annotations

from collections.abc import Mapping

from bootseer.artifact.places import STORE
from bootseer.image.reference import Place, Reference


def store_uri(reference: Reference, given: str | None, env: Mapping[str, str]) -> str | None:
    """The store of an image: what the user says, `$BOOTSEER_STORE`, else the image's own repository.

    None for images that do not come from a registry: they are converted on the node, if nobody names a store.
    """
    uri = given or env.get(STORE)
    if not uri and reference.place is Place.REGISTRY:
        uri = f"oci://{reference.host}/{reference.repository}"
    return uri or None
