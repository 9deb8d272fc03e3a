"""Fetching: which blocks to read from an origin and when, what earlier startups needed, and the threads that do it."""
