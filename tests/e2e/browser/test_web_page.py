"""The coordinator's web page in a real browser: Debian's Chromium, without a screen."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
from collections.abc import Iterator

import pytest
from PIL import Image
from tests.e2e.browser.chromium import Browser

from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.coordinator.web.cache import StatusCache
from collectived_runtime.coordinator.web.routes import make_page_server
from collectived_runtime.http.server import HttpServer

HOSTILE = '"><img src=x onerror=document.title="owned"><script>document.title="owned"</script>\u202e'
SECRET = "s3cret"


def reply() -> pb.StatusReply:
    """A job whose rank 1 is late, with names that would like to be markup."""
    members = [
        common.Member(
            rank=rank,
            worker=0,
            host=f"{HOSTILE}-{'long' * 40}",
            pid=70 + rank,
            label=HOSTILE,
            last_instance=6,
            last_op="all_reduce(sum)",
            last_site=f"{'a_very_long_name_of_a_module' * 8}.py:88",
            idle_seconds=2.5,
        )
        for rank in range(3)
    ]
    group = pb.GroupStatus(
        name=f"j/{HOSTILE}", generation=(1 << 63) - 1, state="ready", size=3, members=members, collectives_done=1234567
    )
    group.in_flight.add(
        instance=7, op="barrier()", site="train.py:90", seconds=2.5, arrived=[0, 2], missing=[1], bytes=2048
    )
    verdict = common.Verdict(group="j/old", generation=3, code=14, message=f"rank 0 lost {HOSTILE} {'x' * 300}")
    return pb.StatusReply(
        unix_time=1000.0,
        coordinator=pb.CoordinatorStatus(address="unix:/c.sock", epoch=9, pid=60, uptime_seconds=75, job="j"),
        workers=[pb.WorkerStatus(task=0, host=HOSTILE, pid=61, connected=True, devices=["x/device:CPU:0"])],
        groups=[group],
        failures=[pb.Failure(unix_time=940.0, verdict=verdict)],
    )


class Served:
    """The page from a thread of its own, whose status the test says. `link` has the token in it."""

    def __init__(self, address: str) -> None:
        self.reply = reply()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(address), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.address.rpartition(':')[2]}/"
        self.link = f"{self.url}#token={viewing_token(SECRET)}"

    async def _start(self, address: str) -> HttpServer:
        self._picture = StatusCache(self._status)
        server = make_page_server(address, self._picture, lambda: True, TokenAuthenticator(SECRET))
        await server.start()
        return server

    async def _stop(self) -> None:
        await self._server.stop()
        await self._picture.close()

    async def _status(self) -> pb.StatusReply:
        return self.reply

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("the page is not tried in a browser: chromium is not installed (apt-get install chromium)")
    with Browser(program) as one:
        yield one


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    made = Served(getattr(request, "param", "0"))
    yield made
    made.close()


def test_it_shows_the_job_live_and_hostile_names_as_they_are(browser: Browser, served: Served) -> None:
    browser.look_like(1280, 900, "light")
    browser.console.clear()
    browser.fetched.clear()
    browser.open(served.link)
    browser.until("document.querySelectorAll('#tables td').length > 30")
    text = browser.evaluate("document.body.innerText")
    for words in (
        "WAITING",
        "barrier() #7 at train.py:90 has waited 2.5 s for rank 1",
        "1,234,567",
    ):
        assert words in text
    assert "9223372036854775807" not in text, "its generation is for programs"
    assert HOSTILE.replace("\u202e", "\ufffd") in text and "\u202e" not in text, "nor does it turn round what follows"
    assert browser.evaluate("document.title") == "(2) j"
    assert browser.evaluate("document.querySelectorAll('img').length + document.scripts.length") == 1, "our own script"

    served.reply.groups[0].in_flight.clear()
    served.reply.failures.clear()
    browser.until(
        "document.body.innerText.includes('Nothing is wrong.') && !document.body.innerText.includes('barrier()')"
    )
    assert browser.evaluate("document.title") == "j"

    served.stop()
    browser.until("document.body.innerText.includes('the coordinator does not answer: what is shown is')")
    assert browser.evaluate("document.body.innerText").count("1,234,567") == 2, "what was seen last stays"
    assert all(url.startswith((served.url, "data:,")) for url in browser.fetched), browser.fetched
    refused = [line for line in browser.console if "ERR_CONNECTION" not in line]
    assert not refused, "nothing breaks its own policy"


def test_the_missing_rank_stands_first_and_no_call_site_is_broken(browser: Browser, served: Served) -> None:
    served.reply.groups[0].in_flight[0].site = f"{'a_long_name_of_a_module' * 3}.py:90"
    before = pb.GroupStatus(name="before", state="running")
    before.members.add(rank=1, worker=0, host="h")
    served.reply.groups.insert(0, before)  # of which nobody is missing
    browser.look_like(1280, 900, "light")
    browser.open(served.link)
    browser.until("document.querySelectorAll('#tables td').length > 30")
    section = "[...document.querySelectorAll('section')].find((one) => one.innerText.startsWith('In flight'))"
    row = f"{section}.querySelector('tbody tr')"
    assert browser.evaluate(f"{row}.cells[0].innerText") == "rank 1"
    ranks = section.replace("In flight", "Ranks")
    assert browser.evaluate(f"{ranks}.querySelector('tbody tr').cells[0].className").startswith("bad")
    for width, height in ((1280, 900), (320, 640)):
        browser.look_like(width, height, "light", width < 600)
        browser.until(f"innerWidth === {width}")
        text = f"const text = new Range(); text.selectNodeContents({row}.querySelector('.code'))"
        assert browser.evaluate(f"(() => {{ {text}; return text.getClientRects().length; }})()") == 1, "one line"
        sentence = "document.querySelector('#problems li code')"
        assert browser.evaluate(f"{sentence}.innerText") == served.reply.groups[1].in_flight[0].site
        text = f"const text = new Range(); text.selectNodeContents({sentence})"
        assert browser.evaluate(f"(() => {{ {text}; return text.getClientRects().length; }})()") == 1, "one line"


def test_a_failure_leads_to_what_its_error_means(browser: Browser, served: Served) -> None:
    browser.look_like(1280, 900, "light")
    browser.console.clear()
    browser.open(served.link)
    browser.until("document.querySelector('#tables td a') !== null")
    assert browser.evaluate("document.querySelector('#tables td a').innerText") == "UNAVAILABLE"
    browser.evaluate("document.querySelector('#tables td a').click()")
    browser.until("document.querySelector('section:target h2') !== null")
    assert browser.evaluate("document.querySelector('section:target h2').innerText") == "UnavailableError (UNAVAILABLE)"
    browser.evaluate("document.querySelector('a').click()")
    browser.until("document.querySelectorAll('#tables td').length > 30")
    assert not browser.console


def test_it_keeps_a_small_history_of_what_was_carried_waited_and_failed(browser: Browser, served: Served) -> None:
    rate = served.reply.groups[0].rates.add(op="all_reduce", seconds=60, bus_bytes=10**9, busy_seconds=0.5)
    browser.look_like(1280, 900, "light")
    browser.open(served.link)
    browser.until("document.body.innerText.includes('2.00 GB/s')")
    assert "0.0 %" in browser.evaluate("document.querySelector('#facts').innerText")
    served.reply.unix_time += 1
    served.reply.failures.add(unix_time=served.reply.unix_time - 5)
    rate.busy_seconds, rate.waiting_seconds = 1.0, 30.0
    browser.until("document.body.innerText.includes('1.00 GB/s')")
    assert "50.0 %" in browser.evaluate("document.querySelector('#facts').innerText")
    lines = "[...document.querySelectorAll('#facts polyline')]"
    bus, waiting, failed = browser.evaluate(f"{lines}.map((one) => one.getAttribute('points')).filter(Boolean)")
    assert bus.split() == ["118,1.0", "119,10.0"] and waiting.split() == ["118,19.0", "119,1.0"]
    assert failed.split() == ["118,19.0", "119,1.0"], "the failure of a minute ago does not count"


def test_it_is_light_or_dark_as_its_reader_likes_and_fits_a_phone(browser: Browser, served: Served) -> None:
    browser.open(served.link)
    browser.until("document.querySelectorAll('#tables td').length > 30")
    for width, height, scheme, phone in (
        (1280, 900, "light", False),
        (1110, 900, "dark", False),
        (320, 640, "dark", True),
    ):
        browser.look_like(width, height, scheme, phone)
        browser.until(f"innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches")
        wide = browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, "nothing is scrolled sideways"
        picture = Image.open(io.BytesIO(browser.screenshot())).convert("L")
        corner = picture.getpixel((2, 2))
        assert isinstance(corner, int) and (corner < 60) == (scheme == "dark"), (scheme, corner)
    assert browser.evaluate("document.querySelector('#pause').offsetHeight") >= 36, "a thumb hits it"


@pytest.mark.parametrize("served", ["0", "0.0.0.0:0"], indirect=True)
def test_a_link_with_its_token_opens_it_and_without_one_it_asks(browser: Browser, served: Served) -> None:
    browser.open(served.url)
    browser.until("document.querySelector('dialog')?.open")
    assert "barrier()" not in browser.evaluate("document.body.innerText")
    browser.evaluate(
        f"document.querySelector('#token').value = '{SECRET}'; document.querySelector('dialog button').click()"
    )
    browser.until("document.body.innerText.includes('barrier()')")
    browser.evaluate("sessionStorage.clear()")

    browser.open("about:blank")
    browser.open(served.link)
    browser.until("document.body.innerText.includes('barrier()')")
    assert browser.evaluate("location.href") == served.url, "the token is not left in the address bar"
    assert not any(SECRET in url or "token=" in url for url in browser.fetched)
