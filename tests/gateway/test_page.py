"""The gateway's page in a real Chromium: by keyboard alone, in light and dark, when things go right and wrong."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, Spawn
from gateways import Gateway
from ull.gateway.keys import new_key

playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `page`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 30_000
MS = 1_000_000  # nanoseconds
START = 50 * MS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def retry(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Page:
    """The page as a user has it, and what must not happen meanwhile: complaints, and requests to anybody else."""

    def __init__(self, browser: Any, base: str, **context: Any) -> None:
        self.base = base
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.context = browser.new_context(**context)
        self.context.set_default_timeout(PATIENCE_MS)
        self.tab = self.context.new_page()
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", lambda line: line.type == "error" and self.complaints.append(line.text))
        self.tab.on("request", lambda request: self.requested.append(request.url))

    def open(self) -> None:
        self.tab.goto(f"{self.base}/")

    def begin(self, prompt: str) -> None:
        """Opens the page and asks for an answer that goes on until it is stopped; returns once it has begun."""
        self.open()
        self.shows("model", "tiny")
        self.tab.fill("#max-tokens", "8000")
        self.tab.focus("#prompt")
        self.type(prompt, "Control+Enter")
        self.shows("status", "Answering")

    def shows(self, name: str, text: str) -> None:
        playwright.expect(self.tab.locator(f"#{name}")).to_contain_text(re.compile(text), timeout=PATIENCE_MS)

    def text(self, name: str) -> str:
        return str(self.tab.locator(f"#{name}").text_content())

    def type(self, *keys: str) -> None:
        """Presses keys; what is no key's name is typed."""
        for key in keys:
            if re.fullmatch(r"(Control|Shift)\+\w+|[A-Z][a-zA-Z]+", key):
                self.tab.keyboard.press(key)
            else:
                self.tab.keyboard.type(key)

    def focused(self) -> str:
        return str(self.tab.locator("body").evaluate("body => document.activeElement.id"))

    def walk_to(self, name: str) -> None:
        """Goes on with the Tab key until `name` has the focus."""
        for _ in range(40):
            if self.focused() == name:
                return
            self.tab.keyboard.press("Tab")
        raise AssertionError(f"the Tab key does not lead to {name}")

    def answers(self, body: bytes, status: int = 200, **headers: str) -> None:
        """What the gateway answers to the next request for a completion."""
        kind = "text/event-stream" if status == 200 else "application/json"
        self.tab.route(
            "**/completions",
            lambda route: route.fulfill(status=status, body=body, headers={"content-type": kind, **headers}),
        )


@pytest.fixture
def page(browser: Any, gateway: Gateway) -> Iterator[Page]:
    page = Page(browser, gateway.base)
    page.open()
    page.shows("model", "tiny")
    yield page
    assert all(url.startswith(gateway.base) for url in page.requested)
    assert page.complaints == []
    page.context.close()


def stream(rounds: list[tuple[float, list[int], str]], **told: Any) -> bytes:
    """The events of an answer: (milliseconds from the request's receipt, ids, text) of each round, and its end."""
    events: list[dict[str, Any]] = []
    index = 0
    for at, ids, text in rounds:
        timing = {"index": index, "token_ids": ids, "time_ns": START + round(at * MS)}
        events.append({"choices": [{"index": 0, "delta": {"content": text}}], "usage": None, "ull": timing})
        index += len(ids)
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
    end = {
        "finish_reason": "stop",
        "seed": 7,
        "timeline": {"received_ns": START},
        "speculation": {
            "rounds": 4,
            "tokens_per_round": index / 4,
            "by_drafter": {"none": 1, "suffix": 3},
            "accepted_by_depth": [3, 1],
        },
        **told,
    }
    usage = {"prompt_tokens": 20, "completion_tokens": index, "prompt_tokens_details": {"cached_tokens": 15}}
    events.append({"choices": [], "usage": usage, "ull": end})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


KNOWN = stream([(10, [1], "a"), (12, [2, 3], "b c"), (13, [4], " d"), (23, [5, 6, 7], " <b>e</b> f g")])


