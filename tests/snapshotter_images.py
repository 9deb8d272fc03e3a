"""Images for containerd in a test node's registry, in addition to the node's own."""

from __future__ import annotations

from image_node import Node, convert_box, have_converted, push, tar
from oci_images import write_layout


def pause(node: Node) -> str:
    """Push the image of pod sandboxes, whose only process must run as long as the pod; returns its reference."""
    layout = node.folder / "pause"
    write_layout(layout, [tar(node.folder / "tree", ["bin"])], tag="1", Env=["PATH=/bin"], Cmd=["sleep", "3600"])
    push(layout, node.registry.host, "team/pause", "1")
    return f"{node.registry.host}/team/pause:1"


def convert(node: Node, reference: str = "") -> None:
    """Convert an image of the registry, by default the node's, into its own repository."""
    if reference:
        convert_box(reference)
    else:
        have_converted(node)


def push_small(node: Node) -> str:
    """Push a small image of one layer; returns its reference."""
    layout = node.folder / "small"
    write_layout(layout, [tar(node.folder / "tree", ["bin", "etc"])], tag="1", Env=["PATH=/bin"])
    push(layout, node.registry.host, "team/small", "1")
    return f"{node.registry.host}/team/small:1"
