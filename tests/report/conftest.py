from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_page import OpenedPage
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., OpenedPage]]:
    """Opens a file in the browser; options are those of a new page."""
    opened: list[OpenedPage] = []

    def open_file(path: Path, **options: Any) -> OpenedPage:
        page = browser.new_page(viewport={"width": 1280, "height": 1100}, **options)
        opened.append(OpenedPage(page, path))
        return opened[-1]

    yield open_file
    for one in opened:
        one.page.close()
