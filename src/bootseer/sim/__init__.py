"""Simulates starts of jobs in virtual time: real code for fetching and peers, models of links and processors."""
