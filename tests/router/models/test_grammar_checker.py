"""Grammars are compiled where they can hold or end nothing but themselves."""

import asyncio

import pytest

from router.models import grammar_checker, grammar_process
from router.models.grammar import of_schema
from router.models.grammar_checker import MAX_SLOW, GrammarChecker, OwnGrammars
from router.models.grammar_process import Question, problem_of
from testing.conditions import until
from wire.errors import GrammarError, OverloadedError, TwinfangError

DEEP = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(3000)) + '\nr3000: "b"'
"""Compiling it overflows the library's stack, which ends the process."""
GOOD = 'start: "a" | "b"'


def slow_schema(number):
    """Whether its patterns overlap takes the library the square of their number to find out."""
    patterns = {f"^a{i:05}$": {} for i in range(300)}
    schema = {"type": "object", "title": str(number), "patternProperties": patterns}
    return of_schema(schema | {"additionalProperties": False})


@pytest.fixture
async def checker():
    made = GrammarChecker()
    yield made
    await made.close()


async def test_a_grammar_that_ends_its_process_is_refused_and_others_are_checked_meanwhile(checker):
    good = [checker.check(f'start: "a{i}"', param="guided_grammar") for i in range(20)]
    bad = [checker.check(DEEP + f" // {i}", param="guided_grammar") for i in range(3)]
    found = await asyncio.gather(*bad, *good, return_exceptions=True)
    assert all(isinstance(one, GrammarError) and "too deeply" in one.message for one in found[:3])
    assert {one.param for one in found[:3]} == {"guided_grammar"}
    assert found[3:] == [f'start: "a{i}"' for i in range(20)]


async def test_text_comes_back_in_the_librarys_form(checker):
    converted = await checker.check('root ::= "a" | "b"', param="guided_grammar", is_text=True)
    assert not problem_of(converted)
    assert "start" in converted
    with pytest.raises(GrammarError, match="guided_grammar can't be enforced"):
        await checker.check("root ::= (", param="guided_grammar", is_text=True)
    with pytest.raises(GrammarError, match="can't be enforced"):
        await checker.check("root ::= " + "(" * 5000, param="guided_grammar", is_text=True)


async def test_what_was_checked_is_not_compiled_again_and_little_of_it_is_kept(checker, monkeypatch):
    asked = []
    ask = GrammarChecker._ask

    async def count(self, grammar, is_text, max_cpu_s, **members):
        asked.append(grammar)
        return await ask(self, grammar, is_text, max_cpu_s, **members)

    monkeypatch.setattr(GrammarChecker, "_ask", count)
    for _ in range(2):
        await checker.check(GOOD, param="p")
        with pytest.raises(GrammarError):
            await checker.check("start: other", param="p")
    assert asked == [GOOD, "start: other"]
    monkeypatch.setattr(grammar_checker, "MAX_KEPT_BYTES", 4096)
    for i in range(100):
        await checker.check(f'start: "{i}"', param="p")
    assert checker._num_kept_bytes <= 4096
    assert len(checker._kept) < 20


async def test_only_so_many_are_compiled_side_by_side(checker, monkeypatch):
    most, now = 0, 0
    ask = GrammarChecker._ask

    async def count(self, grammar, is_text, max_cpu_s, **members):
        nonlocal most, now
        now += 1
        most = max(most, now)
        try:
            return await ask(self, grammar, is_text, max_cpu_s, **members)
        finally:
            now -= 1

    monkeypatch.setattr(GrammarChecker, "_ask", count)
    await asyncio.gather(*(checker.check(f'start: "{i}"', param="p") for i in range(40)))
    assert most == grammar_checker.MAX_AT_ONCE


