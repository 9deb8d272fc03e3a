"""Starts of jobs in virtual time: the real decisions of fetching and peers, on modelled links, disks and processors."""
