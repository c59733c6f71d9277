"""Each model's queue and places, as the admin API shows them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from router.models.catalog import ServedModel
from router.serving.services import Services


class ModelView(BaseModel):
    name: str
    queued: int
    """Requests that wait for their turn."""
    held: int
    """Those of the queued requests that wait because no server serves the model."""
    in_flight: int
    """Choices that were let in and have not ended."""
    places: int
    """Choices that may be in flight in one router process, as far as servers have room."""
    conversations: int
    """Answers whose state is kept on a decode server for the next turn (``--conversation-return``)."""

    @classmethod
    def of(cls, model: ServedModel) -> ModelView:
        kept = model.servers.conversations
        return cls(
            name=model.name,
            queued=model.gate.num_waiting,
            held=model.gate.num_held,
            in_flight=model.gate.num_in_flight,
            places=model.gate.places,
            conversations=0 if kept is None else len(kept),
        )


def model_views(services: Services) -> list[ModelView]:
    models = {model.name: model for _, model in services.models}  # aliases name a model again
    return [ModelView.of(model) for model in models.values()]


def merged_models(views: Iterable[ModelView]) -> list[ModelView]:
    """Add up the queues that several processes have for the same models."""
    by_name: dict[str, list[ModelView]] = {}
    for view in views:
        by_name.setdefault(view.name, []).append(view)
    return [_sum(name, same) for name, same in by_name.items()]


def _sum(name: str, views: list[ModelView]) -> ModelView:
    return ModelView(
        name=name,
        queued=sum(view.queued for view in views),
        held=sum(view.held for view in views),
        in_flight=sum(view.in_flight for view in views),
        places=max(view.places for view in views),
        conversations=sum(view.conversations for view in views),
    )
