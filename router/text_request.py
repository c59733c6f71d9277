"""A checked request for text, whichever endpoint it came to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from router.access.client import ANYBODY, Client
from router.disconnect import run_until_disconnect
from router.json_body import read_json
from router.model_catalog import ServedModel
from router.prompt import Prompt
from router.request_trace import UNTRACED, RequestTrace
from router.sampling_fields import SamplingFields
from router.services import Services
from router.tool_calls.tool_use import ToolUse
from wire.errors import InvalidRequestError
from wire.sampling_params import SamplingParams

Body = TypeVar("Body", bound=SamplingFields)


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """Choice ``i * n + j`` is the j-th answer to prompt i."""

    id: str
    created: int
    model: ServedModel
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    """One a choice of a prompt: its length is ``n``."""
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
    tool_use: ToolUse | None = None
    """How answers may call tools; None: they are just text."""
    client: Client = ANYBODY
    priority: int = 0
    """Lower is earlier."""
    deadline: float = math.inf
    """When it must have ended, on the event loop's clock."""
    session: str | None = None
    """Requests of one session go to the same servers."""
    trace: RequestTrace = UNTRACED

    @classmethod
    def of(
        cls,
        body: SamplingFields,
        *,
        request_id: str,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: tuple[SamplingParams, ...],
        client: Client,
        echo: bool = False,
        tool_use: ToolUse | None = None,
    ) -> TextRequest:
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        shows_marks = tool_use is not None and tool_use.has_special_marks
        return cls(
            id=request_id,
            created=int(time.time()),
            model=model,
            prompts=tuple(prompts),
            params=params,
            stop=body.stop_strings,
            stream=bool(body.stream),
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
            echo=echo,
            return_token_ids=bool(body.return_token_ids),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False and not shows_marks,
            cache_salt=body.cache_salt or "",
            tool_use=tool_use,
            client=client,
            priority=body.priority_for(client.api_key),
        )

    @property
    def n(self) -> int:
        return len(self.params)

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to each token are told; None: no log-probabilities at all."""
        return self.params[0].logprobs

    @property
    def tells_just_text(self) -> bool:
        """Whether events of its stream differ in their text alone, and the text ends nothing."""
        tells_more = self.logprobs is not None or self.return_token_ids or self.continuous_usage
        return len(self.prompts) == self.n == 1 and not (self.stop or self.tool_use or tells_more)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens count once a prompt, whatever ``n`` is."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def read_once_known(
    http: Request, kind: type[Body], services: Services, client: Client, *, deadline: float
) -> Body:
    """Reads a request's body, and waits for its model's first server, which says what it is checked against.

    Raises what :func:`read_json` and :meth:`Gate.wait_for_servers` raise, and :class:`CancelledRequestError`
    if the client goes away.
    """
    body = await read_json(http, kind)
    model = services.models.find(body.model)
    if not model.servers.has_limits:
        priority = body.priority_for(client.api_key)
        wait = model.gate.wait_for_servers(client.name, priority, deadline=deadline)
        await run_until_disconnect(http.receive, wait)
    return body


def check_num_choices(num_prompts: int, n: int, max_choices: int, *, param: str) -> None:
    if num_prompts * n > max_choices:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise InvalidRequestError(
            f"{prompts} with n = {n} make {num_prompts * n} choices, the limit is {max_choices}: "
            "send fewer at a time, or raise the router's --max-choices",
            param=param,
        )
