"""The page of `paceline timeline --web` in a real browser: `make test-page`, with -s for how fast it is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.proto import serialize_length_prefixed
from paceline import Client, Security
from paceline.cli.token import entry
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.support.checkout import environment
from tests.support.processes import ServiceProcess
from tests.support.stack import oracle_stack

pytestmark = pytest.mark.browser

REQUESTS, STEPS, BLOCK = 10_000, 100_000, 256
HOSTILE = "<script>window.hacked=1</script><img/src=x/onerror=window.hacked=2>"
PHONE = (390, 844)
LIFE = 40  # steps of a request, of which it waits for ten


def write_log(path: Path, requests: int = REQUESTS, steps: int = STEPS) -> None:
    """A recorded log: a step is 10 ms, requests come at equal distances."""
    happening: dict[int, list[tuple[int, int, int]]] = {}
    for number in range(1, requests + 1):
        begins = (number - 1) * (steps - LIFE) // requests
        kinds = [(0, pb.STEP_EVENT_KIND_TOKENIZING, 20_000)] if number % 4 == 0 else []
        kinds += [(0, pb.STEP_EVENT_KIND_QUEUED, 12), (10, pb.STEP_EVENT_KIND_ADMITTED, 8)]
        if number % 5 == 0:
            kinds += [(20, pb.STEP_EVENT_KIND_PREEMPTED, 30), (25, pb.STEP_EVENT_KIND_RESUMED, 30)]
        for after, kind, value in [*kinds, (LIFE, pb.STEP_EVENT_KIND_ENDED, 30)]:
            if begins + after < steps:
                happening.setdefault(begins + after, []).append((number, kind, value))
    with path.open("wb") as file:
        for first in range(0, steps, BLOCK):
            serialize_length_prefixed(block(first, min(BLOCK, steps - first), happening), file)  # type: ignore[arg-type]


def block(first: int, count: int, happening: dict[int, list[tuple[int, int, int]]]) -> pb.StepLog:
    log = pb.StepLog(first_step=first + 1, started_at_us=1_700_000_000_000_000 + 10_000 * first)
    log.started_us.extend([0, *[10_000] * (count - 1)])
    columns = {"planned_us": 8000, "taken_us": 9000, "prompt_rows": 1, "decode_rows": 7, "verify_rows": 0}
    columns |= {"tokens": 20, "drafted_tokens": 0, "accepted_tokens": 0, "free_pages": 12, "running": 8}
    for name, value in columns.items():
        getattr(log, name).extend([value] * count)
    log.waiting.extend([2] * count)
    log.reasons.extend(
        [(pb.WAIT_REASON_PAGES, pb.WAIT_REASON_SEATS)[(first + i) // 50 % 2] for i in range(count)]
    )
    for step in range(first, first + count):
        events = happening.get(step, [])
        log.event_counts.append(len(events))
        for number, kind, value in events:
            log.event_kinds.append(kind)  # type: ignore[arg-type]
            log.event_requests.append(number)
            log.event_indexes.append(0)
            log.event_values.append(value)
            log.names.add(number=number, request_id=HOSTILE if number == 7 else f"r{number}")
    return log


@contextmanager
def page_at(source: str) -> Iterator[str]:
    """`paceline timeline --web` of a file or a scheduler; yields the page's URL."""
    command = [sys.executable, "-m", "paceline", "timeline", source, "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            [url] = [word for word in line.split() if word.startswith("http://127.0.0.1:")]
            yield url
        finally:
            process.terminate()


class Timeline:
    """The page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")
        driver.get(url)
        self.until("return document.body.dataset.loadedMs")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def until(self, script: str) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 60, 0.02).until(lambda _: self.run(script), script)

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({selector!r}).textContent"))

    def click(self, selector: str, x: int, y: int) -> None:
        """As a person does, at this place of an element."""
        from selenium.webdriver import ActionChains

        element = self.driver.find_element("css selector", selector)
        box = element.rect
        chain = ActionChains(self.driver, duration=0)
        chain.move_to_element_with_offset(element, x - int(box["width"] / 2), y - int(box["height"] / 2))
        chain.click().perform()

    def search(self, request_id: str) -> None:
        self.driver.execute_script("document.getElementById('id').value = arguments[0]", request_id)
        self.run("document.getElementById('search').requestSubmit()")
        self.until("return document.getElementById('why').dataset.answeredMs")

    def check(self) -> None:
        """Nothing failed, and the policy refused nothing, nor had anything to refuse."""
        severe = [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]
        assert severe == []
        assert self.run("return window.hacked") is None
        fetched = self.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        origin = self.run("return location.origin")
        assert all(one.startswith((origin, "data:")) for one in fetched), fetched


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "steps"
    write_log(path)
    return path


def test_ten_thousand_requests_are_drawn_and_a_click_says_why(driver: Any, recorded: Path) -> None:
    driver.set_window_size(1400, 900)
    with page_at(str(recorded)) as url:
        page = Timeline(driver, url)
        assert f"{REQUESTS} of {REQUESTS} streams, {STEPS} of {STEPS} steps" in page.text("#summary")
        page.search("r5000")
        why = page.text("#why")
        assert "r5000" in why
        for part in (
            "12 prompt tokens",
            "became tokens",
            "20.0 ms",
            "30 output tokens",
            "waited",
            "ran",
            "seats 100 ms",
            "preempted",
        ):
            assert part in why
        page.run("delete document.getElementById('why').dataset.answeredMs")
        page.click("#rows", 500, 40)
        answered = page.until("return document.getElementById('why').dataset.answeredMs")
        assert page.text("#why h2") != "r5000"
        page.click("#lanes", 700, 30)
        assert "predicted" in page.text("#why")
        assert {"waits: pages", "waits: seats"} <= set(
            page.text("#legend").replace("waits", "|waits").split("|")
        )
        print(
            f"\nloaded in {page.run('return document.body.dataset.loadedMs')} ms, a click took {answered} ms,"
        )
        print(f"a picture {page.run(PICTURE_MS)} ms")
        page.check()


PICTURE_MS = """
const began = performance.now();
document.getElementById("in").click();
return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now() - began))));
"""


def test_hostile_ids_are_text(driver: Any, recorded: Path) -> None:
    with page_at(str(recorded)) as url:
        page = Timeline(driver, url)
        page.search(HOSTILE)
        assert page.text("#why h2") == HOSTILE
        page.check()


def test_it_fits_a_phone(driver: Any, recorded: Path) -> None:
    driver.set_window_size(*PHONE)
    with page_at(str(recorded)) as url:
        page = Timeline(driver, url)
        width = page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert width == 0
        page.click("#rows", 200, 24)
        page.until("return document.getElementById('why').dataset.answeredMs")
        page.check()
    driver.set_window_size(1400, 900)


def test_it_follows_a_scheduler_which_says_why_a_request_waited(driver: Any, tmp_path: Path) -> None:
    driver.set_window_size(1200, 760)
    flags = ["--step-ms", "20", "--pages", "36"]
    with oracle_stack(tmp_path, executor=flags) as stack, page_at(stack.scheduler.address) as url:
        page = Timeline(driver, url)

        def ask(number: int) -> None:
            with Client(stack.scheduler.address) as client:
                client.complete("Hello", max_tokens=40, ignore_eos=True, request_id=f"live{number}")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        page.until("return /24 of 24 streams/.test(document.getElementById('summary').textContent)")
        page.search("live3")
        page.until("return /Before its first step/.test(document.getElementById('why').textContent)")
        for thread in threads:
            thread.join()
        page.check()
        if "PICTURES" in os.environ:  # writes the picture of docs/seeing.md
            page.search("live20")
            page.until("return /Before its first step/.test(document.getElementById('why').textContent)")
            page.run("document.getElementById('out').click()")
            driver.save_screenshot(str(Path(os.environ["PICTURES"]) / "timeline-page.png"))


def test_the_openai_apis_port_has_it_for_a_key_that_is_asked_for(driver: Any, tmp_path: Path) -> None:
    driver.set_window_size(1200, 760)
    (tmp_path / "tokens.yaml").write_text(f"{entry('boss', 'boss', admin=True)}\n{entry('alice', 'alice')}\n")
    flags = ["--tokens-file", str(tmp_path / "tokens.yaml")]
    with oracle_stack(tmp_path, executor=["--step-ms", "20"], scheduler=flags) as stack:
        door = ServiceProcess("paceline_openai", ["--scheduler", stack.scheduler.address], tmp_path / "door")
        try:
            with Client(stack.scheduler.address, security=Security(token="alice")) as client:
                client.complete("Hello", max_tokens=9, request_id="of-alice")
            driver.get(f"http://{door.address}/timeline")
            page = Timeline.__new__(Timeline)
            page.driver = driver
            page.until("return document.getElementById('key').open")
            page.run("document.querySelector('#key input').value = 'boss'")
            page.run("document.querySelector('#key button').click()")
            page.until("return /1 of 1 streams/.test(document.getElementById('summary').textContent)")
            page.search("of-alice")
            page.until("return /Before its first step/.test(document.getElementById('why').textContent)")
            assert page.text("#why h2") == "alice of-alice"
            driver.get_log("browser")  # the answer without a key is there, as an error
            page.run("document.getElementById('all').click()")
            page.check()
        finally:
            door.kill()


def test_another_scheduler_is_chosen_and_shown_in_place_of_the_first(driver: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with oracle_stack(tmp_path / "a") as first, oracle_stack(tmp_path / "b") as second:
        addresses = [one.scheduler.address for one in (first, second)]
        for number, address in enumerate(addresses, start=1):
            with Client(address) as client:
                for part in range(number):
                    client.complete("Hello", max_tokens=9, request_id=f"of-{number}-{part}")
        options = [word for address in addresses for word in ("--scheduler", address)]
        door = ServiceProcess("paceline_openai", options, tmp_path / "door")
        try:
            driver.set_window_size(*PHONE)
            page = Timeline(driver, f"http://{door.address}/timeline/")
            for address, streams in ((addresses[1], 2), (addresses[0], 1)):
                page.driver.find_element(
                    "css selector", f"#of option[value='{value(page, address)}']"
                ).click()
                page.until(f"return / {streams} of {streams} streams/.test({SUMMARY})")
                assert page.text("#source") == address
            width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.run(f"return {width}") == 0
            page.search("of-1-0")
            page.until("return /Before its first step/.test(document.getElementById('why').textContent)")
            page.check()
        finally:
            door.kill()
            driver.set_window_size(1400, 900)


SUMMARY = "document.getElementById('summary').textContent"


def value(page: Timeline, name: str) -> str:
    """Of the choice with this name."""
    found = f"[...document.getElementById('of').options].find((one) => one.text === {name!r}).value"
    return str(page.run(f"return {found}"))
