"""Block files: an immutable file as fixed-size blocks in a store, and the index that finds and proves each of them."""
