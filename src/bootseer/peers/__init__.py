"""Blocks from the other nodes of a job: each run of blocks has an owner, which alone asks the origin for it."""
