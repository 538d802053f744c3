"""The chat page in a real browser (chromium and its driver on PATH): `make test-page`."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paceline import Client, ToolCall
from paceline.testing import FakeReply, FakeScheduler
from service_kit.identity import token_hash

from tests.support.adapter_stack import Operator, write_adapters
from tests.support.openai_door import serving_door
from tests.support.stack import oracle_stack

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> <b>bold</b>"
    " [click](javascript:window.hacked=3) ![](http://127.0.0.1:9/pixel.png) </article></main>"
)
PHONE = (390, 844)


@contextmanager
def page_of(*schedulers: str) -> Iterator[str]:
    """A door before these schedulers, in a thread of its own; yields the page's URL."""
    ports: list[int] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving_door(*schedulers, local=True) as door:
            ports.append(door.port)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{ports[0]}/"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> None:
        self.driver.get(self.url)
        self.until(lambda: self.value("model"), "no model is listed")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def value(self, name: str) -> str:
        return str(self.find(f"#{name}").get_property("value"))

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def press(self, selector: str) -> None:
        """Click on what is there at this moment."""
        self.run(f"document.querySelector({selector!r}).click()")

    def settings(self, **values: str) -> None:
        """Open the settings, add these texts, and close them."""
        self.find("#settings-button").click()
        for name, value in values.items():
            self.find(f"[name={name}]").send_keys(value)
        self.find("#settings [type=submit]").click()

    def texts(self, selector: str) -> list[str]:
        """What all such elements say at one moment."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return [str(one) for one in self.driver.execute_script(script, selector)]

    def text(self, selector: str) -> str:
        """What the first of these elements says, whether it is folded or not; "" if there is none."""
        return "".join(self.texts(selector)[:1])

    def say(self, text: str) -> None:
        self.find("#message").send_keys(text)
        self.find("#send").click()

    def until(self, condition: Callable[[], Any], message: str) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 20, 0.02).until(lambda _: condition(), message)

    def answered(self, count: int = 1) -> str:
        """The facts of the last answer, once there are so many."""
        self.until(lambda: len(self.all("article.assistant")) == count, f"not {count} answers")
        self.until(lambda: self.find("#send").is_displayed(), "the answer does not end")
        return self.texts("article.assistant .facts")[-1]


@pytest.fixture
def fake() -> Iterator[FakeScheduler]:
    with FakeScheduler() as fake:
        yield fake


@pytest.fixture
def page(driver: Any, fake: FakeScheduler) -> Iterator[Page]:
    driver.set_window_size(1200, 800)
    driver.get_log("browser")
    with page_of(fake.address) as url:
        page = Page(driver, url)
        page.open()
        yield page
        severe = [one["message"] for one in driver.get_log("browser") if one["level"] == "SEVERE"]
        assert severe == []  # neither an error nor anything that the policy refused


def test_a_chat_streams_and_says_how_fast(page: Page, fake: FakeScheduler) -> None:
    fake.reply(FakeReply("One two three four five.", delay_s=0.15), times=1)
    page.say("Count")
    page.until(lambda: "One two" in page.text("article.assistant"), "nothing streams")
    assert "five" not in page.text("article.assistant")
    facts = page.answered()
    assert page.text("article.assistant .content") == "One two three four five."
    assert page.text("article.user .content") == "Count"
    for part in ("tokens/s", "first token after"):
        assert part in facts
    fake.reply("Again.", times=1)
    page.say("More")
    page.answered(2)
    sent = fake.calls[-1].request.messages.messages
    assert [one.content for one in sent] == ["Count", "One two three four five.", "More"]


def test_a_chat_goes_to_the_adapter_that_is_chosen(driver: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.select import Select

    adapters = write_adapters(tmp_path / "adapters", "ab")
    flags = ("--adapter-dir", str(adapters), "--adapter-slots", "2")
    with oracle_stack(tmp_path, executor=flags) as stack, page_of(stack.scheduler.address) as url:

        async def load() -> None:
            async with Operator(stack.scheduler.address) as operator:
                for name in "ab":
                    await operator.load(name)

        asyncio.run(load())
        page = Page(driver, url)
        page.open()
        assert page.texts("#model option") == ["oracle", "a", "b"]
        page.settings(more='{"seed": 1, "max_tokens": 12}')
        for count, name in enumerate(("oracle", "b"), start=1):
            Select(page.find("#model")).select_by_value(name)
            page.say("Hi")
            page.answered(count)
        shown = page.texts("article.assistant .content")
        assert shown[0] != shown[1]
        with Client(stack.scheduler.address) as client:
            turns: list[Any] = [{"role": "user", "content": "Hi"}]
            text = client.complete(messages=turns, seed=1, max_tokens=12).text
            turns += [{"role": "assistant", "content": text}, turns[0]]
            texts = [text, client.complete(messages=turns, seed=1, max_tokens=12, model="b").text]
        assert [re.findall(r"\w", one) for one in shown] == [re.findall(r"\w", one) for one in texts]


def test_stop_ends_the_request_and_keeps_what_came(page: Page, fake: FakeScheduler) -> None:
    fake.reply(FakeReply("word " * 500, delay_s=0.05), times=1)
    page.say("Go on")
    page.until(lambda: "word word" in page.text("article.assistant"), "nothing streams")
    page.find("#stop").click()
    assert "stopped" in page.answered()
    page.until(
        lambda: [one.outcome for one in fake.calls if "Generate" in one.method] == ["left"], "it goes on"
    )
    assert page.text("article.assistant .content").startswith("word word")


def test_regenerate_asks_again_with_the_settings(page: Page, fake: FakeScheduler) -> None:
    fake.reply("First.", times=1)
    fake.reply("Second.", times=1)
    page.say("Hi")
    page.answered()
    page.settings(system="Be brief.", temperature="0.5", more='{"min_tokens": 3')
    page.until(lambda: page.find("#wrong").is_displayed(), "broken JSON is taken")
    page.find("[name=more]").send_keys("}")
    page.find("#settings [type=submit]").click()
    page.find("#again").click()
    page.until(lambda: "Second." in page.text("article.assistant"), "no other answer")
    page.answered()
    request = fake.calls[-1].request
    assert [(one.content) for one in request.messages.messages] == ["Be brief.", "Hi"]
    assert request.sampling.temperature == 0.5
    assert request.stop.min_tokens == 3


def test_conversations_are_there_after_a_reload_and_can_be_deleted(page: Page, fake: FakeScheduler) -> None:
    fake.reply("An answer.")
    page.say("The first question")
    page.answered()
    page.find("#new").click()
    page.until(lambda: not page.all("article"), "the old conversation is shown")
    page.say("The second question")
    page.answered()
    page.driver.refresh()
    page.until(lambda: page.all("article.assistant"), "nothing is there after a reload")
    assert page.text("article.user .content") == "The second question"
    titles = ["The second question", "The first question"]
    page.until(lambda: page.texts("#list li button:first-child") == titles, "not both are listed")
    page.press("#list li:nth-child(2) button")
    page.until(lambda: "first" in page.text("article.user"), "the first one is not shown")
    page.press("#list li button:last-child")
    page.until(lambda: len(page.all("#list li")) == 1, "it is not deleted")
    page.press("#list li button:last-child")
    page.until(lambda: not page.all("#list li"), "it is not deleted")
    page.open()
    assert page.all("article") == page.all("#list li") == []


def test_what_a_model_writes_is_text_and_never_html(page: Page, fake: FakeScheduler) -> None:
    call = ToolCall("call_1", HOSTILE[:60], HOSTILE)
    fake.reply(FakeReply(HOSTILE + "\n```html\n" + HOSTILE + "\n```\n", reasoning=HOSTILE, tool_calls=[call]))
    page.settings(more='{"tools": [{"type": "function", "function": {"name": "x"}}]}')
    page.say(HOSTILE)
    for _ in range(2):  # as it streams, and as it is read again
        page.answered()
        assert HOSTILE in page.text("article.assistant .content")
        assert page.text("article.assistant .content pre") == HOSTILE + "\n"
        assert page.text("article.user .content") == HOSTILE
        assert [one.get_property("textContent") for one in page.all("article.assistant details pre")] == [
            HOSTILE
        ] * 2
        assert page.all("article script, article img, article b, article a") == []
        assert page.run("return window.hacked") is None
        page.driver.refresh()


def test_a_line_of_a_megabyte_leaves_the_page_usable(page: Page, fake: FakeScheduler) -> None:
    fake.reply(["x" * 100_000 for _ in range(10)], times=1)
    page.settings(max_tokens="2000000")
    page.say("Long")
    page.answered()
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.find("article.assistant button.more").click()
    assert len(page.text("article.assistant .content")) == 1_000_000
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    fake.reply("Short.", times=1)
    page.say("Next")
    page.answered(2)


def test_reasoning_and_calls_are_folded_and_results_go_back(page: Page, fake: FakeScheduler) -> None:
    fake.reply(FakeReply("", reasoning="Let me think.", tool_calls=[ToolCall("c1", "now", "{}")]), times=1)
    fake.reply("It is noon.", times=1)
    page.settings(more='{"tools": [{"type": "function", "function": {"name": "now"}}]}')
    page.say("What time is it?")
    page.answered()
    assert page.texts("article.assistant summary") == ["Reasoning", "Call of now"]
    assert not page.find("article.assistant details pre").is_displayed()
    page.find("article.assistant .call summary").click()
    page.find("article.assistant .result").send_keys("12:00")
    page.find("#send").click()
    page.answered(2)
    roles = [(one.role, one.content) for one in fake.calls[-1].request.messages.messages]
    assert roles == [("user", "What time is it?"), ("assistant", ""), ("tool", "12:00")]


def test_an_error_is_shown_and_the_message_can_be_sent_again(page: Page, fake: FakeScheduler) -> None:
    from paceline.testing import FakeError

    fake.reply(FakeError("INVALID_REQUEST", "temperature: is too warm", field="temperature"), times=1)
    fake.reply("Fine.", times=1)
    page.say("Hi")
    page.until(lambda: page.find("#error").is_displayed(), "no error is shown")
    assert page.text("#error") == "temperature: is too warm"
    page.find("#again").click()
    page.answered()
    assert not page.find("#error").is_displayed()
    assert [one["level"] for one in page.driver.get_log("browser")] == ["SEVERE"]  # the status 400 itself


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page: Page, fake: FakeScheduler) -> None:
    fake.reply("Yes.\n```\n" + "wide " * 100 + "\n```\n")
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": PHONE[0], "height": PHONE[1], "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        page.driver.refresh()
        page.until(lambda: page.value("model"), "no model is listed")
        page.say("A question on a phone, with a word of" + "f" * 100)
        page.answered()
        assert page.run("return innerWidth") == PHONE[0]
        assert page.run("return document.documentElement.scrollWidth") == PHONE[0]
        for name in ("send", "message", "settings-button", "menu"):
            box = page.find(f"#{name}").rect
            assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE[0]
            assert box["height"] >= 24
        assert (
            page.run("return parseFloat(getComputedStyle(document.getElementById('message')).fontSize)") >= 16
        )
        assert not page.find("#conversations").is_displayed()
        page.find("#menu").click()
        page.find("#list li button").click()
        shown = "return document.querySelector('article')?.checkVisibility()"  # the list draws it anew
        page.until(lambda: page.run(shown), "the conversation is not shown")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_key_is_asked_for_once(driver: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"- {{name: ada, sha256: {token_hash('a' * 20)}}}\n")
    with (
        oracle_stack(tmp_path, scheduler=("--tokens-file", str(tokens))) as stack,
        page_of(stack.scheduler.address) as url,
    ):
        page = Page(driver, url)
        driver.get(url)
        for key in ("wrong", "a" * 20):
            page.until(lambda: page.find("#key").is_displayed(), "no key is asked for")
            page.find("#key input").send_keys(key)
            page.find("#key button").click()
        page.until(lambda: page.value("model"), "no model is listed")
        driver.refresh()
        page.until(lambda: page.value("model"), "the key is not kept")
        page.say("Hi")
        assert "tokens/s" in page.answered()
        page.find("#forget-key").click()
        driver.refresh()
        page.until(lambda: page.find("#key").is_displayed(), "the key is not forgotten")


@pytest.mark.skipif(
    "PICTURES" not in os.environ, reason="PICTURES=folder: writes the pictures of docs/openai.md"
)
def test_pictures(page: Page, fake: FakeScheduler) -> None:
    fake.reply(FakeReply(
        "The sky is blue because air scatters short waves of sunlight more than long ones.\n\n"
        "The share grows with the fourth power of the frequency:\n```py\n"
        "def scattered(wavelength_nm):\n    return (550 / wavelength_nm) ** 4\n```\n",
        reasoning="Rayleigh scattering; keep it short.", delay_s=0.02))  # fmt: skip
    page.driver.set_window_size(1000, 640)
    page.say("Why is the sky blue?")
    page.answered()
    page.driver.save_screenshot(str(Path(os.environ["PICTURES"]) / "chat-page.png"))
