"""The gateway's pages in a real browser, with a cluster under load: content, keyboard access, and any width."""

import itertools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from moonserve.models import demo_model_path
from tests.browser import Page, page
from tests.e2e.cluster import Cluster, prompt_of, running_cluster
from tests.e2e.load import BackgroundLoad

# Interactive elements.
ACTIVE = "input, button, summary, a[href], select, [tabindex='0']"

WORKERS = ("prefill-0", "decode-0")
PROBES = Path(__file__).with_name("dashboard_probes.js").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("dashboard")
    with (
        running_cluster(demo_model_path(), folder / "logs") as started,
        BackgroundLoad(started, 4096, streams=1, pause_s=0.2),
    ):
        for _ in range(2):
            started.complete("the same beginning, again and again " * 12, max_tokens=4)
        yield started


@pytest.fixture
async def dashboard(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Page]:
    """The page, once it shows all sections of a cluster under load."""
    async with page(f"{cluster.url}/dashboard", tmp_path / "profile") as opened:
        await opened.wait_for("document.body?.innerText.includes('Latest requests')")
        await opened.evaluate(PROBES)
        yield opened


async def assert_all_fits(opened: Page, width: int, *, dark: bool = False) -> None:
    """Asserts that nothing is cut off, or extends beyond a window of this width."""
    await opened.look(width=width, dark=dark)
    await opened.wait_for(f"innerWidth === {width} && sideways() <= 0")
    assert await opened.evaluate("cutOff()") == []


async def test_the_page_shows_the_cluster_under_load(cluster: Cluster, dashboard: Page) -> None:
    await dashboard.wait_for("document.querySelector('#health li')?.textContent.length > 20")
    for part in (
        *("prefill-0", "decode-0", "store-0", "TTFT, p95", "Between tokens, p95", "Not served"),
        *("Transfers by rail", "Hot prefixes"),
    ):
        await dashboard.wait_for(f"document.body.innerText.includes({part!r})")
    # Latencies of the last minute.
    await dashboard.wait_for(r"/p50 [0-9.]+ m?s/.test(document.body.innerText)")
    for _ in range(40):  # enough cached tokens for an area that can be seen
        cluster.complete("the same beginning, again and again " * 12, max_tokens=1)
    for chart in ("ttft", "tbt", "time", "tokens", "cache", "phases", "kv", "step", "rails"):
        await dashboard.wait_for(f"coloured('chart-{chart}') > 3")
    flows = "document.querySelectorAll('#map path:not(.answers)[marker-end]').length"
    await dashboard.wait_for(f"{flows} > 1 && document.querySelector('#map path.answers') !== null")
    assert not dashboard.complaints


async def test_the_first_line_says_what_is_wrong_and_why(dashboard: Page) -> None:
    """The rules on figures of a healthy cluster of two workers, each with one change."""
    await dashboard.wait_for("globalThis.rules !== undefined")
    assert await dashboard.evaluate("judged(() => {})") == []
    assert await dashboard.evaluate("SICK.length > 10 && SICK.map(misjudged).filter(Boolean)") == []


async def test_the_page_shows_what_happens_to_a_large_cluster(dashboard: Page) -> None:
    """64 instances, one of which leaves; the page's own answers are replaced."""
    await dashboard.evaluate("enlarge()")
    await dashboard.wait_for("document.querySelectorAll('#role-decode article').length === 64")
    await dashboard.wait_for("document.body.innerText.includes('decode-64 (decode) left the cluster')")
    for width in (390, 800, 1280):
        await assert_all_fits(dashboard, width)
        await dashboard.wait_for("document.querySelector('#map .gone') !== null")
    await dashboard.evaluate("document.querySelector('#health a').click()")
    assert await dashboard.evaluate("document.activeElement.id") == "map"


async def test_the_dashboard_fits_at_every_width_and_in_every_theme(dashboard: Page) -> None:
    grounds = set()
    for width in (390, 1280):
        for dark in (False, True):
            await assert_all_fits(dashboard, width, dark=dark)
            ground = "getComputedStyle(document.body).backgroundColor"
            grounds.add((dark, await dashboard.evaluate(ground)))
    assert len(grounds) == 2, "light is light and dark is dark"
    await dashboard.evaluate("document.querySelector('#requests button').click()")
    await dashboard.wait_for("document.querySelectorAll('#explained [role=row]').length > 1")
    await dashboard.evaluate("document.querySelector('#explained summary').click()")
    await assert_all_fits(dashboard, 390)


async def test_the_tab_key_reaches_every_control_with_a_visible_focus(dashboard: Page) -> None:
    expected = await dashboard.evaluate(
        f"[...document.querySelectorAll({ACTIVE!r})].filter(e => e.checkVisibility()).length"
    )
    reached = []
    for _ in range(expected + 4):  # requests come and go meanwhile
        await dashboard.press("Tab")
        reached.append(await dashboard.evaluate("focused()"))
    names = [each["key"] for each in reached]
    controls = [name for name in names if not name.startswith(("req-", "finding-"))]
    cards = ["instance-prefill-0", "instance-decode-0", "instance-store-0"]
    assert controls[:6] == ["Chat", *cards, "request", "Explain"]
    assert sum(name.startswith("req-") for name in names) >= expected - 6 - 4
    assert all(each["outline"] for each in reached if each["tag"] != "BODY")
    # No clickable element lacks keyboard access.
    unreachable = "[...document.querySelectorAll('[onclick], [role=button]:not(button)')].length"
    assert await dashboard.evaluate(unreachable) == 0


