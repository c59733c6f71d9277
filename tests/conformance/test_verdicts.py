"""What the suite takes for right, wrong, an error, a hang and a lost block, with scripted endpoints."""

import contextlib
import random
import threading
from dataclasses import dataclass, field, replace

import pytest

from conformance.__main__ import pair_of, parser
from conformance.cases import CASES, PLAIN, Case, undisturbed
from conformance.client import Reply as Answer
from conformance.client import connected
from conformance.oracle import Oracle
from conformance.questions import random_questions
from conformance.report import BEGIN, END, done_before, publish, published, section, system
from conformance.run import Result, Settings, line, suite
from testing.checkpoints.families import family_logits
from testing.conditions import wait_until
from testing.openai_endpoint import Reply, openai_endpoint
from wire.errors import ConfigError

RIGHT = (11, 12, 13, 14)
SETTINGS = {"runs": 1, "deadline_s": 30.0, "quiet_s": 0.3}


def completion(token_ids, finish_reason="length"):
    choice = {"text": "", "token_ids": list(token_ids), "finish_reason": finish_reason}
    return Reply(200, {"choices": [choice]})


RIGHT_REPLY = completion(RIGHT)


@dataclass
class ScriptedPair:
    """A hook for a system that answers by script, and holds as many blocks as it is told."""

    reply: Reply = RIGHT_REPLY
    held_blocks: int = 0
    hangs: bool = False
    name: str = "scripted"
    title: str = "Scripted 1.0"
    lease_s: float = 0.1
    without_drafts: dict[str, object] = field(default_factory=dict)

    def about(self):
        return {"versions": {"scripted": "1.0"}}

    @contextlib.contextmanager
    def monolith(self, profile, model):
        with openai_endpoint(lambda call: completion(RIGHT)) as endpoint:
            yield endpoint.url.removesuffix("/v1")

    @contextlib.contextmanager
    def running(self, profile, model, logs):
        ended = threading.Event()

        def answer(call):
            if self.hangs and call.body["max_tokens"] == len(RIGHT):
                ended.wait()
            return self.reply

        with openai_endpoint(answer) as endpoint, contextlib.ExitStack() as exits:
            exits.callback(ended.set)
            yield RunningScript(endpoint.url.removesuffix("/v1"), self.held_blocks)


@dataclass
class RunningScript:
    url: str
    held_blocks: int
    model: str = "large"

    def held(self):
        return {"prefill blocks": self.held_blocks, "decode blocks": 0}

    def recover(self):
        pass

    def restart(self):
        pass


