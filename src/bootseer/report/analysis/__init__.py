"""From events to the report as data (`report.model`)."""
