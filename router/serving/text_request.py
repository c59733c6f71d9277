"""A request for text, as any endpoint creates it after its checks, and the request's choices, which are sent
to servers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import count, product

from router.access.client import Client
from router.models.answer_parts import AnswerForm
from router.models.catalog import ServedModel
from router.models.prompt import Prompt
from router.models.reasoning.model_reasoning import ReasoningForm
from router.observe.request_trace import RequestTrace
from router.quota.quota import UNLIMITED, Reservation
from wire.messages.sampling_params import SamplingParams
from wire.messages.sessions import TendSession

OWN_IDS = secrets.token_hex(4)
"""Tells the ids of this router from those of others."""
_numbers = count()


@dataclass(frozen=True)
class Choice:
    """One answer to one prompt."""

    request_id: str
    """Unique among all requests of the router."""
    token_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    client: str = ""
    """The name of the client that the choice belongs to."""
    session: str | None = None
    """Requests with the same value of the session header go to the same servers."""
    session_name: str = ""
    """The session that the choice belongs to (:mod:`router.api.session_name`); empty: none."""
    retention: TendSession | None = None
    """What the server that computes the prompt is told then; None: nothing is to be retained."""

    @property
    def is_scored(self) -> bool:
        """Whether the client wants no answer, but at most the prompt's log-probabilities."""
        return self.params.max_tokens == 0

    @property
    def may_fork(self) -> bool:
        """Whether other choices of the prompt can start from the state that servers compute for this one.

        Log-probabilities of a prompt are computed for each choice that wants them.
        """
        return len(self.token_ids) > 1 and not self.is_scored and self.prompt_logprobs is None


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A checked request. Its choice ``i * n + j`` is the j-th answer to prompt i."""

    id: str
    created: int
    model: ServedModel
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    """One set for each choice of a prompt; its length is ``n``."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    """Whether the prompt is repeated before the answer."""
    return_token_ids: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    cache_salt: str
    """Only requests with the same salt share cached prompts."""
    form: AnswerForm | None
    """What answers may consist of besides content; None: nothing else."""
    reasoning: ReasoningForm | None
    """How answers may begin with thinking. None if that is not known, or the client does not want to know."""
    client: Client
    priority: int
    """Requests with a lower number are served earlier."""
    deadline: float
    """When the request must have ended, on the event loop's clock."""
    session: str | None
    """Requests with the same value of the session header go to the same servers."""
    session_name: str
    """The session that the request belongs to (:mod:`router.api.session_name`); empty: none."""
    retention: TendSession | None
    """What servers that compute its prompts are told then; None: nothing is to be retained."""
    trace: RequestTrace
    reservation: Reservation = UNLIMITED
    """What the request may use of its key's limits."""

    @property
    def n(self) -> int:
        return len(self.params)

    @property
    def logprobs(self) -> int | None:
        """How many alternatives the answer lists for each token; None: the answer has no log-probabilities at
        all."""
        return self.params[0].logprobs

    @property
    def tells_just_text(self) -> bool:
        """Whether the events for one part of the answer differ only in their text, and the router need not
        search this text for stop strings."""
        tells_more = self.logprobs is not None or self.return_token_ids or self.continuous_usage
        return len(self.prompts) == self.n == 1 and not (self.stop or tells_more)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of all prompts together. Each prompt counts once, whatever ``n`` is."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def choices(self) -> list[Choice]:
        """Return all choices, in the order of the prompts."""
        return [
            self._choice(prompt, params, number)
            for number, (prompt, params) in enumerate(product(self.prompts, self.params))
        ]

    def _choice(self, prompt: Prompt, params: SamplingParams, number: int) -> Choice:
        wants_prompt_logprobs = self.echo and len(prompt.token_ids) > 1
        return Choice(
            # Two clients may choose the same X-Request-Id; the servers must still tell them apart.
            request_id=f"{self.id}-{number}-{OWN_IDS}{next(_numbers):x}",
            token_ids=prompt.token_ids,
            params=params,
            prompt_logprobs=self.logprobs if wants_prompt_logprobs else None,
            cache_salt=self.cache_salt,
            client=self.client.name,
            session=self.session,
            session_name=self.session_name,
            retention=self.retention,
        )
