"""Blocks on this node's disk, shared by all processes of one user, and never trusted more than their digests."""
