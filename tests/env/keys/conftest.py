"""Fixtures of the tests of request keys."""

from setup_projects import empty, project

__all__ = ["empty", "project"]
