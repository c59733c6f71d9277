"""Whatever is drafted, tokens follow the target: its distribution, and draw by draw its very own tokens.

The target is a Markov chain over 50 tokens: its logits depend on the newest token alone, so that all of
100,000 draws fall into 50 known distributions. Drafters range from one that is mostly right to one that
knows the seed.
"""

from dataclasses import dataclass, field

import pytest
import torch

from engine.request import Request
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingTable
from kernels.speculation.accept_drafts import accept_drafts
from wire.messages.sampling_params import SamplingParams

VOCAB, K = 50, 3
NUM_ROWS, NUM_TOKENS = 1000, 100
CPU = torch.device("cpu")
SAMPLED = {
    "temperature": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8),
    "top-p": SamplingParams(max_tokens=NUM_TOKENS, top_p=0.7),
    "top-k": SamplingParams(max_tokens=NUM_TOKENS, top_k=6, temperature=1.3),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Hundreds of thousands of small operations: threads would spend their time on waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chain_logits(seed=0, scale=2.0):
    """``[V, V]``: row t holds the logits after token t."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Decoding:
    """Rows of the tables and the step over them, as the engine has them: sample, accept, commit, draft."""

    params: list[SamplingParams]
    k: int
    chain: torch.Tensor
    prompt: tuple[int, ...] = (1,)
    stop: frozenset[int] = frozenset()
    answers: list[list[int]] = field(init=False)
    tried: int = 0
    """Steps with a draft, and how many of these drafts were right at the first position."""
    right: int = 0
    likely: float = 0.0
    """Sum of what the target's distribution gives the first drafts; filled by tests."""

    def __post_init__(self):
        num = len(self.params)
        self.table = SamplingTable(num, VOCAB, CPU, max_stop_ids=4)
        self.sampler = Sampler(self.table)
        requests = []
        for row, params in enumerate(self.params):
            request = Request(str(row), list(self.prompt), params, stop_token_ids=self.stop, seed=row)
            request.row = row
            self.table.fill(request)
            requests.append(request)
        self.needs = self.table.needs(requests)
        self.rows = torch.arange(num)
        self.answers = [[] for _ in requests]
        self.tokens = torch.zeros(num + 1, 1 + self.k, dtype=torch.int64)
        self.tokens[:num, 0] = self.prompt[-1]
        self.state = {
            name: torch.zeros(num + 1, dtype=torch.int32)
            for name in ("num_drafts", "num_computed", "state_slot", "limit", "max_drafts")
        }
        self.state["num_computed"][:num] = len(self.prompt) - 1
        self.state["limit"][:num] = len(self.prompt) + torch.tensor([p.max_tokens for p in self.params])
        self.state["max_drafts"][:num] = self.k
        self.active = torch.ones(num + 1, dtype=torch.int32)
        self.active[num] = 0

    @property
    def index(self):
        """Index of the token that each row chooses next."""
        return self.state["num_computed"][self.rows].long() + 1

    def target_token(self, token_ids, index):
        """The tokens that the target will choose after ``token_ids`` at ``index``, for R rows: ``[R]``."""
        logits = self.chain[token_ids][:, None]
        chosen, _ = self.sampler.sample(logits, self.rows, index[:, None] - 1, token_ids[:, None], self.needs)
        return chosen[:, 0]

    def run(self, drafter=None):
        """Steps until all rows have reached their limit."""
        while bool(self.active.any()):
            self.step()
            if drafter is not None:
                drafter(self)
        return self.answers

    def step(self):
        rows, num, width = self.rows, len(self.rows), 1 + self.k
        inputs = self.tokens[rows]
        positions = self.index[:, None] - 1 + torch.arange(width)
        sampled, is_finite = self.sampler.sample(self.chain[inputs], rows, positions, inputs, self.needs)
        accepted = torch.zeros(num, dtype=torch.int32)
        results = torch.zeros(num, width + 2 + 1, dtype=torch.int64)
        forced = torch.full((num,), -1)
        accept_drafts(
            rows,
            sampled=sampled,
            is_finite=is_finite,
            write_slots=torch.ones(num, width, dtype=torch.int32),
            forced=forced,
            tokens=self.tokens,
            active=self.active,
            stop_ids=self.table.stop_ids,
            accepted=accepted,
            results=results,
            **self.state,
        )
        self.sampler.commit(rows, results, accepted, self.needs, forced=forced)
        for answer, count, row in zip(self.answers, accepted.tolist(), results.tolist(), strict=True):
            answer += row[3 : 3 + count]
        self.tried += int((results[:, 2] > 0).sum())
        self.right += int((accepted > 1).sum())


