"""Memory limits of a decode worker may change at any time. A change costs time, preemptions or a refusal but no token,
and no page in use is given back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from decode_worker import events
from decode_worker.schedule import PATIENCE_S
from engine.elastic.paged_blanks import GiveBack, PagedBlanks, Reserve, Supply
from protocol.errors import InvalidRequest
from tests.decode_worker.driver import Driver
from tests.decode_worker.test_interleavings import DecodeWorker, KeepingDecodeWorker
from tests.engine.elastic.shapes import paging
from tests.thoroughness import examples

NUM_PAGES, PER_PAGE = 4, 2


def make_blanks(supply: Supply | None = None, reserved: int = 1) -> PagedBlanks:
    shape = paging(NUM_PAGES, blocks_per_page=PER_PAGE)
    return PagedBlanks(shape, supply or Supply(NUM_PAGES), reserve=Reserve(low=reserved, high=reserved, idle_s=1.0))


class Page:
    """Gives pages back as the background task does. Their content is lost."""

    def __init__(self, driver: Driver, blanks: PagedBlanks) -> None:
        self.driver, self.blanks = driver, blanks
        self.leaving: list[GiveBack] = []

    def limit(self, num_pages: int) -> None:
        self.blanks.limit(num_pages)
        self.driver.handle(events.MemoryChanged())

    def begin(self) -> bool:
        action = self.blanks.next_action(self.driver.now)
        if isinstance(action, GiveBack):
            self.leaving.append(action)
            first = action.page * PER_PAGE
            for block in range(first, first + PER_PAGE):
                assert not self.driver.pool.references_of(block), "a page goes that is in use"
                self.driver.memory.lose(block)
        return action is not None

    def end(self) -> None:
        self.blanks.given_back(self.leaving.pop())
        self.driver.handle(events.MemoryChanged())

    def settle(self) -> None:
        while self.begin() or self.leaving:
            while self.leaving:
                self.end()


class ElasticDecodeWorker(KeepingDecodeWorker):
    """Decode worker over a paged pool whose limit changes at random."""

    num_blocks = NUM_PAGES * PER_PAGE
    policy = DecodeWorker.policy

    def __init__(self) -> None:
        self.blanks = make_blanks()
        super().__init__()
        self.pages = Page(self.driver, self.blanks)

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def limit(self, num_pages: int) -> None:
        self.pages.limit(num_pages)

    @rule()
    def begin_work(self) -> None:
        self.pages.begin()

    @precondition(lambda self: self.pages.leaving)
    @rule()
    def end_work(self) -> None:
        self.pages.end()

    @invariant()
    def something_progresses(self) -> None:
        """The base invariant holds, except while pages are being given back."""
        blanks = self.blanks
        if not (self.pages.leaving or blanks.num_leaving_pages or blanks.num_wanted_pages):
            super().something_progresses()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.blanks.validate()

    def teardown(self) -> None:
        self.pages.limit(NUM_PAGES)
        self.pages.settle()
        super().teardown()


ElasticDecodeWorker.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
test_limits_that_change_at_any_moment_change_no_token = ElasticDecodeWorker.TestCase


def elastic_driver(supply: Supply | None = None, reserved: int = 1) -> tuple[Driver, Page]:
    blanks = make_blanks(supply, reserved)
    driver = Driver(num_blocks=NUM_PAGES * PER_PAGE, blanks=blanks, max_model_len=40)
    return driver, Page(driver, blanks)


def start_two(driver: Driver, max_tokens: int) -> None:
    for name, first in (("a", 0), ("b", 100)):
        driver.start([first + i for i in range(7)], name, max_tokens=max_tokens)


class EmptyPromises(Supply):
    """Supply that always reports a page of room, even if there is none."""

    def room(self) -> int:
        return max(1, super().room())


def test_a_worker_does_not_wait_for_ever_for_memory_that_others_seem_to_have() -> None:
    driver, pages = elastic_driver(EmptyPromises(3), reserved=0)
    start_two(driver, max_tokens=12)
    for _ in range(200):
        if not driver.advance():
            driver.wait(0.5)  # a worker that waits for memory checks again
        pages.settle()
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"a": 11, "b": 11}
    assert driver.state.counters.num_preemptions == 1
    assert driver.now >= PATIENCE_S, "they were to wait a moment"
    assert not driver.failures


def test_a_lower_ceiling_preempts_who_is_in_the_way_and_all_go_on_one_after_the_other() -> None:
    driver, pages = elastic_driver()
    start_two(driver, max_tokens=6)
    driver.compute()
    assert driver.state.num_running == 2
    pages.limit(2)
    assert driver.state.counters.num_preemptions == 0, "nothing that a step reads goes during it"
    driver.compute()
    assert driver.state.counters.num_preemptions == 1
    pages.settle()
    assert pages.blanks.num_held_pages <= 2
    while driver.advance():
        pages.settle()
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"a": 5, "b": 5}
    assert not driver.failures
    assert pages.blanks.num_held_pages <= 2


def test_a_sequence_that_no_longer_fits_fails_and_a_reservation_is_refused() -> None:
    driver, pages = elastic_driver()
    driver.start(list(range(14)), "long", max_tokens=8)
    pages.limit(1)
    driver.compute()
    [failure] = driver.failures["long"]
    assert isinstance(failure.error, InvalidRequest)
    pages.settle()
    assert pages.blanks.num_held_pages <= 1
    refusals = driver.reserve(list(range(14)), "again")
    assert "never fit" in str(refusals)
    driver.start([1, 2, 3], "short", max_tokens=3)
    while driver.advance():
        pages.settle()
    assert len(driver.tokens["short"]) == 2
