"""Where states are kept, learned from where requests leave earlier prompts."""

from engine.memory.cached_start import CachedBlock, Match, Place
from engine.memory.start_sizes import StartSizes
from engine.memory.state_placement import MAX_BRANCHES, Mark, StatePlacement

SIZES = StartSizes(block_tokens=16, block_bytes=1, slot_bytes=100, token_flops=100.0, pair_flops=0.0)
PRICE = 1.0
"""FLOP for each byte: a state has to save 100 FLOP, 1/16 of a block."""


def keys(*texts):
    """Keys of blocks of texts, each given by a name and a number of blocks."""
    chained, found = "", []
    for name, num_blocks in texts:
        for number in range(num_blocks):
            chained = f"{chained}/{name}{number}"
            found.append(chained.encode())
    return found


def places(marks, end):
    return {end - mark.num_blocks: mark.place for mark in marks}


def test_at_first_a_prompt_keeps_the_state_at_its_end():
    marks = StatePlacement(SIZES).mark(Match(keys=keys(("a", 9))))
    assert Mark(9, Place.END) in marks


def test_next_turns_keep_states_at_ends_alone():
    placement = StatePlacement(SIZES, lambda: PRICE)
    texts = []
    for turn in range(100):
        texts.append((f"turn{turn}", 4))
        marks = placement.mark(Match(keys=keys(*texts)))
    assert [mark.place for mark in marks] == [Place.END]


def test_questions_about_documents_keep_a_state_before_the_question():
    """Each document is asked about twice; a question has 3 blocks. Nothing is in the cache."""
    placement = StatePlacement(SIZES, lambda: PRICE)
    for number in range(200):
        asked = keys((f"document{number}", 40), ("first", 3))
        first = placement.mark(Match(keys=asked))
        placement.mark(Match(keys=keys((f"document{number}", 40), ("second", 3))))
    assert set(places(first, 43)) == {3}
    assert places(first, 43)[3] is Place.NEAR_2


def test_a_place_where_requests_leave_is_marked_when_the_second_leaves_there():
    placement = StatePlacement(SIZES)
    first = keys(("system", 10), ("a", 20))
    placement.mark(Match(keys=first))
    second = keys(("system", 10), ("b", 20))
    cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(first[:10])]
    marks = placement.mark(Match([], None, cached, second))
    assert Mark(10, Place.BRANCH) in marks


def test_a_branch_is_known_after_its_blocks_are_gone():
    placement = StatePlacement(SIZES)
    first = keys(("system", 10), ("a", 20))
    cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(first[:10])]
    placement.mark(Match([], None, cached, first))
    assert Mark(10, Place.BRANCH) in placement.mark(Match(keys=keys(("system", 10), ("b", 20))))


def test_a_document_whose_start_is_gone_keeps_one_where_it_was_left():
    """The place does not depend on the length of the next question, so its uses are counted together."""
    placement = StatePlacement(SIZES, lambda: PRICE)
    placement.mark(Match(keys=keys(("document", 40), ("first", 3))))
    marks = [
        placement.mark(Match(keys=keys(("document", 40), (f"question{number}", 5 + number))))
        for number in range(3)
    ]
    assert all(Mark(40, Place.BRANCH) in one for one in marks)


def test_all_branches_on_the_way_are_marked_again():
    """What continues a session computes its prompt anew: others may leave where they did before."""
    placement = StatePlacement(SIZES, lambda: PRICE)
    first, last = (keys(("tools", 10), ("project", 20), (name, 8)) for name in "ab")
    placement.mark(Match(keys=first))
    cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(first[:30])]
    placement.mark(Match([], None, cached, last))
    marks = placement.mark(Match(keys=keys(("tools", 10), ("project", 20), ("b", 8), ("step", 4))))
    assert [mark.num_blocks for mark in marks if mark.place is Place.BRANCH] == [30]


def test_branches_at_every_block_do_not_fill_the_cache():
    placement = StatePlacement(SIZES, lambda: 1e9)
    prompt = keys(("a", 200))
    for length in range(1, 199):
        cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(prompt[:length])]
        placement.mark(Match([], None, cached, [*prompt[:length], b"%d" % length]))
    assert [mark.num_blocks for mark in placement.mark(Match(keys=prompt))] == list(
        range(199 - MAX_BRANCHES, 199)
    )


def test_each_family_learns_where_its_own_prompts_are_left():
    """Prompts of two applications, told apart by their first blocks: chats, and questions about documents."""
    placement = StatePlacement(SIZES, lambda: PRICE)
    chat = [("chat", 10)]
    for number in range(200):
        chat = [("chat", 10), (f"turn{number // 50}", 4 * (number % 50))]
        in_chat = placement.mark(Match(keys=keys(*chat)))
        document = ("questions", 10), (f"document{number}", 40)
        asked = placement.mark(Match(keys=keys(*document, ("first", 3))))
        placement.mark(Match(keys=keys(*document, ("second", 3))))
    assert places(asked, 53) == {3: Place.NEAR_2}
    assert Place.END in {mark.place for mark in in_chat}


def test_nothing_is_marked_that_is_cached_already():
    placement = StatePlacement(SIZES)
    prompt = keys(("a", 12))
    cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(prompt)]
    assert placement.mark(Match(cached, None, [], prompt)) == []
    assert placement.mark(Match()) == []


def test_a_high_price_keeps_no_states():
    placement = StatePlacement(SIZES, lambda: 1e9)
    assert placement.mark(Match(keys=keys(("a", 9)))) == []


def continued(num_blocks, **options):
    """What a prompt keeps that goes on for 8 blocks where the cache ends, after 100 of its kind."""
    placement = StatePlacement(SIZES, lambda: 40.0, **options)
    turns = [(f"turn{turn}", 8) for turn in range(100)]
    for turn in range(100):
        placement.mark(Match(keys=keys((f"context{turn // 10}", num_blocks), *turns[: turn % 10 + 1])))
    prompt = keys(("context9", num_blocks), *turns[:11])
    cached = [CachedBlock(key, None, number + 1, number) for number, key in enumerate(prompt[:-8])]
    return [mark.place for mark in placement.mark(Match(cached, None, [], prompt))]


def test_what_continues_a_long_prompt_keeps_no_state_until_it_has_grown_by_enough():
    assert continued(num_blocks=10) == [Place.END]
    assert continued(num_blocks=1000) == []


def test_a_state_costs_little_if_what_is_given_up_for_it_moves_to_host_memory():
    assert continued(num_blocks=1000, moves_down=True) == [Place.END]