def chained(guess):
    """A drafter that guesses each token from the one before it: ``guess(decoding, token_ids, index)``."""

    def draft(decoding):
        token_ids = decoding.tokens[decoding.rows, 0]
        for i in range(decoding.k):
            token_ids = guess(decoding, token_ids, decoding.index + i)
            decoding.tokens[decoding.rows, 1 + i] = token_ids

    return draft


def near(chain):
    """Logits of a good drafter."""
    return chain + chain_logits(seed=9, scale=0.4)


def near_the_target(decoding, token_ids, index):
    logits = near(decoding.chain)[token_ids]
    return decoding.sampler.draft(logits, decoding.rows, index, decoding.needs)


def always_after(decoding, token_ids, index):
    return (decoding.target_token(token_ids, index) + 1) % VOCAB


def right_where_even(decoding, token_ids, index):
    token_ids = decoding.target_token(token_ids, index)
    return token_ids - token_ids % 2


DRAFTERS = {
    "draws near the target with its noise": chained(near_the_target),
    "most likely token": chained(lambda d, t, i: d.chain[t].argmax(-1)),
    "least likely token": chained(lambda d, t, i: d.chain[t].argmin(-1)),
    "knows the seed and is right": chained(lambda d, t, i: d.target_token(t, i)),
    "knows the seed and is wrong": chained(always_after),
    "knows the seed and is right where the token is even": chained(right_where_even),
}


