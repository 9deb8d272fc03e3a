"""Events of startups: how they are written, kept in spools, and sent on."""
