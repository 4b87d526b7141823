"""Memory limits of a decode worker may change at any time. A change costs time, preemptions or a refusal but no token,
and no page in use is given back."""

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.scheduler import MEMORY_WAIT_S
from moonserve.engine.kv_cache.paged_free_list import DiscardPage, PagedFreeList, PageSupply, Reserve
from moonserve.protocol.errors import InvalidRequest
from tests.decode_worker.driver import Driver
from tests.decode_worker.test_interleavings import DecodeWorker, KeepingDecodeWorker
from tests.engine.kv_cache.shapes import paging
from tests.thoroughness import any_order

NUM_PAGES, PER_PAGE = 4, 2


def make_free_list(supply: PageSupply | None = None, reserved: int = 1) -> PagedFreeList:
    shape = paging(NUM_PAGES, blocks_per_page=PER_PAGE)
    return PagedFreeList(
        shape, supply or PageSupply(NUM_PAGES), reserve=Reserve(low=reserved, high=reserved, idle_s=1.0)
    )


class Page:
    """Gives pages back as the background task does. Their content is lost."""

    def __init__(self, driver: Driver, free_list: PagedFreeList) -> None:
        self.driver, self.free_list = driver, free_list
        self.leaving: list[DiscardPage] = []

    def limit(self, num_pages: int) -> None:
        self.free_list.limit(num_pages)
        self.driver.handle(events.MemoryChanged())

    def begin(self) -> bool:
        action = self.free_list.next_action(self.driver.now)
        if isinstance(action, DiscardPage):
            self.leaving.append(action)
            first = action.page * PER_PAGE
            for block in range(first, first + PER_PAGE):
                assert not self.driver.pool.references_of(block), "a page goes that is in use"
                self.driver.memory.lose(block)
        return action is not None

    def end(self) -> None:
        self.free_list.on_discarded(self.leaving.pop())
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
        self.free_list = make_free_list()
        super().__init__()
        self.pages = Page(self.driver, self.free_list)

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
        free_list = self.free_list
        if not (self.pages.leaving or free_list.is_reclaiming or free_list.num_wanted_pages):
            super().something_progresses()

    @invariant()
    def pages_are_accounted_for(self) -> None:
        self.free_list.validate()

    def teardown(self) -> None:
        self.pages.limit(NUM_PAGES)
        self.pages.settle()
        super().teardown()


test_limits_that_change_at_any_moment_change_no_token = any_order(ElasticDecodeWorker, 40)


def elastic_driver(supply: PageSupply | None = None, reserved: int = 1) -> tuple[Driver, Page]:
    free_list = make_free_list(supply, reserved)
    driver = Driver(num_blocks=NUM_PAGES * PER_PAGE, free_list=free_list, max_model_len=40)
    return driver, Page(driver, free_list)


def start_two(driver: Driver, max_tokens: int) -> None:
    for name, first in (("a", 0), ("b", 100)):
        driver.start([first + i for i in range(7)], name, max_tokens=max_tokens)


class EmptyPromises(PageSupply):
    """Supply that always reports a page of room, even if there is none."""

    def room(self) -> int:
        return max(1, super().room())


def test_wait_for_elastic_memory_is_bounded() -> None:
    driver, pages = elastic_driver(EmptyPromises(3), reserved=0)
    start_two(driver, max_tokens=12)
    for _ in range(200):
        if not driver.advance():
            driver.wait(0.5)  # a worker that waits for memory checks again
        pages.settle()
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"a": 11, "b": 11}
    assert driver.state.counters.num_preemptions == 1
    assert driver.now >= MEMORY_WAIT_S, "they were to wait a moment"
    assert not driver.failures


def test_smaller_pool_preempts_sequences_which_all_finish() -> None:
    driver, pages = elastic_driver()
    start_two(driver, max_tokens=6)
    driver.compute()
    assert driver.state.num_running == 2
    pages.limit(2)
    assert driver.state.counters.num_preemptions == 0, "nothing that a step reads goes during it"
    driver.compute()
    assert driver.state.counters.num_preemptions == 1
    pages.settle()
    assert pages.free_list.num_held_pages <= 2
    while driver.advance():
        pages.settle()
    assert {name: len(tokens) for name, tokens in driver.tokens.items()} == {"a": 5, "b": 5}
    assert not driver.failures
    assert pages.free_list.num_held_pages <= 2


def test_a_sequence_that_no_longer_fits_fails_and_a_reservation_is_refused() -> None:
    driver, pages = elastic_driver()
    driver.start(list(range(14)), "long", max_tokens=8)
    pages.limit(1)
    driver.compute()
    [failure] = driver.failures["long"]
    assert isinstance(failure.error, InvalidRequest)
    pages.settle()
    assert pages.free_list.num_held_pages <= 1
    refusals = driver.reserve(list(range(14)), "again")
    assert "never fit" in str(refusals)
    driver.start([1, 2, 3], "short", max_tokens=3)
    while driver.advance():
        pages.settle()
    assert len(driver.tokens["short"]) == 2
