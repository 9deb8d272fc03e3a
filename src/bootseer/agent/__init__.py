"""The long-lived process of a node."""
