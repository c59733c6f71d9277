"""A router's models, by the names that clients use for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from router.admission.gate import Gate
from router.admission.hold import Hold
from router.config import ModelAlias
from router.fleet.model_servers import ModelServers
from router.http.openai_errors import shown
from router.models.chat_template import ChatTemplate
from router.models.reasoning.model_reasoning import ModelReasoning
from router.models.tokenizer import Tokenizer
from router.models.tools.tool_format import ToolFormat
from wire.errors import InvalidRequestError, ModelNotFoundError, UnavailableError


@dataclass(frozen=True)
class ServedModel:
    """Everything that the router needs to serve requests for one model."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: dict[str, float]
    servers: ModelServers
    gate: Gate
    hold: Hold
    tool_format: ToolFormat | None = None
    """How the model writes tool calls. None if that is not known."""
    reasoning: ModelReasoning | None = None
    """How the model marks its thinking. None if that is not known: what it thinks is content."""

    @property
    def max_model_len(self) -> int | None:
        """None until a server has reported it."""
        try:
            return self.servers.limits().max_model_len
        except UnavailableError:
            return None


class ModelCatalog:
    """Finds models by name. An alias is another name of a model; answers give the model's own name."""

    def __init__(self, models: Sequence[ServedModel], aliases: Iterable[ModelAlias]) -> None:
        self._only = models[0] if len(models) == 1 else None
        self._by_name = {model.name: model for model in models}
        self._by_name |= {alias.name: self._by_name[alias.model] for alias in aliases}

    def __iter__(self) -> Iterator[tuple[str, ServedModel]]:
        """Iterate over all names, each with the model that it stands for. The models' own names come before
        the aliases."""
        return iter(self._by_name.items())

    def find(self, asked: str | None) -> ServedModel:
        """Return the model of this name. A request without a name gets the only model, if there is only one.

        Raises :class:`ModelNotFoundError` for an unknown name, and :class:`InvalidRequestError` if no name
        is given and there are several models.
        """
        if asked is None:
            if self._only is None:
                raise InvalidRequestError(f"model is missing: it must be one of {self._names}", param="model")
            return self._only
        if asked not in self._by_name:
            raise ModelNotFoundError(
                f"The model {shown(asked)} does not exist; this server has {self._names}", param="model"
            )
        return self._by_name[asked]

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._by_name))
