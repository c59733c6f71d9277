"""The fields of a chat that say whether the model thinks, for how long, and whether its thinking is shown.

OpenAI, vLLM, SGLang and the vendors of models have different fields for this. All of them are understood.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from router.api.text_body import ranged
from router.http.openai_errors import shown
from router.models.answer_parts import AnswerForm
from router.models.reasoning.model_reasoning import PromptReasoning, ReasoningForm
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import THINKING_BUDGETS, Thinking

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch the thinking."""
NO_LIMIT = -1
NO_EFFORT = "none"


class ReasoningFields(BaseModel):
    """OpenAI: ``reasoning_effort``. vLLM: ``thinking_token_budget``, ``include_reasoning``. SGLang:
    ``separate_reasoning``. Qwen: ``enable_thinking``, ``thinking_budget``. DeepSeek, GLM and Kimi:
    ``thinking``."""

    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = ranged(NO_LIMIT, THINKING_BUDGETS[1])
    thinking_budget: int | None = ranged(NO_LIMIT, THINKING_BUDGETS[1])
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for chat templates; ``chat_template_kwargs`` has precedence. Fields that were
        not given stay undefined, because templates test whether variables are defined."""
        variables: dict[str, Any] = {}
        if (wanted := self._wants_thinking()) is not None:
            variables |= dict.fromkeys(SWITCHES, wanted)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return variables | (self.chat_template_kwargs or {})

    def thinking_message(self, reasoning: PromptReasoning | None, *, has_grammar: bool) -> Thinking | None:
        """Return what servers must know of the thinking. Raises :class:`InvalidRequestError` for a budget
        that is wrong or can't be obeyed."""
        budget = self._budget()
        if reasoning is not None:
            return reasoning.message(has_grammar=has_grammar, budget=budget)
        if budget:
            raise InvalidRequestError(
                f"thinking_token_budget is {budget}, but it is not known how this model marks its thinking: "
                "leave it out, or name the format with the router's --reasoning-parser",
                param="thinking_token_budget",
            )
        return None

    def answer_form(
        self, reasoning: PromptReasoning | None, rest: AnswerForm | None, *, has_grammar: bool
    ) -> ReasoningForm | None:
        """Return the form of answers with thinking, and ``rest`` behind it. None if the thinking is a part
        of the content: it is not known how the model marks it, or the client wants it so."""
        if reasoning is None or self.separate_reasoning is False:
            return None
        return ReasoningForm(
            reasoning,
            rest,
            may_call=rest is not None and not has_grammar,
            is_shown=self.include_reasoning is not False,
        )

    def _wants_thinking(self) -> bool | None:
        """Return whether the model is to think. None: the template decides."""
        further = self.chat_template_kwargs or {}
        for given in (*(further.get(name) for name in SWITCHES), self.enable_thinking):
            if isinstance(given, bool):
                return given
        kind = (self.thinking or {}).get("type")
        if kind not in (None, "enabled", "disabled", "auto"):
            raise InvalidRequestError(
                f"thinking.type must be 'enabled', 'disabled' or 'auto', got {shown(kind)}", param="thinking"
            )
        if kind in ("enabled", "disabled"):
            return bool(kind == "enabled")
        return None if self.reasoning_effort is None else self.reasoning_effort != NO_EFFORT

    def _budget(self) -> int | None:
        """Return the maximum number of thinking tokens. None: no limit."""
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": (self.thinking or {}).get("budget_tokens"),
        }
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            param = name.partition(".")[0]
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequestError(f"{name} must be an integer, got {shown(value)}", param=param)
            if not NO_LIMIT <= value <= THINKING_BUDGETS[1]:
                raise InvalidRequestError(
                    f"{name} must be between {NO_LIMIT} (no limit) and {THINKING_BUDGETS[1]}, got {value}",
                    param=param,
                )
        if len(set(given.values())) > 1:
            named = " and ".join(f"{name} is {value}" for name, value in given.items())
            raise InvalidRequestError(f"{named}: give one of them", param="thinking_token_budget")
        for value in given.values():
            return None if value == NO_LIMIT else value
        return 0 if self._wants_thinking() is False else None