async def test_slow_grammars_wait_for_one_another_and_quick_ones_for_none_of_them(checker, monkeypatch):
    """Grammars that take longer than usual start again, and only a limited number of them wait."""
    monkeypatch.setattr(grammar_checker, "MAX_CPU_S", 0.2)
    monkeypatch.setattr(grammar_checker, "QUICK_S", 0.02)
    may_compile, ask = asyncio.Event(), GrammarChecker._ask

    async def held(self, *question, is_quick):
        if not is_quick:  # none ends before all have been found to be slow
            await may_compile.wait()
        return await ask(self, *question, is_quick=is_quick)

    monkeypatch.setattr(GrammarChecker, "_ask", held)
    slow = [asyncio.ensure_future(checker.check(slow_schema(i), param="p")) for i in range(MAX_SLOW // 2 + 4)]
    await until(lambda: sum(one.done() for one in slow) == 4)
    quick = [checker.check(f'start: "{i}"', param="p") for i in range(20)]
    assert len(await asyncio.gather(*quick)) == 20
    may_compile.set()
    found = await asyncio.gather(*slow, return_exceptions=True)
    assert {type(one) for one in found} == {OverloadedError, GrammarError}
    assert all("processor time" in one.message for one in found if isinstance(one, GrammarError))
    refused = [one.message for one in found if isinstance(one, OverloadedError)]
    assert len(refused) == 4
    assert f"slow grammars of this client wait, the limit is {MAX_SLOW // 2}" in refused[0]


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
async def test_clients_take_turns_with_quick_and_with_slow_grammars(checker, monkeypatch, is_slow):
    """Turns are counted as they begin: the process may end those that it has in any order."""
    # A quick grammar that a busy machine makes late would change its queue.
    monkeypatch.setattr(grammar_checker, "QUICK_S", 0.02 if is_slow else 10.0)
    monkeypatch.setattr(grammar_checker, "MAX_CPU_S", 0.05)
    num, grammar_of = (6, slow_schema) if is_slow else (60, 'start: "{}"'.format)
    alices = grammar_of(num)
    begun, num_quick, all_slow, ask = [], 0, asyncio.Event(), GrammarChecker._ask

    async def count(self, grammar, *question, is_quick):
        nonlocal num_quick
        if is_quick != is_slow:
            begun.append(grammar)
        if not is_quick:  # none is compiled again before all have been found to be slow
            await all_slow.wait()
        reply = await ask(self, grammar, *question, is_quick=is_quick)
        num_quick += is_quick
        if num_quick == num + 1:
            all_slow.set()
        return reply

    monkeypatch.setattr(GrammarChecker, "_ask", count)
    bobs = [checker.check(grammar_of(i), param="p", client="bob") for i in range(num)]
    await asyncio.gather(*bobs, checker.check(alices, param="p", client="alice"), return_exceptions=True)
    assert len(begun) == num + 1
    num_at_once = grammar_checker.MAX_SLOW_AT_ONCE if is_slow else grammar_checker.MAX_AT_ONCE
    assert begun.index(alices) <= num_at_once + 1


async def test_grammars_of_clients_that_have_left_are_not_compiled(checker, monkeypatch):
    asked = []
    ask = GrammarChecker._ask

    async def count(self, grammar, is_text, max_cpu_s, **members):
        asked.append(grammar)
        return await ask(self, grammar, is_text, max_cpu_s, **members)

    monkeypatch.setattr(GrammarChecker, "_ask", count)
    tasks = [asyncio.ensure_future(checker.check(f'start: "{i}"', param="p")) for i in range(40)]
    while not asked:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await checker.check(GOOD, param="p")
    assert len(asked) == grammar_checker.MAX_AT_ONCE + 1


async def test_what_one_client_has_had_checked_is_checked_again_for_another(checker, monkeypatch):
    asked = []
    ask = GrammarChecker._ask

    async def count(self, grammar, is_text, max_cpu_s, **members):
        asked.append(grammar)
        return await ask(self, grammar, is_text, max_cpu_s, **members)

    monkeypatch.setattr(GrammarChecker, "_ask", count)
    for salt in ("key alice ", "key bob ", "key alice ", "key bob "):
        await OwnGrammars(checker, "any", salt).check(GOOD, param="p")
    assert asked == [GOOD, GOOD]


async def test_a_process_without_questions_ends_and_the_next_question_starts_another(checker, monkeypatch):
    monkeypatch.setattr(grammar_checker, "IDLE_S", 0.01)
    await checker.check(GOOD, param="p")
    process = checker._process
    assert await asyncio.wait_for(process.wait(), 20) == 0
    assert await checker.check('start: "c"', param="p") == 'start: "c"'


async def test_another_process_is_started_when_one_has_died(checker):
    await checker.check(GOOD, param="p")
    process = checker._process
    process.kill()
    await process.wait()
    await checker._reading
    assert await checker.check('start: "c"', param="p") == 'start: "c"'
    assert checker._process.pid != process.pid


async def test_a_question_that_was_under_way_when_the_process_died_fails_alone(checker):
    await checker.check(GOOD, param="p")
    checker._process.send_signal(19)  # it hears the next question no more
    waiting = asyncio.ensure_future(checker.check('start: "c"', param="p"))
    while not checker._asked:
        await asyncio.sleep(0)
    checker._process.kill()
    with pytest.raises(TwinfangError, match="could not be checked"):
        await waiting
    assert await checker.check('start: "c"', param="p") == 'start: "c"'


def test_processor_time_and_memory_are_limits_of_the_kernel(monkeypatch):
    """A copy that takes more than it may is ended, and its end becomes an answer."""

    def spin(question):
        while True:
            pass

    def grow(question):
        return bytearray(1 << 30)

    for work, words in ((spin, "processor time"), (grow, "256 MB of memory")):
        monkeypatch.setattr(grammar_process, "_answer", work)
        copy = grammar_process._Copy(Question(7, GOOD, False, 0.05, True))
        while not (answer := copy.read()):
            pass
        number, problem, *_ = grammar_process.unpack(answer[grammar_process.LENGTH.size :])
        assert number == 7
        assert words in problem