def test_a_prompt_is_asked_and_answered_by_keyboard_alone(page: Page, shared_daemon: Daemon) -> None:
    assert page.focused() == "prompt"
    page.type("Read a file.", "Control+Enter")
    page.shows("status", "Done: ")
    tokens = int(page.text("tokens"))
    assert page.focused() == "prompt"
    first = page.tab.locator(".turn.assistant").nth(0).text_content()
    assert first
    page.walk_to("max-tokens")
    page.type("Control+A", "12")
    page.walk_to("temperature")
    page.type("Control+A", "0.8")
    page.walk_to("seed")
    page.type("5")
    page.walk_to("prompt")
    page.type("And then?")
    page.walk_to("send")
    with page.tab.expect_request("**/completions") as asked:
        page.type("Enter")
    told = asked.value.post_data_json
    assert (told["max_tokens"], told["temperature"], told["seed"]) == (12, 0.8, 5)
    page.shows("status", r"Done: \w+, \d+ tokens")
    page.shows("seed-used", "^5$")
    assert 0 < int(page.text("tokens")) <= 12
    assert int(page.text("cached").split(", ")[1]) > tokens  # the second turn finds the first
    assert page.tab.locator("#runs tbody tr").count() == 2
    page.walk_to("output")
    page.type("ArrowRight", "ArrowRight")
    page.shows("round", r"Round 2 of \d+: at .* behind the one before; tokens \d+")
    page.type("End")
    page.shows("round", r"Round (\d+) of \1:")
    assert page.tab.locator(".chosen").count() == 1


def test_a_text_is_completed(page: Page, shared_daemon: Daemon) -> None:
    page.tab.select_option("#mode", "text")
    page.shows("prompt-label", "Text to complete")
    assert page.tab.locator("#system").is_disabled()
    page.tab.fill("#max-tokens", "8")
    page.tab.focus("#prompt")
    page.type("import os", "Control+Enter")
    page.shows("status", "Done: length, 8 tokens")


def test_what_is_shown_is_what_was_stamped(page: Page) -> None:
    page.answers(KNOWN)
    page.type("x", "Control+Enter")
    page.shows("status", "Done: stop, 7 tokens")
    shown = {
        "ttft-engine": "10.0 ms",
        "gap-50-engine": "2.00 ms",
        "gap-90-engine": "10.0 ms",
        "gap-99-engine": "10.0 ms",
        "itl-engine": "2.17 ms",  # 13 ms over 6 tokens
        "rate-engine": "462",
        "tokens": "7",
        "rounds": "4",
        "per-round": "1.75",
        "cached": "20, 15",
        "seed-used": "7",
        "finish": "stop",
    }
    assert {name: page.text(name) for name in shown} == shown
    assert page.tab.locator("#acceptance .share").all_text_contents() == ["100 %", "33 %"]
    assert page.tab.locator(".turn.assistant").text_content() == "ab c d <b>e</b> f g"  # as text, whatever it says
    assert page.tab.locator(".turn.assistant span.odd").count() == 2
    page.tab.locator(".turn.assistant span").nth(1).hover()
    page.shows("round", "Round 2 of 4: at 12.0 ms, 2.00 ms behind the one before; tokens 2 3")
    canvas = page.tab.locator("#timeline").bounding_box()
    page.tab.mouse.move(canvas["x"] + canvas["width"] * 0.02, canvas["y"] + 60)
    page.shows("round", "Round 1 of 4")


def test_the_figures_of_both_sides_are_those_of_the_docs(page: Page) -> None:
    times, tokens, sent = [30.0, 32.0, 33.0, 43.0, 50.0], 11, 10.0
    told = page.tab.locator("body").evaluate(
        "async (_, [times, tokens, sent]) => (await import('/page/figures.js')).side(times, tokens, sent)",
        [times, tokens, sent],
    )
    assert told == {"ttft": 20.0, "p50": 2.0, "p90": 10.0, "p99": 10.0, "itl": 2.0, "rate": 500.0}


