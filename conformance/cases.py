"""The cases: which requests are sent, and what happens to the pair meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from conformance.client import Reply
from conformance.faults import frozen, kill
from conformance.models import ATTENTION, HYBRID
from conformance.pair import Profile
from conformance.questions import Question, lengths, random_ids, random_questions, shared_prefixes
from conformance.trial import Trial

PLAIN = Profile("plain", HYBRID, drafts=False)
DRAFTS = Profile("drafts", HYBRID, drafts=True)
ATTENTION_DRAFTS = Profile("attention-drafts", ATTENTION, drafts=True)

READ_POSTED_S = 0.7
"""Time after which a decode server that was thawed has begun to read."""
AT_ONCE = 8
"""Prompts that use freed memory again: as many as there are rows."""
ANSWERING_S = 0.3
"""Time after which answers have begun."""

Futures = list[Future[Reply]]


@dataclass(frozen=True)
class Case:
    """One case."""

    name: str
    title: str
    ask: Callable[[random.Random, int], list[Question]]
    """Makes the questions of one run; the number is how many tokens a long answer has."""
    play: Callable[[Trial, Sequence[Question]], Futures]
    """Sends the questions and does what the case is about. Returns the replies, in the questions' order."""
    profile: Profile = PLAIN


# --- what is asked -------------------------------------------------------------------------------


def few(rng: random.Random, _long: int) -> list[Question]:
    return random_questions(rng, lengths(rng, 6), 16)


def few_long_answers(rng: random.Random, long: int) -> list[Question]:
    return random_questions(rng, lengths(rng, 6), long)


def more_than_rows(rng: random.Random, long: int) -> list[Question]:
    return random_questions(rng, lengths(rng, 24), long)


def many(rng: random.Random, _long: int) -> list[Question]:
    return random_questions(rng, lengths(rng, 32, least=20), 16)


def a_burst(rng: random.Random, _long: int) -> list[Question]:
    return random_questions(rng, lengths(rng, 64), 8)


def short(rng: random.Random, _long: int) -> list[Question]:
    """One token, and lengths at the edges of blocks."""
    return random_questions(rng, [1, 1, 2, 3, 1, 15, 16, 17, 1, 31, 32, 33, 127, 128, 129, 1], 16)


# --- what happens meanwhile ----------------------------------------------------------------------


def undisturbed(trial: Trial, questions: Sequence[Question]) -> Futures:
    return trial.send(questions)


def late_read(trial: Trial, questions: Sequence[Question]) -> Futures:
    """The decode server stands still until the leases are over and their memory has been used again."""
    with frozen(trial.pair, "decode"):
        sent = trial.send(questions)
        trial.until_handed_over(len(questions))
        trial.wait_out_lease()
        rng = random.Random(str(questions[0].prompt))
        for _ in range(2):
            trial.pair.prefill([random_ids(rng, 240) for _ in range(AT_ONCE)])
    return sent


def killed_in_mid_read(trial: Trial, questions: Sequence[Question]) -> Futures:
    """The prefill server stands still while it is read, and is killed."""
    with ExitStack() as stands:
        sent = _in_mid_read(trial, questions, stands)
        kill(trial.pair, "prefill")
    trial.pair.recover()
    return sent


def frozen_in_mid_read(trial: Trial, questions: Sequence[Question]) -> Futures:
    """The prefill server stands still while it is read, for longer than a lease; then it goes on."""
    with ExitStack() as stands:
        sent = _in_mid_read(trial, questions, stands)
        trial.wait_out_lease()
    return sent


def frozen_in_mid_answer(trial: Trial, questions: Sequence[Question]) -> Futures:
    """The decode server stands still while it answers, for longer than a lease; then it goes on."""
    sent = trial.send(questions)
    trial.wait(ANSWERING_S)
    with frozen(trial.pair, "decode"):
        trial.wait_out_lease()
    return sent


def cancelled(trial: Trial, questions: Sequence[Question]) -> Futures:
    """Every second client goes away when its prompt is prefilled and not yet read."""
    with frozen(trial.pair, "decode"):
        sent = trial.send(questions)
        trial.until_handed_over(len(questions))
        for future in sent[::2]:
            future.cancel()
        trial.wait(ANSWERING_S)
    return sent


def in_two_waves(trial: Trial, questions: Sequence[Question]) -> Futures:
    """The second half is sent when the first has been answered, and finds its prefixes in caches."""
    half = len(questions) // 2
    first = trial.send(questions[:half])
    trial.until_answered(first)
    return [*first, *trial.send(questions[half:])]


def _in_mid_read(trial: Trial, questions: Sequence[Question], stands: ExitStack) -> Futures:
    """Freezes the prefill server, until ``stands`` is closed, just before the decode server reads from it."""
    with frozen(trial.pair, "decode"):
        sent = trial.send(questions)
        trial.until_handed_over(len(questions))
        stands.enter_context(frozen(trial.pair, "prefill"))
    trial.wait(READ_POSTED_S)
    return sent


def prefixes(rng: random.Random, _long: int) -> list[Question]:
    return shared_prefixes(rng)


CASES = (
    Case("one-token", "one-token prompts, and others at edges of blocks", short, undisturbed),
    Case(
        "late-read",
        "late read after release: decode frozen past the lease, its memory used again",
        few,
        late_read,
    ),
    Case("killed", "prefill killed in mid-read", few, killed_in_mid_read),
    Case("frozen-read", "prefill frozen in mid-read past the lease, thawed", few, frozen_in_mid_read),
    Case(
        "frozen-answer",
        "decode frozen in mid-answer past the lease, thawed",
        few_long_answers,
        frozen_in_mid_answer,
    ),
    Case("cancel", "cancel between prefill and decode, every second of 6", few, cancelled),
    Case("burst", "burst beyond room: 64 prompts at once", a_burst, undisturbed),
    Case("pressure", "block reuse under pressure: 32 prompts, room for about 10", many, undisturbed),
    Case("queue", "queue longer than the lease: 24 long answers, 8 rows", more_than_rows, undisturbed),
    Case("drafts", "mixed drafts and prefix caching, hybrid model", prefixes, in_two_waves, DRAFTS),
    Case(
        "drafts-attention",
        "mixed drafts and prefix caching, model of attention only",
        prefixes,
        in_two_waves,
        ATTENTION_DRAFTS,
    ),
)
