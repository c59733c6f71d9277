"""The life of one choice on the servers: prefill, ticket, decode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.decode_stream import DecodeStream
from router.prefill_client import PrefillClient
from router.server_pool import ServerPool
from wire.errors import TwinfangError, UnavailableError
from wire.generation import PrefillReply, PrefillRequest, RequestOutput, Submit
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


class Dispatch:
    """Sends one choice on its way and can call it back at any stage.

    Outputs, or the one error that ends them, go to ``deliver``. The prompt's log-probabilities of a
    prefill server come as an output without tokens.
    """

    def __init__(
        self,
        pool: ServerPool,
        choice: Choice,
        *,
        deadline: float,
        deliver: Callable[[RequestOutput | TwinfangError], None],
    ) -> None:
        self.prefill_reply: PrefillReply | None = None
        self._answer_ids: list[int] = []
        self._leased_by: PrefillClient | None = None
        """Whose lease the request has until its first output."""
        self._pool = pool
        self._choice = choice
        self._deadline = deadline
        self._deliver = deliver
        self._stream: DecodeStream | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Submits at once where no prefill is needed, else follows the prefill in a task."""
        try:
            decode = self._pool.choose_decode()
            if len(self._choice.token_ids) > 1 and decode.info is not None and decode.info.role == "decode":
                self._task = asyncio.create_task(self._prefill_then_submit(decode, decode.info.fingerprint))
            else:
                self._submit(decode, None)
        except TwinfangError as error:
            self._deliver(error)

    def cancel(self) -> None:
        """Ends whatever is under way for this choice; a finished one does not mind."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel(self._choice.request_id)

    async def _prefill_then_submit(self, decode: DecodeStream, fingerprint: str) -> None:
        try:
            await self._run(decode, fingerprint)
        except TwinfangError as error:
            self._deliver(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("request %s: dispatch failed", self._choice.request_id)
            self._deliver(TwinfangError(f"the router failed: {type(error).__name__}"))

    async def _run(self, decode: DecodeStream, fingerprint: str) -> None:
        choice = self._choice
        prefill = self._pool.choose_prefill(fingerprint)
        kept = self._pool.conversations
        resume = None if kept is None else kept.take(choice.token_ids, choice.cache_salt)
        request = PrefillRequest(
            choice.request_id, choice.token_ids, choice.prompt_logprobs, choice.cache_salt, resume
        )
        timeout_s = max(0.001, self._deadline - asyncio.get_running_loop().time())
        reply = await prefill.prefill(request, timeout_s=timeout_s)
        # No await from here on: a cancel comes before the ticket or after the submission.
        self.prefill_reply = reply
        if reply.prompt_logprobs is not None:
            self._deliver(RequestOutput(choice.request_id, (), prompt_logprobs=reply.prompt_logprobs))
        try:
            if decode.info is None:  # lost while the prefill ran: another one can read as well
                decode = self._pool.choose_decode(fingerprint)
            self._leased_by = prefill
            self._submit(decode, reply.ticket)
        except UnavailableError:
            prefill.abandon(choice.request_id)
            raise

    def _deliver_and_remember(self, output: RequestOutput | TwinfangError) -> None:
        """Passes an output on; the last one's ticket is kept for the conversation's next turn."""
        kept, choice = self._pool.conversations, self._choice
        if self._leased_by is not None:
            if isinstance(output, TwinfangError):  # the decode server is gone, perhaps before it has read
                self._leased_by.abandon(choice.request_id)
            self._leased_by = None
        if kept is not None and isinstance(output, RequestOutput):
            self._answer_ids += output.token_ids
            if output.ticket is not None:
                kept.remember([*choice.token_ids, *self._answer_ids], choice.cache_salt, output.ticket)
        self._deliver(output)

    def _submit(self, decode: DecodeStream, ticket: Ticket | None) -> None:
        choice = self._choice
        prompt_logprobs = choice.prompt_logprobs if ticket is None else None
        submit = Submit(
            choice.request_id,
            choice.token_ids,
            choice.params,
            ticket,
            prompt_logprobs,
            choice.cache_salt,
            keeps_state=self._pool.conversations is not None,
        )
        decode.submit(submit, self._deliver_and_remember)
        self._stream = decode
