"""The Stage Analysis Service: collects the starts of all jobs, shows them live and over months."""
