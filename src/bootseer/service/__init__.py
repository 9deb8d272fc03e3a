"""The Stage Analysis Service: every start of every job in one place, while it happens and over months."""
