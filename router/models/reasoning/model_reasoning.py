"""What the router knows of a model's thinking, and what follows for the answers to one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from router.models.answer_parts import AnswerForm, ContentReader, PartReader
from router.models.reasoning.reasoning_format import Place, ReasoningFormat
from router.models.reasoning.reasoning_reader import ReasoningReader, WithoutReasoning
from router.models.reasoning.thinking_text import ThinkingText
from router.models.reasoning.thinking_tokens import ThinkingTokens
from router.models.tokenizer import Tokenizer
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import Thinking


class ModelReasoning:
    """The marks of one model's thinking, as text and as tokens."""

    def __init__(self, form: ReasoningFormat, tokenizer: Tokenizer) -> None:
        self.form = form
        self.begin_token_ids = tuple(tokenizer.encode_now(form.begin, add_special_tokens=False))
        self.end_token_ids = tuple(tokenizer.encode_now(form.end, add_special_tokens=False))
        marks = (*form.begins, *form.ends)
        self.has_special_marks = any(tokenizer.special_id(mark) is not None for mark in marks)
        self.has_token_marks = all(
            tokenizer.added_id(mark) is not None for mark in (form.begins[0], form.ends[0])
        )
        """Whether the marks are tokens of their own. Text such as ``</think>`` can otherwise be written with
        other tokens than those into which the tokenizer divides it, so that servers may miss it."""
        self.text_of = tokenizer.decode_token

    def behind(self, prompt: str) -> PromptReasoning:
        """Return what follows for the answers to a prompt."""
        return PromptReasoning(self, self.form.place_behind(prompt))


@dataclass(frozen=True)
class PromptReasoning:
    """The thinking of the answers to one prompt."""

    model: ModelReasoning
    place: Place
    """The place of an answer's first character."""

    def message(self, *, has_grammar: bool, budget: int | None) -> Thinking | None:
        """Return what servers must know of the thinking: a grammar begins behind it, a budget ends it. None
        if there is nothing to know. Raises :class:`InvalidRequestError` if a budget can't be obeyed."""
        model = self.model
        if self.place is Place.BEHIND or (budget is None and not has_grammar):
            return None
        if not model.has_token_marks:
            if budget:
                raise InvalidRequestError(
                    f"thinking_token_budget is {budget}, but this model's tokenizer has no token of its own "
                    f"for {model.form.end!r}, so servers can't tell for certain where the thinking ends: ask "
                    "for 0, or leave it out",
                    param="thinking_token_budget",
                )
            if self.place is Place.BEFORE:
                return None
            budget = 0  # a grammar could otherwise begin too late: the answer is to begin with it
        is_open = self.place is Place.WITHIN
        return Thinking(model.begin_token_ids, model.end_token_ids, is_open=is_open, budget=budget)

    def text(self, *, may_call: bool) -> ThinkingText:
        """Return what divides one answer. ``may_call``: calls may interrupt the thinking."""
        return ThinkingText(self.model.form, self.place, self.model.form.interrupts if may_call else ())


@dataclass(frozen=True)
class ReasoningForm:
    """Answers that may begin with thinking."""

    reasoning: PromptReasoning
    rest: AnswerForm | None
    """What the text behind the thinking may consist of besides content."""
    may_call: bool
    """Whether a tool call may interrupt the thinking."""
    is_shown: bool
    """Whether the client wants to see the thinking."""

    @property
    def has_special_marks(self) -> bool:
        if self.rest is not None and self.rest.has_special_marks:
            return True
        return self.reasoning.place is not Place.BEHIND and self.reasoning.model.has_special_marks

    def reader(self) -> PartReader:
        rest = ContentReader() if self.rest is None else self.rest.reader()
        reader = ReasoningReader(self.reasoning.text(may_call=self.may_call), rest)
        return reader if self.is_shown else WithoutReasoning(reader)

    def thinking_tokens(self) -> ThinkingTokens:
        """Return the counter of one answer."""
        return ThinkingTokens(self.reasoning.text(may_call=self.may_call), self.reasoning.model.text_of)
