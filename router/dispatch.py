"""The life of one choice on the servers: prefill, ticket, decode."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from router.decode_stream import DecodeStream
from router.prefill_client import PrefillClient
from router.server_pool import ServerPool
from wire.errors import (
    HandshakeError,
    LeaseError,
    SanitizerError,
    TransferError,
    TwinfangError,
    UnavailableError,
    error_from_code,
)
from wire.generation import PrefillReply, PrefillRequest, RequestOutput, ServerInfo, Submit
from wire.handoff import Ticket
from wire.sampling_params import SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What one choice asks of the servers."""

    request_id: str
    """Unique among all requests of the router."""
    token_ids: tuple[int, ...]
    params: SamplingParams
    prompt_logprobs: int | None = None
    cache_salt: str = ""


MAX_ATTEMPTS = 3
FIRST_PAUSE_S = 0.05
"""Before the second attempt; doubled for each further one."""
RETRIED = frozenset(
    error.code for error in (UnavailableError, TransferError, HandshakeError, LeaseError, SanitizerError)
)
"""Faults of servers and of the way between them: another try, elsewhere if there is an elsewhere, may do."""


class Dispatch:
    """Sends one choice on its way, again if a server fails it, and can call it back at any stage.

    Outputs, or the one error that ends them, go to ``deliver``. The prompt's log-probabilities of a
    prefill server come as an output without tokens. Until the first token nothing has been said, so a
    prefill that fails, a transfer that does not arrive and a decode server that is lost are tried again, with
    other servers first; the last attempt prefills on the decode server where that is allowed. ``on_retry``
    is told the code of what went wrong.
    """

    def __init__(
        self,
        pool: ServerPool,
        choice: Choice,
        *,
        deadline: float,
        deliver: Callable[[RequestOutput | TwinfangError], None],
        on_retry: Callable[[str], None],
    ) -> None:
        self.prefill_reply: PrefillReply | None = None
        self._answer_ids: list[int] = []
        self._leased_by: PrefillClient | None = None
        """Whose lease the request has until its first output."""
        self._pool = pool
        self._choice = choice
        self._deadline = deadline
        self._deliver = deliver
        self._on_retry = on_retry
        self._stream: DecodeStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt = 0
        self._failed_addresses: set[str] = set()
        self._has_spoken = False

    @property
    def _request_id(self) -> str:
        """One an attempt: what is left of an earlier one on some server must not be taken for this one."""
        return f"{self._choice.request_id}~{self._attempt}" if self._attempt else self._choice.request_id

    def start(self) -> None:
        """Submits at once where no prefill is needed, else follows the prefill in a task."""
        try:
            decode = self._pool.choose_decode(avoid=self._failed_addresses)
            assert decode.info is not None
            if self._prefills_elsewhere(decode.info):
                self._task = asyncio.create_task(self._prefill_then_submit(decode, decode.info.fingerprint))
            else:
                self._submit(decode, None)
        except TwinfangError as error:
            self._fail(error)

    def cancel(self) -> None:
        """Ends whatever is under way for this choice; a finished one does not mind."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel(self._request_id)

    def _prefills_elsewhere(self, decode: ServerInfo) -> bool:
        if len(self._choice.token_ids) == 1 or decode.role != "decode":
            return False
        if not decode.local_prefill:
            return True
        return self._attempt < MAX_ATTEMPTS - 1 and self._pool.has_prefill(decode.fingerprint)

    # --- attempts --------------------------------------------------------------------------------

    def _fail(self, error: TwinfangError) -> None:
        """Tries again, or lets the error through."""
        now = asyncio.get_running_loop().time()
        is_last = self._attempt + 1 >= MAX_ATTEMPTS
        if is_last or self._has_spoken or error.code not in RETRIED or now >= self._deadline:
            self._deliver(error)
            return
        log.warning("request %s: trying again: %s", self._request_id, error.message)
        self._on_retry(error.code)
        self._stream = None
        self._task = asyncio.create_task(self._try_again())

    async def _try_again(self) -> None:
        await asyncio.sleep(FIRST_PAUSE_S * 2**self._attempt * random.uniform(0.75, 1.25))
        self._attempt += 1
        self.start()

    async def _prefill_then_submit(self, decode: DecodeStream, fingerprint: str) -> None:
        try:
            await self._run(decode, fingerprint)
        except TwinfangError as error:
            self._fail(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("request %s: dispatch failed", self._request_id)
            self._deliver(TwinfangError(f"the router failed: {type(error).__name__}"))

    async def _run(self, decode: DecodeStream, fingerprint: str) -> None:
        choice, request_id = self._choice, self._request_id
        prefill = self._pool.choose_prefill(fingerprint, avoid=self._failed_addresses)
        kept = self._pool.conversations
        resume = None if kept is None else kept.take(choice.token_ids, choice.cache_salt)
        request = PrefillRequest(
            request_id, choice.token_ids, choice.prompt_logprobs, choice.cache_salt, resume
        )
        timeout_s = max(0.001, self._deadline - asyncio.get_running_loop().time())
        self._failed_addresses.add(prefill.address)  # should this attempt fail, whoever's fault it is
        reply = await prefill.prefill(request, timeout_s=timeout_s)
        # No await from here on: a cancel comes before the ticket or after the submission.
        if reply.prompt_logprobs is not None and self.prefill_reply is None:
            self._deliver(RequestOutput(request_id, (), prompt_logprobs=reply.prompt_logprobs))
        self.prefill_reply = reply
        try:
            if decode.info is None:  # lost while the prefill ran: another one can read as well
                decode = self._pool.choose_decode(fingerprint)
            self._leased_by = prefill
            self._submit(decode, reply.ticket)
        except UnavailableError:
            prefill.abandon(request_id)
            raise

    # --- outputs ---------------------------------------------------------------------------------

    def _take(self, output: RequestOutput | TwinfangError) -> None:
        """Passes an output on; the last one's ticket is kept for the conversation's next turn."""
        kept, choice = self._pool.conversations, self._choice
        if self._leased_by is not None:
            if isinstance(output, TwinfangError):  # the decode server is gone, perhaps before it has read
                self._leased_by.abandon(self._request_id)
            self._leased_by = None
        error = output if isinstance(output, TwinfangError) else _error_of(output)
        if error is not None:
            if isinstance(output, TwinfangError) and self._stream is not None:
                self._failed_addresses.add(self._stream.address)
            self._fail(error)
            return
        assert isinstance(output, RequestOutput)
        self._has_spoken = self._has_spoken or bool(output.token_ids)
        if kept is not None:
            self._answer_ids += output.token_ids
            if output.ticket is not None:
                kept.remember([*choice.token_ids, *self._answer_ids], choice.cache_salt, output.ticket)
        self._deliver(output)

    def _submit(self, decode: DecodeStream, ticket: Ticket | None) -> None:
        choice = self._choice
        wants_prompt = ticket is None and self.prefill_reply is None
        submit = Submit(
            self._request_id,
            choice.token_ids,
            choice.params,
            ticket,
            choice.prompt_logprobs if wants_prompt else None,
            choice.cache_salt,
            keeps_state=self._pool.conversations is not None,
        )
        self._stream = decode
        decode.submit(submit, self._take)


def _error_of(output: RequestOutput) -> TwinfangError | None:
    if output.error is not None:
        return error_from_code(output.error.code, output.error.message)
    if output.finish_reason == "error":
        return TwinfangError("the decode server failed on this request and did not say why")
    return None
