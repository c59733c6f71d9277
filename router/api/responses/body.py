"""The body of ``POST /v1/responses``, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from router.api.openai.chat import ChatBody
from router.api.openai.logprobs import longest_in_one_piece
from router.api.responses.input_items import INPUT_SCHEMA, Item, messages_of
from router.api.sampling_fields import UNSUPPORTED, SamplingFields
from router.api.text_body import ranged
from router.http.openai_errors import shown
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import MAX_LOGPROBS, RANGES

MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Of these only :data:`LOGPROBS` adds anything: an answer has no tools of OpenAI and no images, and its
thinking is not encrypted."""

OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f'include: ["{LOGPROBS}"]',
    "functions": "tools",
}
"""Fields of the chat API, and what asks for the same here."""


class ReasoningField(BaseModel):
    model_config = ConfigDict(strict=True)

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextField(BaseModel):
    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseBody(SamplingFields):
    """The body as clients send it. Types are checked, values are not yet."""

    input: Any = Field(default=None, json_schema_extra=INPUT_SCHEMA)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = ranged(1, RANGES["max_tokens"][1])
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    include: list[str] | None = None
    top_logprobs: int | None = ranged(0, MAX_LOGPROBS)
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {
        "access_programs": (None,),
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None, {}),
        "moderation": (None,),
        "prompt": (None,),
    }

    def check_values(self) -> None:
        """Raise :class:`InvalidRequestError` for what this API does not have, here or anywhere."""
        self.check_extra_fields()
        given = self.model_fields_set | (self.model_extra or {}).keys()
        for name, instead in OF_CHATS.items():
            if name in given:
                raise _wrong(name, f"{name} is a field of /v1/chat/completions: here it is {instead}")
        _require("n", self.n, (None, 1))
        _require("return_token_ids", self.return_token_ids, (None, False))
        _require("truncation", self.truncation, (None, "disabled"))
        if self.text is not None:
            _require("text.verbosity", self.text.verbosity, (None, "medium"))
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                _require(f"reasoning.{name}", getattr(self.reasoning, name), (None, "auto"))
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise _wrong(
                    "include", f"include may have {', '.join(sorted(INCLUDABLE))}; got {shown(name)}"
                )
        for key, value in (self.metadata or {}).items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise _wrong(
                    "metadata",
                    f"metadata: a key may have {MAX_METADATA_KEY} characters, a value {MAX_METADATA_VALUE}; "
                    f"{shown(key)} has {len(key)} and {len(value)}: shorten them",
                )

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def chat(self, items: Sequence[Item]) -> ChatBody:
        """Return the chat that asks for the same answer to ``items``. Raises :class:`InvalidRequestError`."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        fields |= {
            "stream_options": None,
            "messages": messages_of(self.instructions, items),
            "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())],
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": _response_format(None if self.text is None else self.text.format),
        }
        if self.wants_logprobs:
            # The last event repeats all log-probabilities. So their number is limited as without streaming.
            self._check_num_logprobs()
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0, "stream": False}
        return ChatBody.model_validate(fields)

    def _check_num_logprobs(self) -> None:
        num_top = self.top_logprobs or 0
        longest = longest_in_one_piece(1, num_top) if 0 <= num_top <= MAX_LOGPROBS else 0
        if longest and (self.max_output_tokens or 0) > longest:
            raise _wrong(
                "max_output_tokens",
                f"an answer with {num_top} alternatives for each token may have {longest} tokens, "
                f"max_output_tokens is {shown(self.max_output_tokens)}: ask for fewer of either",
            )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """Return a function in the form of the chat API."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise _wrong(
            "tools",
            f"{where} is {shown(kind or tool)}, but only tools of type 'function', which the client calls "
            "itself, are supported here: leave it out",
        )
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(
            "tools", f"{where}.name must be a string that is not empty, got {shown(tool.get('name'))}"
        )
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the form of the chat API, which checks it."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        listed = choice.get("tools")
        if isinstance(listed, list):
            listed = [_tool_choice(tool) for tool in listed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    raise _wrong(
        "tool_choice",
        f"tool_choice must be 'none', 'auto', 'required', a function or allowed_tools, got {shown(choice)}",
    )


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return ``text.format`` in the form of the chat API, which checks it."""
    if form is None or form.get("type") != "json_schema":
        return None if form is None else {"type": form.get("type")}
    schema = {name: form[name] for name in ("name", "schema", "strict", "description") if name in form}
    return {"type": "json_schema", "json_schema": schema}


def _require(name: str, value: Any, harmless: tuple[Any, ...]) -> None:
    if value not in harmless:
        raise _wrong(
            name.partition(".")[0], f"{name} is not supported here, got {shown(value)}: leave it out"
        )


def _wrong(param: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)
