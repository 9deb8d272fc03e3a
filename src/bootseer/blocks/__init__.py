"""Block files: an immutable file as fixed-size blocks in a store, and the index to find and verify each block."""