ONE = Case(
    "one", "one request", lambda rng, long: random_questions(rng, [20], len(RIGHT)), undisturbed, PLAIN
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def outcome(folder):
    def run(deadline_s=30.0, **fields):
        settings = Settings(folder, **(SETTINGS | {"deadline_s": deadline_s}))
        [result] = suite(ScriptedPair(**fields), [ONE], settings)
        return result

    return run


def test_the_single_servers_answer_is_right_and_another_one_is_wrong(outcome):
    assert outcome().is_good
    assert outcome().right == 1
    wrong = outcome(reply=completion((11, 12, 13, 99)))
    assert (wrong.wrong, wrong.right, wrong.is_good) == (1, 0, False)
    assert "token 0 is 11, the reference's" in wrong.examples[0]


def test_an_answer_that_is_cut_off_is_wrong(outcome):
    assert outcome(reply=completion(RIGHT[:2])).examples == ["wrong: 2 tokens of 4"]


@pytest.mark.parametrize(
    "reply", [Reply(503, {"error": {}}), Reply(200, None), Reply(200, {}), completion((), "error")]
)
def test_an_error_is_no_wrong_answer(outcome, reply):
    result = outcome(reply=reply)
    assert (result.errors, result.wrong, result.is_good) == (1, 0, True)


def test_a_request_without_an_answer_hangs(outcome):
    result = outcome(hangs=True, deadline_s=0.5)
    assert (result.hangs, result.errors, result.is_good) == (1, 0, False)


def test_blocks_that_do_not_come_back_are_lost(outcome):
    result = outcome(held_blocks=7)
    assert (result.lost, result.is_good) == ({"prefill blocks": 7}, False)


def test_tokens_that_are_equal_up_to_rounding_are_right(folder, outcome):
    outcome()  # writes the model
    [question] = random_questions(random.Random(1), [20], 4)
    oracle = Oracle(folder / "nemotron-h-2m", folder / "answers.json")
    tokens = list(question.prompt)
    for _ in range(4):
        tokens.append(int(family_logits(oracle.model, tokens)[-1].argmax()))
    best = tuple(tokens[20:])
    oracle.answers[question.key] = (*best[:3], best[3] + 1)  # as if the single server had taken its equal
    verdict = oracle.judge(question, Answer(200, best))
    assert (verdict.outcome, verdict.ties) == ("right", 1)


def test_a_hook_of_ones_own_is_named_by_module_and_class(folder):
    options = parser().parse_args(["conformance.twinfang_pair:TwinfangPair"])
    assert pair_of(options, folder).name == "twinfang"
    with pytest.raises(SystemExit, match="twinfang, vllm or MODULE:CLASS"):
        pair_of(parser().parse_args(["nobody"]), folder)


def test_results_are_published_beside_those_of_other_systems(folder, tmp_path):
    pair, settings = ScriptedPair(held_blocks=7), Settings(folder, **SETTINGS)
    case = replace(ONE, name=CASES[0].name)
    results = list(suite(pair, [case], settings))
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    part = system(pair, results, settings, "2026-01-01")
    publish("first", part, tmp_path / "results.json", document)
    publish("second", part | {"title": "Other 2.0"}, tmp_path / "results.json", document)
    text = document.read_text()
    assert "| case | Scripted 1.0 | Other 2.0 |" in text
    assert "1 of 1 right, **blocks lost: 7**" in text
    assert text.startswith("before\n")
    assert section({"systems": {"only": part}}).count("not run") == len(CASES) - 1


def test_runs_that_are_done_and_good_are_kept_and_the_others_run(folder):
    settings = Settings(folder, **(SETTINGS | {"runs": 3}))
    pair, case = ScriptedPair(), replace(ONE, name=CASES[0].name)
    earlier = [
        Result(case.name, 0, right=1),
        Result(case.name, 1, problem="no server"),
        Result(case.name, 2, hangs=1, client_late_s=7.5),
        Result(CASES[1].name, 0, right=1),
    ]
    before, now = (system(pair, some, settings, "2026-01-01") for some in (earlier, []))
    kept = done_before(before, now, [case.name])
    assert kept == earlier[:1]
    results = list(suite(pair, [case], settings, done={(one.case, one.run) for one in kept}))
    assert [(one.run, one.right) for one in results] == [(1, 1), (2, 1)]


def test_runs_of_other_settings_are_not_put_together(folder):
    settings = Settings(folder, **SETTINGS)
    before = system(ScriptedPair(), [Result(CASES[0].name, 0, right=1)], settings, "2026-01-01")
    other = replace(settings, deadline_s=5.0)
    with pytest.raises(
        ConfigError, match=r"deadline_s 30\.0, these would have 5\.0: give the same, or leave out"
    ):
        done_before(before, system(ScriptedPair(), [], other, "2026-01-01"), [CASES[0].name])


def test_a_run_whose_client_was_starved_is_not_published(folder, tmp_path):
    settings = Settings(folder, **SETTINGS)
    document, file = tmp_path / "page.md", tmp_path / "results.json"
    document.write_text(f"{BEGIN}\n{END}\n")
    results = [Result(CASES[0].name, 0, right=1), Result(CASES[0].name, 1, hangs=1, client_late_s=7.5)]
    publish("one", system(ScriptedPair(), results, settings, "2026-01-01"), file, document)
    assert [one["run"] for one in published("one", file)["results"]] == [0]
    assert "1 of 1 right, 1 run" in document.read_text()
    assert "the client stood still for 7.5 s" in line(results[1])


def test_a_client_that_gets_no_core_says_so():
    with connected("http://127.0.0.1:9", 1.0) as client:
        wait_until(lambda: client.late_s > 0.0)  # it measures
        stood_still = threading.Event()
        client.loop.call_soon_threadsafe(lambda: stood_still.wait(0.2))
        wait_until(lambda: client.late_s >= 0.1)
