"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.access.client import Client
from router.api.openai.chat_prompt import ChatFields, chat_text
from router.api.openai.chat_response import ChatWriter
from router.api.openai.logprobs import check_in_one_piece, check_in_step, longest_in_one_piece
from router.api.openai.schemas import CHUNKS, ChatCompletion, answers
from router.api.sampling_fields import UNSUPPORTED, SamplingFields, check_num_choices
from router.api.text_body import ranged
from router.api.text_endpoint import answer_text
from router.http.bodies.json_body import body_schema
from router.http.disconnect import while_connected
from router.http.openai_errors import shown
from router.models.prompt import check_context, encode_prompt
from router.models.structured_output import wanted_structure
from router.models.tools.tool_choice import offered_tools
from router.models.tools.tool_use import wanted_tool_use
from router.serving.services import Services
from router.serving.text_request import TextRequest
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import MAX_LOGPROBS, RANGES


class ChatBody(ChatFields, SamplingFields):
    """The body as clients send it. Types are checked, values are not yet."""

    logprobs: bool | None = None
    top_logprobs: int | None = ranged(0, MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = ranged(1, RANGES["max_tokens"][1])
    max_completion_tokens: int | None = ranged(1, RANGES["max_tokens"][1])

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {
        "audio": (None,),
        "best_of": (None, 1),
        "chat_template": (None,),
        "continue_final_message": (None, False),
        "documents": (None, []),
        "echo": (None, False),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "suffix": (None, ""),
        "web_search_options": (None,),
    }

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives the answer lists for each token; None: no log-probabilities are wanted."""
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {shown(self.top_logprobs)}",
                param="top_logprobs",
            )
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs: true: set that, or leave top_logprobs out", param="top_logprobs"
            )
        return None

    def answer_length(self, room: int) -> tuple[str, int]:
        """Return the name of the field that limits the answer's length, and the limit. If neither field is
        given, the limit is ``room``."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequestError(
                f"max_tokens is {shown(old)} and max_completion_tokens is {shown(new)}: give one of them",
                param="max_tokens",
            )
        param = "max_tokens" if new is None and old is not None else "max_completion_tokens"
        given = old if new is None else new
        value = max(room, 1) if given is None else given
        if value < 1:
            raise InvalidRequestError(f"{param} must be at least 1, got {shown(value)}", param=param)
        return param, value


@while_connected
async def check_chat(
    http: Request,
    body: ChatBody,
    services: Services,
    client: Client,
    deadline: float,
    *,
    id_prefix: str = "chatcmpl",
) -> TextRequest:
    """Render, tokenize and check a chat. Raises :class:`InvalidRequestError` that names what is wrong with
    the body, :class:`OverloadedError` if a queue is full, :class:`CancelledRequestError` if the client goes
    away, and :class:`UnavailableError` while the limits are not known because no server was ever
    connected."""
    model = services.models.find(body.model)
    model.gate.refuse_early(client.name, body.priority_for(client.api_key))
    body.check_extra_fields()
    body.check_stream_options()
    check_num_choices(1, body.num_choices, services.config.max_choices, param="n")
    num_logprobs = body.num_logprobs
    if num_logprobs is not None:
        check_in_step(body.num_choices, num_logprobs, param="top_logprobs")
    body.answer_length(1)  # refuses wrong lengths before any work is done
    grammars = body.grammars(services, client)
    structure = await wanted_structure(body, grammars)
    text = await chat_text(body, model)
    tools, tool_choice = offered_tools(body.tools, body.tool_choice)
    tool_use = await wanted_tool_use(
        tools,
        tool_choice,
        model.tool_format,
        tokenizer=model.tokenizer,
        structure=structure,
        may_repeat=body.parallel_tool_calls is not False,
        grammars=grammars,
    )
    enforced = structure if tool_use is None else tool_use
    grammar = None if enforced is None else enforced.grammar
    reasoning = None if model.reasoning is None else model.reasoning.behind(text)
    form = body.answer_form(reasoning, tool_use, has_grammar=grammar is not None)
    limits = model.servers.limits()
    prompt = await encode_prompt(
        text,
        model.tokenizer,
        limits,
        add_special_tokens=bool(body.add_special_tokens),
        param="messages",
        client=client.name,
    )
    num_prompt_tokens = len(prompt.token_ids)
    room = limits.max_model_len - num_prompt_tokens
    keeps_logprobs = num_logprobs is not None and not body.stream
    if keeps_logprobs:  # limits answers for which no length is given
        room = min(room, longest_in_one_piece(body.num_choices, num_logprobs or 0))
    length_param, max_tokens = body.answer_length(room)
    check_context(
        num_prompt_tokens, max_tokens, limits.max_model_len, param="messages", length_param=length_param
    )
    if keeps_logprobs:
        check_in_one_piece(body.num_choices, max_tokens, num_logprobs or 0, param=length_param)
    params = body.sampling_params(
        model.defaults,
        max_tokens=max_tokens,
        logprobs=num_logprobs,
        vocab_size=limits.vocab_size,
        grammar=grammar,
        thinking=body.thinking_message(reasoning, has_grammar=grammar is not None),
    )
    return body.text_request(
        http,
        services,
        id_prefix=id_prefix,
        model=model,
        prompts=[prompt],
        params=params,
        form=form or tool_use,
        reasoning=form,
        client=client,
        deadline=deadline,
    )


router = APIRouter()


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=CHUNKS),
    openapi_extra=body_schema(ChatBody),
)
async def create_chat_completion(request: Request) -> Response:
    return await answer_text(request, ChatBody, check_chat, ChatWriter)
