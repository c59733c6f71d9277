"""What endpoints for text do with a body, whatever its form: it is read, and makes a request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request

from router.access.client import Client
from router.disconnect import run_until_disconnect
from router.json_body import read_json
from router.model_catalog import ServedModel
from router.openai_errors import request_id_of
from router.prompt import Prompt
from router.request_headers import session_of
from router.request_trace import begin_trace
from router.sampling_fields import SamplingFields
from router.services import Services
from router.text_request import TextRequest
from router.tool_calls.tool_use import ToolUse
from wire.errors import InvalidRequestError
from wire.sampling_params import SamplingParams

Body = TypeVar("Body", bound=SamplingFields)


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


def text_request(
    http: Request,
    body: SamplingFields,
    services: Services,
    *,
    id_prefix: str,
    model: ServedModel,
    prompts: Sequence[Prompt],
    params: tuple[SamplingParams, ...],
    client: Client,
    deadline: float,
    echo: bool = False,
    tool_use: ToolUse | None = None,
) -> TextRequest:
    """What a checked body asks for. Begins the request's trace. Raises :class:`InvalidRequestError` for a
    session that is too long."""
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    shows_marks = tool_use is not None and tool_use.has_special_marks
    session = session_of(http, services.config)
    request_id = f"{id_prefix}-{request_id_of(http)}"
    return TextRequest(
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
        deadline=deadline,
        session=session,
        trace=begin_trace(http, request_id, services.tracing),
    )
