"""Views of a report: terminal, HTML, and a trace for Perfetto."""
