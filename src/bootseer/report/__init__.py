"""Reports on startups: logs become events, events an analysis, and the analysis text, HTML, JSON or a trace."""
