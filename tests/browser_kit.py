"""The Chromium of browser tests, and their screenshots."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

# The first has no windows, and its tests take two thirds of the processor time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
).split()


def require_playwright() -> Any:
    """Playwright. Without it or Chromium the test is skipped, or fails if NEEDS_CHROMIUM is set, as in `.ci/run`."""
    missing = "" if CHROMIUM else "no Chromium on this machine (Debian: apt-get install chromium-headless-shell)"
    if missing and os.environ.get("NEEDS_CHROMIUM"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    return pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")


def picture(page: Any, name: str, after_ms: float = 0.0) -> None:
    """Saves a screenshot of 256 colours if CONSOLE_SHOTS names a folder."""
    if folder := os.environ.get("CONSOLE_SHOTS"):
        from PIL import Image

        page.wait_for_timeout(after_ms)
        with Image.open(io.BytesIO(page.screenshot())) as shot:
            shot.convert("RGB").quantize(256).save(Path(folder) / f"{name}.png", optimize=True)
