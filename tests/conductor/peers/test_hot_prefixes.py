from moonserve.conductor.peers.hot_prefixes import HALF_LIFE_S, HotPrefixLearner
from moonserve.protocol.kv_blocks import BlockKey
from tests.conductor.cluster import chain

SYSTEM = chain("system", 5)


def observe(learner: HotPrefixLearner, hot: dict[BlockKey, int], count: int, share: float = 0.5) -> None:
    """Observes prompts, of which `share` begin with SYSTEM and none of the others shares anything."""
    for number in range(count):
        own = chain(f"own {number}", 3)
        learner.observe(SYSTEM + own if number < share * count else own, hot)


def test_a_prefix_of_many_prompts_is_hot_up_to_where_they_differ() -> None:
    learner = HotPrefixLearner()
    observe(learner, {}, 1_000)
    assert learner.hot({}, 4, learner.num_requests, now=0.0) == {SYSTEM[0]: 5}


def test_a_prompt_that_only_ends_sooner_does_not_move_the_branch_and_one_that_differs_does() -> None:
    learner = HotPrefixLearner()
    observe(learner, {}, 1_000)
    learner.observe(SYSTEM[:2], {})
    assert learner.hot({}, 4, 1_000, now=0.0) == {SYSTEM[0]: 5}
    learner.observe(SYSTEM[:3] + chain("other", 4), {})
    assert learner.hot({}, 4, 1_000, now=0.0) == {SYSTEM[0]: 3}


def test_one_busy_session_is_not_hot() -> None:
    learner = HotPrefixLearner()
    for turn in range(60):
        learner.observe(chain("session", 3 + turn), {})
    assert learner.hot({}, 4, learner.num_requests, now=0.0) == {}


def test_a_hot_prefix_stays_hot_while_all_shards_share_it_and_cools_down() -> None:
    learner, hot = HotPrefixLearner(), {SYSTEM[0]: 5}
    observe(learner, hot, 200, share=0.1)  # a fourth of a prefix that has a tenth of 800 prompts in the fleet
    assert learner.hot(hot, 4, 800, now=0.0) == {SYSTEM[0]: 5}
    assert learner.hot({}, 4, 800, now=0.0) == {}  # so few would not make it hot
    assert learner.hot(hot, 4, 800, now=6 * HALF_LIFE_S) == {}
    assert learner.num_requests < 4