async def test_the_dashboard_explains_a_request_by_keyboard_alone(cluster: Cluster, dashboard: Page) -> None:
    known_id = cluster.complete("explain me, please", max_tokens=4)["id"]
    is_open = "document.getElementById('explanation').open"
    await dashboard.evaluate("document.getElementById('request').focus()")
    await dashboard.write(known_id)
    await dashboard.press("Enter")
    await dashboard.wait_for(f"{is_open} && document.querySelectorAll('#explained table').length")
    text = await dashboard.evaluate("document.getElementById('explanation').innerText")
    for part in (known_id, "prefill-0", "decode-0", "predicted TTFT", "finished after", "Where its time went"):
        assert part in text
    # The waterfall: phases one after the other, those of the prediction, and the pieces of the answer.
    for kind, least in (("span:not(.predicted)", 4), ("span.predicted", 1), ("tick", 2), ("mark", 4)):
        assert await dashboard.evaluate(f"document.querySelectorAll('.waterfall .{kind}').length") >= least
    assert 99 < await dashboard.evaluate("waterfallEnd()") < 101
    assert "undefined" not in text
    # The dialog is labelled for screen readers and contains the focus.
    named = "document.getElementById(document.getElementById('explanation').getAttribute('aria-labelledby'))"
    assert known_id in await dashboard.evaluate(f"{named}.textContent")
    inside = "document.getElementById('explanation').contains(document.activeElement)"
    assert await dashboard.evaluate(inside)
    await dashboard.press("Escape")
    await dashboard.wait_for(f"!{is_open}")
    assert await dashboard.evaluate("document.activeElement.id") == "request"
    # From the list of latest requests: the focus returns to the row, although it is redrawn every second.
    for _ in range(2):
        await dashboard.press("Tab")
    row = await dashboard.evaluate("document.activeElement.dataset.key")
    await dashboard.press("Enter")
    await dashboard.wait_for(f"{is_open} && document.querySelectorAll('#explained table').length")
    await dashboard.press("Escape")
    await dashboard.wait_for(f"!{is_open}")
    focused = await dashboard.evaluate("document.activeElement.dataset.key || 'request'")
    assert focused in (row, "request"), "its row, or the field where the row has gone"
    assert not dashboard.complaints


async def test_the_dashboard_shows_the_latest_steps_of_a_worker(cluster: Cluster, dashboard: Page) -> None:
    """A prompt's chunks and the steps that continue it, as the workers report them and as the page draws them."""
    reply = cluster.complete(prompt_of("steps", 1_500), max_tokens=40, ignore_eos=True)
    with cluster.client() as client:
        prompts, decodes = (client.get(f"/v1/instances/{name}/steps").json()["steps"] for name in WORKERS)
        assert client.get("/v1/instances/store-0/steps").status_code == 404
    chunks = [step for step in prompts if step["context_tokens"] >= 512]
    assert sum(step["prompt_tokens"] for step in chunks) >= reply["usage"]["prompt_tokens"] - 512 > 512
    assert {step["decode_tokens"] for step in prompts} == {step["prompt_tokens"] for step in decodes} == {0}
    assert sum(step["context_tokens"] > 1_500 for step in decodes) >= 39, "each decode step has the whole context"
    pairs = itertools.pairwise(decodes)
    assert all(b["ago_s"] <= a["ago_s"] - a["seconds"] + 1e-6 for a, b in pairs), "one after the other"
    for name, kind in zip(WORKERS, ("prompt", "decode"), strict=True):
        await dashboard.evaluate(f"document.querySelector('#instance-{name} summary').click()")
        await dashboard.evaluate(f"document.querySelector('#instance-{name} button').click()")
        await dashboard.wait_for(f"document.querySelectorAll('#explained .steps .{kind}').length > 2")
        for width in (390, 1280):
            await assert_all_fits(dashboard, width, dark=width == 390)
            await dashboard.evaluate("document.querySelector('#explained > button').click()")
        text = await dashboard.evaluate("document.getElementById('explanation').innerText")
        assert re.search(rf"(?s)Steps of {name}.*\d steps in .* busy for [0-9.]+ %.*The slowest", text)
        await dashboard.press("Escape")
    assert not dashboard.complaints


async def test_the_chat_page_streams_stops_edits_and_links_to_the_reasons(cluster: Cluster, tmp_path: Path) -> None:
    text, linked = "document.getElementById('log').innerText", "document.querySelector('article.assistant a')"
    async with page(cluster.url, tmp_path / "profile") as opened:
        await opened.wait_for("document.getElementById('state')?.textContent.includes('demo')")
        await opened.evaluate("[current.temperature, current.max_tokens] = [0, 40]")
        await opened.write("Write a function that adds")
        await opened.press("Enter")
        await opened.wait_for(f"{linked} !== null")
        for part in ("first token after", "prompt tokens cached", "Retry"):
            assert part in await opened.evaluate(text)
        await opened.evaluate("document.querySelector('article.user button').click()")
        await opened.write(" and another one")
        await opened.press("Enter")
        await opened.wait_for(f"document.querySelector('article.assistant .text').innerText.length > 1 || {linked}")
        await opened.press("Escape")
        await opened.wait_for(f"{linked} !== null && document.querySelectorAll('article').length === 2")
        assert "and another one" in await opened.evaluate("localStorage.getItem('moonserve chat')")
        await opened.evaluate(PROBES)
        for width in (390, 1280):
            await assert_all_fits(opened, width, dark=width == 390)
        await opened.evaluate(f"{linked}.click()")
        await opened.wait_for("document.querySelectorAll('#explanation[open] #explained table').length")
        assert not opened.complaints
