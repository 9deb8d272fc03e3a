"""Blocks from the other nodes of a job: each run of blocks has an owner, the only node that requests it from the
store."""