def test_who_types_reads_or_sets_something_meanwhile_is_left_to_it(browser: Any, spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 10_000_000, "context": 9000})
    with Gateway(daemon.url, tmp_path) as gateway:
        page = Page(browser, gateway.base, viewport={"width": 420, "height": 400})
        page.begin("Go on.")
        page.type("Control+A", "My next thought.")
        output = page.tab.locator("#output")
        at_end = "e => e.scrollTop > 100 && e.scrollTop + e.clientHeight >= e.scrollHeight - 40"
        retry(lambda: output.evaluate(at_end))  # the text is followed
        output.evaluate("e => { e.scrollTop = 0; }")
        shown = len(page.text("output"))
        retry(lambda: len(page.text("output")) > shown + 20)
        assert output.evaluate("e => e.scrollTop") == 0  # whoever has gone back is left there
        page.walk_to("temperature")
        page.type("Escape")
        page.shows("status", "Stopped")
        assert page.focused() == "temperature"
        assert page.tab.locator("#prompt").input_value() == "My next thought."
        page.context.close()


def test_a_gateway_that_dies_amid_an_answer_takes_nothing_with_it(browser: Any, spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 10_000_000, "context": 9000})
    gateway = Gateway(daemon.url, tmp_path)
    page = Page(browser, gateway.base)
    page.begin("Go on.")
    gateway.process.kill()
    gateway.stop()
    page.shows("error", "The connection was lost before the answer had ended.")
    assert page.tab.locator(".turn.assistant.broken").text_content()
    assert page.tab.locator("#prompt").input_value() == "Go on."
    assert page.tab.locator("#send").is_enabled()
    page.context.close()


def test_escape_stops_an_answer_and_the_daemon_hears_of_it(browser: Any, spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn(script={"tokens": [65], "round_ns": 20_000_000, "context": 9000})
    with Gateway(daemon.url, tmp_path) as gateway:
        page = Page(browser, gateway.base)
        page.begin("Go on for ever.")
        page.type("Escape")
        page.shows("status", "Stopped. What had come stays.")
        assert page.tab.locator(".turn.assistant").text_content()
        page.shows("finish", "not to its end")
        assert daemon.wait_events("request", 1)[-1]["finish"] == "cancelled"
        page.context.close()


@pytest.mark.parametrize(
    ("status", "error", "headers", "shown"),
    [
        (
            429,
            {"message": "the queue is full", "code": "busy"},
            {"retry-after": "3"},
            r"the queue is full\. Try again in 3 s\.",
        ),
        (500, {"message": "the engine failed", "code": "internal"}, {}, r"the engine failed\."),
        (503, {"message": "no daemon answers", "code": "connection_lost"}, {}, r"no daemon answers\."),
    ],
)
def test_what_is_refused_is_said_and_nothing_typed_is_lost(
    page: Page, status: int, error: dict[str, str], headers: dict[str, str], shown: str
) -> None:
    page.answers(json.dumps({"error": error}).encode(), status, **headers)
    page.type("A long thought.", "Control+Enter")
    page.shows("error", shown)
    assert page.tab.locator("#prompt").input_value() == "A long thought."
    assert page.tab.locator(".turn").count() == 0
    assert page.tab.locator("#send").is_enabled()
    page.complaints.clear()  # Chromium says itself that a status was not 200


def test_an_answer_that_breaks_off_keeps_what_had_come(page: Page) -> None:
    page.answers(KNOWN[: KNOWN.index(b"data: ", 400)])
    page.type("x", "Control+Enter")
    page.shows("error", "The connection was lost before the answer had ended")
    page.shows("status", "What had come is shown, and is no part of the conversation.")
    assert page.tab.locator(".turn.assistant.broken").text_content()
    assert page.tab.locator("#prompt").input_value() == "x"
    page.tab.unroute_all()
    page.answers(KNOWN[: KNOWN.index(b"data: ", 400)] + b'data: {"error": {"message": "the engine failed"}}\n\n')
    with page.tab.expect_request("**/completions") as asked:
        page.type("Control+Enter")
    page.shows("error", "the engine failed")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "x"}]  # asked anew, not once more


