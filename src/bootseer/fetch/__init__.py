"""Fetching: which blocks to read from the origin and when, what earlier startups needed, and the threads that do it."""
