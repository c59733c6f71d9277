"""The parameters by which one request's tokens are sampled."""

from __future__ import annotations

import math
from operator import attrgetter

from wire.codec import message
from wire.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_BYTES = 128 << 10
MAX_MARK_TOKENS = 16
THINKING_BUDGETS = (0, 1 << 31)
"""Smallest and largest :attr:`Thinking.budget`."""
GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing logits by it would overflow float32."""

RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 1 << 31),
    "temperature": (0.0, 1e4),
    "top_k": (0, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
"""Smallest and largest values; ``top_p`` must be above its smallest value. With a ``repetition_penalty`` far
outside its range, logits overflow float32. To the engine, logits that are not finite are the sign of a
damaged state, so it would end the request."""
_ranged = attrgetter(*RANGES)
CHECKPOINT_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters whose defaults may come from a checkpoint's ``generation_config.json``."""


@message
class Thinking:
    """Where an answer's thinking begins and ends, as tokens, and how long it may be.

    A prompt whose template ends with the begin mark leaves the thinking open: it begins with the answer.
    Otherwise it begins behind the begin mark, if this mark is the first tokens of the answer, white space
    included: a server does not know which tokens are white space. The thinking ends where the end mark has
    been written for the first time. Then it never begins again.
    """

    begin_token_ids: tuple[int, ...]
    """The begin mark, for example the token ``<think>``."""
    end_token_ids: tuple[int, ...]
    """The end mark. A budget that is used up makes the server write these tokens."""
    is_open: bool
    """Whether the prompt ends within the thinking."""
    budget: int | None = None
    """Maximum number of thinking tokens between the two marks. None: no limit."""

    def __post_init__(self) -> None:
        for name in ("begin_token_ids", "end_token_ids"):
            _within(f"thinking.{name} (their count)", len(getattr(self, name)), 1, MAX_MARK_TOKENS)
        if self.budget is not None:
            _within("thinking.budget", self.budget, *THINKING_BUDGETS)


@message
class SamplingParams:
    """Sampling parameters with the meaning that OpenAI's API and vLLM give them.

    Ranges are checked on construction, on both sides of the wire: :class:`InvalidRequestError` names the
    parameter, its value and the limit. Token ids are checked later, by :meth:`check_vocabulary`, since this
    class does not know the vocabulary's size.
    """

    max_tokens: int
    """0: no answer is wanted, only the prompt's own log-probabilities."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Keeps tokens with at least ``min_p`` times the probability of the most likely token."""
    seed: int | None = None
    repetition_penalty: float = 1.0
    """For tokens of prompt and answer (CTRL paper, section 4.1): positive logits are divided by this value,
    other logits are multiplied by it."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency count only the answer's tokens, as OpenAI does."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    """Until the answer has this many tokens, no stop token and no end of sequence is sampled."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities to report. None: none; n: those of each token and of its n best alternatives."""
    speculate: bool = True
    """False: decode this request without drafts. Its tokens are the same either way."""
    grammar: str | None = None
    """The grammar that the whole answer must follow, in llguidance's form: its JSON, or Lark. If the answer
    has thinking, the grammar begins behind it."""
    thinking: Thinking | None = None
    """None: the answer has no thinking, or nothing depends on where it ends."""

    def __post_init__(self) -> None:
        for value, (name, (low, high)) in zip(_ranged(self), RANGES.items(), strict=True):
            if value is not None and not low < value <= high:  # nearly all values are within
                _within(name, value, low, high, open_low=name == "top_p")
        if self.min_tokens:
            _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.stop_token_ids:
            _within("stop_token_ids (their count)", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        if self.logit_bias:
            _within("logit_bias (its entries)", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
        for _, bias in self.logit_bias:
            _within("logit_bias", bias, -100.0, 100.0)
        if self.grammar is not None:
            _within(
                "grammar (its bytes)", len(self.grammar.encode(errors="surrogatepass")), 1, MAX_GRAMMAR_BYTES
            )
            if self.ignore_eos:
                raise InvalidRequestError(
                    "ignore_eos can't be combined with a grammar: the grammar decides where the answer ends; "
                    "leave it out",
                    param="ignore_eos",
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises :class:`InvalidRequestError` for a token id outside ``0 … vocab_size - 1``."""
        for token_id in self.stop_token_ids:
            _within("stop_token_ids", token_id, 0, vocab_size - 1)
        for token_id, _ in self.logit_bias:
            _within("logit_bias (token id)", token_id, 0, vocab_size - 1)
        if self.thinking is not None:
            for name in ("begin_token_ids", "end_token_ids"):
                for token_id in getattr(self.thinking, name):
                    _within(f"thinking.{name}", token_id, 0, vocab_size - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or math.isnan(value):
        bounds = f"more than {low} and at most {high}" if open_low else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, got {value}", param=name.split(" ")[0])
