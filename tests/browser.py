"""A real browser for pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_LIMIT_MS = 180_000
"""Playwright's own limit of 30 s is not enough on a busy machine."""

needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None, reason="no chromium binary in PATH (Debian: apt install chromium)"
)


@contextmanager
def open_tab(width: int, height: int) -> Iterator[Any]:
    """A browser with one tab: a page of Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"], timeout=_LIMIT_MS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(_LIMIT_MS)
        yield page
        browser.close()