def test_a_gateway_that_is_gone_is_said_to_be(browser: Any, shared_daemon: Daemon, tmp_path: Path) -> None:
    gateway = Gateway(shared_daemon.url, tmp_path)
    page = Page(browser, gateway.base)
    page.open()
    page.shows("health-text", "ready")
    gateway.stop()
    page.type("Hello?", "Control+Enter")
    page.shows("error", "The gateway cannot be reached.")
    page.shows("health-text", "not there")
    assert page.tab.locator("#prompt").input_value() == "Hello?"
    page.context.close()


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Any, shared_daemon: Daemon, tmp_path: Path) -> None:
    key, line = new_key("me")
    file = tmp_path / "keys"
    file.write_text(line, encoding="utf-8")
    with Gateway(shared_daemon.url, tmp_path, "--api-keys", str(file)) as gateway:
        page = Page(browser, gateway.base)
        page.open()
        page.shows("key-form", "asks for an API key")
        assert page.focused() == "key"
        page.type("wrong", "Enter")
        page.shows("error", "This key is not valid here.")
        page.type(key, "Enter")
        page.shows("model", "tiny")
        assert page.tab.locator("#key-form").is_hidden()
        page.tab.fill("#max-tokens", "4")
        page.tab.focus("#prompt")
        page.type("x", "Control+Enter")
        page.shows("status", "Done")
        assert page.context.storage_state()["origins"] == []  # nothing that outlives the tab
        page.context.close()


def test_a_key_that_is_no_longer_valid_is_asked_for_where_the_cursor_is(page: Page) -> None:
    page.answers(b'{"error": {"message": "no such key", "code": "invalid_api_key"}}', 401)
    page.type("A long thought.", "Control+Enter")
    page.shows("key-form", "asks for an API key")
    playwright.expect(page.tab.locator("#send")).to_be_enabled()
    assert page.focused() == "key"
    assert page.tab.locator("#prompt").input_value() == "A long thought."
    page.complaints.clear()  # Chromium says itself that a status was not 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_or_dark_as_the_system_says_and_as_the_button_says(
    browser: Any, gateway: Gateway, scheme: str
) -> None:
    page = Page(browser, gateway.base, color_scheme=scheme)
    page.open()

    def bright() -> bool:
        ground = page.tab.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128

    assert bright() == (scheme == "light")
    page.walk_to("theme")
    page.type("Enter")
    assert bright() == (scheme == "dark")
    page.tab.reload()
    assert bright() == (scheme == "dark")
    page.context.close()


@pytest.mark.parametrize("width", [360, 420, 800, 1600])
def test_nothing_is_wider_than_the_screen(browser: Any, gateway: Gateway, width: int) -> None:
    page = Page(browser, gateway.base, viewport={"width": width, "height": 900})
    page.open()
    page.shows("model", "tiny")
    page.answers(stream([(n, [n], "word" * 40) for n in range(1, 30)]))
    page.type("y" * 500, "Control+Enter")
    page.shows("status", "Done")
    assert page.tab.locator("html").evaluate("page => page.scrollWidth") <= width
    boxes = [page.tab.locator(f"#{name}").bounding_box() for name in ("health", "theme")]
    assert boxes[0]["y"] < boxes[1]["y"] + boxes[1]["height"] / 2 < boxes[0]["y"] + boxes[0]["height"]  # one line
    page.context.close()


def test_every_control_has_a_name(page: Page) -> None:
    named = page.tab.locator("body").evaluate(
        """body => [...body.querySelectorAll("button, input, select, textarea, [tabindex], canvas, meter")]
            .filter(each => !(each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim()))
            .map(each => each.outerHTML)"""
    )
    assert named == []


def test_four_thousand_rounds_are_shown(page: Page) -> None:
    page.answers(stream([(n, [n], f" {n}") for n in range(1, 4097)]))
    page.type("x", "Control+Enter")
    page.shows("status", "Done: stop, 4096 tokens")
    assert page.text("rounds") == "4096"
    page.walk_to("output")
    page.type("End")
    page.shows("round", "Round 4096 of 4096")
