"""A page of ours in a browser, with its timelines as a reader sees them."""

from pathlib import Path

from playwright.sync_api import Page

from penstock.timeline.timeline import Event

DOWN = {"SEND": 28.0, "REDUCE": 28.0, "RECV": 35.0}
"""How far below the top of its row an event that is not computing is drawn."""


class OpenedPage:
    """An open page, with all that it asked for or complained of."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page, self.requests, self.complaints = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until the timelines are drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")

    def place(self, row: int, time_s: float, down: float = 12.0) -> tuple[float, float]:
        """Where a time of a row is on the screen, so far down from the top of the row.

        The rows of all timelines count from above.
        """
        x, y = self.page.evaluate(
            f"""() => {{
                const box = canvas.getBoundingClientRect();
                const top = yOf(bands.filter((band) => band.row)[{row}]);
                return [box.left + xOf({time_s}), box.top + top + {down}];
            }}"""
        )
        return x, y

    def told(self, row: int, time_s: float, down: float = 12.0) -> str:
        """What the tip says there."""
        self.page.mouse.move(*self.place(row, time_s, down))
        return self.page.locator("#tip").inner_text()

    def told_of(self, row: int, event: Event) -> str:
        """What the tip says in the middle of an event."""
        return self.told(row, (event.start_s + event.end_s) / 2, DOWN.get(event.kind, 12.0))

    def colour(self, row: int, time_s: float, down: float = 3.0) -> str:
        """The colour of the chart there, as ``#rrggbb``."""
        red, green, blue = self.page.evaluate(
            f"""() => {{
                const ratio = window.devicePixelRatio;
                const y = yOf(bands.filter((band) => band.row)[{row}]) + {down};
                const found = pen.getImageData(xOf({time_s}) * ratio, y * ratio, 1, 1).data;
                return [...found].slice(0, 3);
            }}"""
        )
        return f"#{red:02x}{green:02x}{blue:02x}"

    def colour_of(self, row: int, event: Event) -> str:
        """The colour in the middle of an event, above its number."""
        return self.colour(row, (event.start_s + event.end_s) / 2, DOWN.get(event.kind, 3.0))

    def width_of(self, event: Event) -> float:
        """How many pixels an event takes."""
        return self.page.evaluate(f"xOf({event.end_s}) - xOf({event.start_s})")

    def words(self) -> list[str]:
        """All words on the chart, from the top, in the order of drawing."""
        return self.page.evaluate(
            """() => {
                const [words, own] = [[], pen.fillText];
                pen.fillText = (text) => words.push(text);
                draw();
                pen.fillText = own;
                draw();
                return words;
            }"""
        )

    def seen_s(self) -> tuple[float, float]:
        """The times at the ends of the chart."""
        low, high = self.page.evaluate("[range.low, range.high]")
        return low, high

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse from one place to another."""
        mouse = self.page.mouse
        mouse.move(*begin)
        mouse.down()
        mouse.move(*end, steps=4)
        mouse.up()
        self.settle()
