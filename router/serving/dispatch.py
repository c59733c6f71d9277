"""Runs one choice on the servers: prefill, ticket, decode.

A prompt of several chunks is submitted with its early ticket while a prefill server still computes it.
Outputs that the decode server sends before the prefill's reply are held back, because until this reply the
whole attempt may still fail.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from router.fleet.absence import NobodyServesError
from router.fleet.links.decode_stream import DecodeStream, Receiver, TakeTokens
from router.fleet.links.prefill_client import PrefillClient
from router.models.catalog import ServedModel
from router.observe.choice_timeline import ChoiceTimeline
from router.policies.policy import Demand
from router.serving.attempt import HANDOFF_FAULTS, Attempt, Prefilling, error_of
from router.serving.text_request import Choice
from wire.errors import TwinfangError, UnavailableError, WireError
from wire.messages.generation import (
    ForkedChoice,
    PrefillReply,
    PrefillRequest,
    RequestOutput,
    ServerInfo,
    Submit,
)
from wire.messages.handoff import AnyTicket, PartialTicket, Ticket
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAX_ATTEMPTS = 3
FIRST_PAUSE_S = 0.05
"""The pause before the second attempt; it doubles with each further attempt."""
RETRIED = HANDOFF_FAULTS | {UnavailableError.code, WireError.code}
"""Faults of servers and of the network between them. Another attempt may succeed, on other servers if there
are any."""


class Dispatch:
    """Sends one choice to servers, tries again if a server fails, and can cancel the choice at any stage.

    Outputs, or the single error that ends them, go to ``receiver``. If a prefill server computes the prompt's
    log-probabilities, the receiver gets them as an output without tokens.

    If a prefill fails, a transfer does not arrive or a decode server is lost, the choice is tried again, on
    other servers if there are any. They prefill the prompt and the answer so far, and then continue the
    answer. So the client sees neither a gap nor a repeated token. After ``MAX_ATTEMPTS`` failures without a
    token in between, the error goes to the receiver. The last of these attempts prefills on the decode
    server, if that is allowed. ``on_retry`` is called with the code of each error that leads to another
    attempt.

    If no server is left to try, the choice waits for a server that comes back (``model.hold``); this wait
    does not count as an attempt. Once the client has received a part of the answer, only servers of the same
    fingerprint may continue it.

    A server that is about to stop gives its requests away (``moved``): another server reads their state.

    One prefill and one handoff can serve several choices of a prompt: :meth:`start` gets the others as
    ``forks``. If this choice fails or moves before its first token, each of the others starts anew by itself.

    If only the prompt's log-probabilities are wanted, the choice ends with the prefill server's reply, and no
    decode server takes part. If nothing has to be computed, no server takes part at all.
    """

    def __init__(
        self,
        model: ServedModel,
        choice: Choice,
        *,
        deadline: float,
        receiver: Receiver,
        on_retry: Callable[[str], None],
        timeline: ChoiceTimeline,
    ) -> None:
        self.prefill_reply: PrefillReply | None = None
        self.prefill_call_s = 0.0
        """How long the call that returned :attr:`prefill_reply` took."""
        self.first_output_s = 0.0
        """The time to the first token after the last submission. It is counted from the submission or, if the
        prefill's reply came later, from the reply."""
        self.was_early = False
        """Whether the choice was submitted before its prompt was prefilled."""
        self._submitted_s = 0.0
        self.answer_ids: list[int] = []
        self._tokens_to: TakeTokens | None = None
        self._lease: tuple[PrefillClient, str] | None = None
        """The prefill server that holds the lease, and the lease's request id. Set until the first output."""
        self._forks: list[Dispatch] = []
        """Choices that need this one's prompt; empty from the first token on."""
        self._prefilling: Prefilling | None = None
        """The prefill whose reply has not come yet."""
        self._held_back: list[RequestOutput] = []
        self._pool = model.servers
        self._hold = model.hold
        self._servers = Attempt(model.servers, timeline, on_prefilled=model.gate.look)
        self._choice = choice
        self._deadline = deadline
        self._receiver = receiver
        self._on_retry = on_retry
        self._timeline = timeline
        self._stream: DecodeStream | None = None
        self._has_progressed = False
        """Whether a token has come since the last submission."""
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._fingerprint = ""
        """The fingerprint of the last attempt's servers."""
        self._told_fingerprint: str | None = None
        """The fingerprint of the servers that computed what the client has received; None: the client has
        received nothing yet."""
        self._attempt = 0
        self._failures = 0
        """The number of attempts that have failed since the last token."""
        self._failed_addresses: list[str] = []
        """The servers of failed attempts, the latest last."""

    @property
    def _request_id(self) -> str:
        """Each attempt has its own id, so that servers do not confuse it with what is left of an earlier
        attempt."""
        return f"{self._choice.request_id}~{self._attempt}" if self._attempt else self._choice.request_id

    def start(self, forks: Sequence[Dispatch] = ()) -> None:
        """Submit the choice, or first its prompt if a prefill server is needed."""
        self._forks = list(forks)
        if self._choice.is_scored and self._choice.prompt_logprobs is None:
            self._receiver.take(RequestOutput(self._request_id, (), finish_reason="length"))
            return
        try:
            decode = self._servers.choose_decode(self._demand, avoid=self._failed_addresses)
            assert decode.info is not None
            self._has_begun, self._fingerprint = True, decode.info.fingerprint
            if self._prefills_elsewhere(decode.info):
                self._prefill(decode, decode.info.fingerprint)
            else:
                self._submit(decode, None)
        except TwinfangError as error:
            self._fail(error)

    def cancel(self) -> None:
        """End all work for this choice. This call has no effect if the choice has finished."""
        if self._task is not None:
            self._task.cancel()
        self._end_attempt()

    @property
    def _time_left_s(self) -> float:
        """The time until the deadline. Servers get this instead of the deadline itself, because the clocks of
        two machines can't be compared."""
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    @property
    def _token_ids(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        ids = self._choice.token_ids
        return (*ids, *self.answer_ids) if self.answer_ids else ids

    @property
    def _demand(self) -> Demand:
        choice = self._choice
        return Demand(
            *(self._token_ids, choice.cache_salt, choice.session, choice.session_name),
            *(self._has_begun, self._told_fingerprint),
        )

    def _prefills_elsewhere(self, decode: ServerInfo) -> bool:
        if len(self._token_ids) == 1 or decode.role != "decode":
            return False
        if not decode.local_prefill:
            return True
        return self._failures < MAX_ATTEMPTS - 1 and self._pool.can_prefill(decode.fingerprint)

    # --- attempts --------------------------------------------------------------------------------

    def _fail(self, error: TwinfangError) -> None:
        """Try again, or pass the error to the receiver."""
        now = asyncio.get_running_loop().time()
        error.where = self._timeline.servers
        self._call_back()
        self._leave_forks()
        if isinstance(error, NobodyServesError) and self._hold.may_end:
            self._timeline.retried(error.code)
            self._task = asyncio.create_task(self._wait_for_servers(error))
            return
        self._failures += 1
        if self._failures >= MAX_ATTEMPTS or error.code not in RETRIED or now >= self._deadline:
            self._receiver.take(error)
            return
        kind = f"trying again: {error.code} at {error.where}"
        lines.write(logging.WARNING, kind, "request %s: %s: %s", self._request_id, kind, error.message)
        self._on_retry(error.code)
        self._timeline.retried(error.code)
        self._task = asyncio.create_task(self._try_again())

    def _avoid(self, address: str) -> None:
        if address in self._failed_addresses:
            self._failed_addresses.remove(address)
        self._failed_addresses.append(address)

    def _call_back(self) -> None:
        """End what is left of an attempt: a submission whose prefill failed, or a prefill that is no longer
        needed."""
        self._end_attempt()
        self._stream = self._lease = None
        self._held_back = []

    def _end_attempt(self) -> None:
        if self._stream is not None:
            self._stream.cancel(self._request_id)
        if (prefilling := self._prefilling) is not None:
            self._prefilling = None
            prefilling.prefill.cancel(prefilling.request_id)
        self._servers.ended()

    def _leave_forks(self) -> None:
        """Start those forks anew that are still in the attempt that they share with this choice."""
        forks, self._forks = self._forks, []
        for fork in forks:
            if not (fork._attempt or fork._has_progressed):
                fork._start_anew()

    def _start_anew(self) -> None:
        self._call_back()
        self._attempt += 1
        self.start()

    async def _try_again(self) -> None:
        await asyncio.sleep(FIRST_PAUSE_S * 2 ** (self._failures - 1) * random.uniform(0.75, 1.25))
        self._attempt += 1
        self.start()

    async def _wait_for_servers(self, error: NobodyServesError) -> None:
        if await self._hold.end(self._demand, deadline=self._deadline):
            self._attempt += 1
            self.start()
        else:
            self._receiver.take(error)

    def _prefill(self, decode: DecodeStream, fingerprint: str) -> None:
        """Send the prompt to a prefill server; :meth:`prefilled` gets the reply."""
        choice, request_id = self._choice, self._request_id
        near = replace(self._demand, near=decode.location)
        prefill = self._servers.choose_prefill(near, fingerprint, avoid=self._failed_addresses)
        kept = self._pool.conversations
        token_ids = self._token_ids
        request = PrefillRequest(
            request_id,
            token_ids,
            None if self.prefill_reply else choice.prompt_logprobs,  # only sent once
            choice.cache_salt,
            None if kept is None else kept.take(token_ids, choice.cache_salt),
            traceparent=self._timeline.call("prefill", prefill.worker_id),
            timeout_s=self._time_left_s,
            session=choice.session_name,
            neighbour=self._servers.neighbour(prefill, near, fingerprint),
        )
        self._avoid(prefill.address)  # in the next attempt, whichever server is at fault
        try:
            prefill.submit(request, self)
        except TwinfangError as error:
            self._servers.prefill_failed(error)
            raise
        self._prefilling = Prefilling(prefill, request_id, decode, fingerprint, time.monotonic())

    def _hand_over(self, prefilling: Prefilling, ticket: AnyTicket) -> None:
        """Submit with a prefill server's ticket. Another decode server can read the state if the chosen one
        was lost or has begun to drain."""
        chosen = prefilling.decode
        if chosen.info is None or chosen.drain.is_draining:
            near = replace(self._demand, near=prefilling.prefill.location)
            chosen = self._servers.choose_decode(near, prefilling.fingerprint)
        self._submit(chosen, ticket)
        self._lease = (prefilling.prefill, prefilling.request_id)

    def prefill_started(self, ticket: PartialTicket) -> None:
        if self._prefilling is None or self._choice.is_scored:
            return
        with suppress(UnavailableError):  # a decode server may still join before the prompt is computed
            self._hand_over(self._prefilling, ticket)

    def prefill_failed(self, error: TwinfangError) -> None:
        self._prefilling = None
        self._servers.prefill_failed(error)
        self._fail(error)

    def prefilled(self, reply: PrefillReply) -> None:
        prefilling, self._prefilling = self._prefilling, None
        assert prefilling is not None
        try:
            self._go_on(prefilling, reply)
        except TwinfangError as error:
            self._fail(error)
        except Exception:
            log.exception("request %s: dispatch failed", self._request_id)
            self._receiver.take(TwinfangError.told("the router failed on this request; its log says why"))

    def _go_on(self, prefilling: Prefilling, reply: PrefillReply) -> None:
        """Continue on the decode server, after a prefill server has computed the prompt."""
        request_id = prefilling.request_id
        self._servers.prefilled(reply)
        if self._choice.retention is not None:
            prefilling.prefill.tend_soon(self._choice.retention)
        if reply.prompt_logprobs is not None:
            self._told_fingerprint = prefilling.fingerprint
            self._receiver.take(RequestOutput(request_id, (), prompt_logprobs=reply.prompt_logprobs))
        if self.prefill_reply is None:
            self.prefill_reply, self.prefill_call_s = reply, time.monotonic() - prefilling.called_s
        if self._choice.is_scored:
            prefilling.prefill.abandon(request_id)
            self._servers.scored()
            self._receiver.take(RequestOutput(request_id, (), finish_reason="length"))
            return
        self.was_early = self._stream is not None
        if not self.was_early:
            try:
                self._hand_over(prefilling, reply.ticket)
            except UnavailableError:
                prefilling.prefill.abandon(request_id)
                raise
        self._submitted_s = time.monotonic()
        held_back, self._held_back = self._held_back, []
        for output in held_back:
            self.take(output)

    # --- outputs ---------------------------------------------------------------------------------

    def divert(self, take_tokens: TakeTokens | None) -> None:
        """Give outputs that are only tokens to ``take_tokens``, which adds the tokens to :attr:`answer_ids`.
        The first tokens after a submission come to this dispatch all the same. None: all tokens come to this
        dispatch."""
        self._tokens_to = take_tokens
        if self._has_progressed and self._stream is not None:
            self._stream.divert(self._request_id, take_tokens or self.take_tokens)

    def take_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        """Pass tokens on. The first tokens after a submission go through :meth:`take`, which notes the
        progress."""
        if self._has_progressed:
            self.answer_ids += token_ids
            self._receiver.take_tokens(token_ids, now_s)
        else:
            self.take(RequestOutput(self._request_id, token_ids))

    def take(self, output: RequestOutput | TwinfangError) -> None:
        """Pass an output on to the receiver. The ticket in the last output is kept for the conversation's
        next turn."""
        kept, choice = self._pool.conversations, self._choice
        error = output if isinstance(output, TwinfangError) else error_of(output)
        if error is not None:
            self._servers.decode_failed(error)
            if isinstance(error, UnavailableError) and self._stream is not None:
                self._avoid(self._stream.address)  # the server is lost, about to stop, or cut off
            if self._lease is not None and self._prefilling is None:
                prefill, request_id = self._lease  # perhaps no reader is left that would end the lease
                prefill.abandon(request_id)
            self._fail(error)
            return
        assert isinstance(output, RequestOutput)
        has_moved = output.finish_reason == "moved"
        if self._prefilling is not None and (self._held_back or not has_moved):
            self._held_back.append(output)
            return
        if has_moved:
            self._timeline.moved(output.stats)
            self._move(output.ticket)
            return
        self._lease = None
        if output.token_ids:
            if not self._has_progressed:
                self._has_progressed = True
                self._forks = []
                self._told_fingerprint = self._fingerprint
                self._servers.progressed()
                if self._stream is not None and self._tokens_to is not None:
                    self._stream.divert(self._request_id, self._tokens_to)
                self.first_output_s = time.monotonic() - self._submitted_s
            self.answer_ids += output.token_ids
            self._failures = 0
        if kept is not None and isinstance(output.ticket, Ticket):
            kept.remember(list(self._token_ids), choice.cache_salt, output.ticket)
        if output.finish_reason is not None:
            self._servers.ended()
            if choice.retention is not None and self.prefill_reply is None and self._stream is not None:
                self._stream.tend_soon(choice.retention)
        self._receiver.take(output)

    def _move(self, ticket: AnyTicket | None) -> None:
        """Move the request to another server, because the present one gives it away. With ``ticket``, the
        other server reads the state. Without a ticket, servers prefill the prompt and the answer so far."""
        assert self._stream is not None
        self._avoid(self._stream.address)
        self._leave_forks()
        if ticket is None:
            self._start_anew()
            return
        self._servers.ended()
        self._attempt += 1
        try:
            near = replace(self._demand, near=self._stream.location)
            chosen = self._servers.choose_decode(near, self._fingerprint, avoid=self._failed_addresses)
            self._submit(chosen, ticket)
        except TwinfangError as error:
            self._fail(error)

    def _submit(self, decode: DecodeStream, ticket: AnyTicket | None) -> None:
        choice = self._choice
        wants_prompt = ticket is None and self.prefill_reply is None and not self.answer_ids
        submit = Submit(
            self._request_id,
            self._token_ids,
            choice.params,
            ticket,
            choice.prompt_logprobs if wants_prompt else None,
            choice.cache_salt,
            keeps_state=self._pool.conversations is not None,
            num_answered=len(self.answer_ids),
            traceparent=self._timeline.call("decode", decode.worker_id),
            timeout_s=self._time_left_s,
            client=choice.client,
            forks=tuple(fork._forked(decode) for fork in self._forks),
            handle=decode.new_handle(),
            session=choice.session_name,
        )
        decode.submit(submit, self, {fork._request_id: fork for fork in self._forks})
        for one in (self, *self._forks):
            one._submitted(decode, self._fingerprint, reads=ticket is not None)

    def _forked(self, decode: DecodeStream) -> ForkedChoice:
        """Return what a submission says of this choice, which is a fork of the submission's own choice."""
        assert self._choice.params.seed is not None
        self._servers.use_decode(decode, self._demand)
        traceparent = self._timeline.call("decode", decode.worker_id)
        return ForkedChoice(self._request_id, self._choice.params.seed, traceparent, decode.new_handle())

    def _submitted(self, decode: DecodeStream, fingerprint: str, *, reads: bool) -> None:
        self._stream, self._fingerprint, self._has_begun = decode, fingerprint, True
        self._submitted_s, self.first_output_s, self._has_progressed = time.monotonic(), 0.0, False
        self._timeline.submitted(decode.worker_id, reads=reads)
