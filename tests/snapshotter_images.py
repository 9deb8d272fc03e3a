"""Images in a test node's registry that a containerd needs, beside the node's own."""

from __future__ import annotations

from image_node import Node, convert_box, have_converted, push, tar
from oci_images import write_layout


def pause(node: Node) -> str:
    """The image of sandboxes, whose only process has to live as long as the pod."""
    layout = node.folder / "pause"
    write_layout(layout, [tar(node.folder / "tree", ["bin"])], tag="1", Env=["PATH=/bin"], Cmd=["sleep", "3600"])
    push(layout, node.registry.host, "team/pause", "1")
    return f"{node.registry.host}/team/pause:1"


def convert(node: Node, reference: str = "") -> None:
    """Convert an image of the registry into its own repository; without a reference, the node's."""
    if reference:
        convert_box(reference)
    else:
        have_converted(node)


def push_small(node: Node) -> str:
    """A small image of one layer."""
    layout = node.folder / "small"
    write_layout(layout, [tar(node.folder / "tree", ["bin", "etc"])], tag="1", Env=["PATH=/bin"])
    push(layout, node.registry.host, "team/small", "1")
    return f"{node.registry.host}/team/small:1"