def target_probs(chain, params):
    """``[V, V]`` float64: the distributions that the parameters ask for; none of the sampler's code."""
    probs = torch.softmax(chain.double() / params.temperature, -1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(VOCAB)
    if params.top_k:
        ordered = ordered * (ranks < params.top_k)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered * ((before < params.top_p) | (ranks == 0))
    return torch.zeros_like(probs).scatter_(1, order, ordered / ordered.sum(-1, keepdim=True))


def transitions(answers, first):
    """``[V, V]`` how often each token followed each."""
    tokens = torch.tensor([[first, *answer] for answer in answers])
    pairs = tokens[:, :-1] * VOCAB + tokens[:, 1:]
    return torch.bincount(pairs.flatten(), minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()


def chi_squared(counts, probs):
    """Statistic and degrees of freedom over all rows; the rare tokens of a row count as one."""
    expected = probs * counts.sum(-1, keepdim=True)
    statistic, freedom = 0.0, 0
    for found, wanted in zip(counts, expected, strict=True):
        usual = wanted >= 5
        pairs = list(zip(found[usual].tolist(), wanted[usual].tolist(), strict=True))
        rare = float(wanted[~usual].sum())
        if rare >= 5:
            pairs.append((float(found[~usual].sum()), rare))
        if len(pairs) > 1:
            statistic += sum((a - b) ** 2 / b for a, b in pairs)
            freedom += len(pairs) - 1
    return statistic, freedom


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", SAMPLED)
def test_a_hundred_thousand_draws_follow_the_target(kind, drafter):
    params, chain = SAMPLED[kind], chain_logits()
    decoding = Decoding([params] * NUM_ROWS, K, chain)
    counts = transitions(decoding.run(DRAFTERS[drafter]), first=1)
    assert counts.sum() == NUM_ROWS * NUM_TOKENS
    probs = target_probs(chain, params)
    assert counts[probs == 0].sum() == 0, "filtered tokens are never drawn"
    statistic, freedom = chi_squared(counts, probs)
    assert freedom > 100
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    rate = decoding.right / decoding.tried
    print(f"{kind}, {drafter}: chi2 {statistic:.0f} of {freedom}, first draft right {rate:.3f}")
    if drafter == "knows the seed and is right":
        assert rate == 1
    if drafter == "knows the seed and is wrong":
        assert rate == 0
    if drafter == "least likely token":
        assert rate < 0.01


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_draft_is_accepted_with_the_probability_that_the_target_gives_it(kind):
    params, chain = SAMPLED[kind], chain_logits()
    probs = target_probs(chain, params)
    second = chain.topk(2).indices[:, 1]
    guess = chained(lambda decoding, token_ids, index: second[token_ids])
    chances = []

    def draft(decoding):
        guess(decoding)
        tries = decoding.state["num_drafts"][decoding.rows] > 0
        chances.append(probs[decoding.tokens[decoding.rows, 0], decoding.tokens[decoding.rows, 1]][tries])

    decoding = Decoding([params] * NUM_ROWS, K, chain)
    decoding.run(draft)
    chance = torch.cat(chances)
    assert decoding.tried == len(chance) > 10_000
    deviation = float((chance * (1 - chance)).sum()) ** 0.5
    assert abs(decoding.right - float(chance.sum())) < 5 * deviation


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_drawn_draft_is_accepted_as_often_as_two_races_agree(kind):
    """Nearly as often as rejection sampling would, whose sum min(p, q) no rule exceeds."""
    params, chain = SAMPLED[kind], chain_logits()
    p, q = target_probs(chain, params), target_probs(near(chain), params)
    ratios = [one[:, None, :] / one[:, :, None].clamp(min=1e-300) for one in (p, q)]
    shares = torch.where((p > 0) & (q > 0), 1 / torch.maximum(*ratios).sum(-1), 0).sum(-1)
    newest = []

    def draft(decoding):
        chained(near_the_target)(decoding)
        tries = decoding.state["num_drafts"][decoding.rows] > 0
        newest.append(decoding.tokens[decoding.rows, 0][tries])

    decoding = Decoding([params] * NUM_ROWS, K, chain)
    decoding.run(draft)
    tokens = torch.cat(newest)
    chance = shares[tokens]
    assert decoding.tried == len(tokens) > 10_000
    deviation = float((chance * (1 - chance)).sum()) ** 0.5
    assert abs(decoding.right - float(chance.sum())) < 5 * deviation
    assert decoding.right > 0.9 * float(torch.minimum(p, q).sum(-1)[tokens].sum())


def mixed_params(max_tokens=40):
    kinds = [
        {},
        {"temperature": 0},
        {"top_p": 0.8},
        {"top_k": 4, "temperature": 1.5},
        {"min_p": 0.1},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.4, "top_p": 0.9},
        {"logit_bias": ((3, 4.0), (7, -100.0)), "min_tokens": 12},
        {"temperature": 0, "repetition_penalty": 0.7, "frequency_penalty": -0.2},
    ]
    return [SamplingParams(max_tokens=max_tokens + i, **kind) for i, kind in enumerate(kinds * 3)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("stop", [frozenset(), frozenset({3, 20})], ids=["", "stop"])
def test_tokens_are_the_same_with_and_without_drafts(drafter, stop):
    chain = chain_logits(seed=4)
    plain = Decoding(mixed_params(), 0, chain, prompt=(5, 9, 1), stop=stop).run()
    drafted = Decoding(mixed_params(), K, chain, prompt=(5, 9, 1), stop=stop)
    assert drafted.run(DRAFTERS[drafter]) == plain
    assert drafted.tried > 0
    lengths = [len(answer) for answer in plain]
    if stop:
        assert min(lengths) < 40, "some answer must have met a stop token"
    else:
        assert lengths == [params.max_tokens for params in mixed_params()]


def test_penalties_count_accepted_drafts_once_and_rejected_ones_never():
    """Fails if rejected drafts stay in the counts, or accepted ones enter them twice."""
    params = [SamplingParams(max_tokens=60, temperature=0, frequency_penalty=0.5) for _ in range(6)]
    params += [SamplingParams(max_tokens=60, presence_penalty=1.5, repetition_penalty=1.2) for _ in range(6)]
    for drafter in DRAFTERS.values():
        decoding = Decoding(params, K, chain_logits(seed=2))
        answers = decoding.run(drafter)
        assert answers == Decoding(params, 0, chain_logits(seed=2)).run()
        counted = decoding.table.tokens.counts[:-1]
        expected = [torch.bincount(torch.tensor(answer), minlength=VOCAB) for answer in answers]
        assert torch.equal(counted, torch.stack(expected).to(torch.int32))
