"""Take the documentation's pictures from the report of a real run.

python docs/pictures/take.py runs/gpt-text-...
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Write ``report.png`` (headline and timelines) beside this file."""
    report = Path(sys.argv[1]) / "report.html"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("#chart")
        box = page.locator("section").first.bounding_box()
        assert box is not None
        page.screenshot(
            path=Path(__file__).with_name("report.png"),
            full_page=True,
            clip={"x": 0, "y": 0, "width": 1280, "height": box["y"] + box["height"] + 16},
        )
        browser.close()


if __name__ == "__main__":
    main()
