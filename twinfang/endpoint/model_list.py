"""Which models an endpoint serves."""

from __future__ import annotations

from dataclasses import dataclass

import httpx2
import orjson

from twinfang.endpoint.endpoint import Endpoint
from twinfang.endpoint.refusal import message_of, transport_message
from wire.errors import TwinfangError

OURS = "twinfang"
NO_LIST = (404, 405, 501)


class EndpointError(TwinfangError):
    """An endpoint can't be reached, or refuses what every request needs."""

    code = "endpoint_failed"


@dataclass(frozen=True)
class ModelList:
    """What ``GET /models`` of an endpoint says."""

    names: tuple[str, ...]
    """Empty if the endpoint has no such list."""
    is_ours: bool
    """Whether a router of Twinfang answered: it knows the field ``priority``, and lists all its models."""


def model_list(endpoint: Endpoint) -> ModelList:
    """Asks the endpoint. Raises :class:`EndpointError` if it can't be reached or refuses to answer."""
    url = endpoint.base_url
    try:
        with endpoint.client() as client:
            answer = client.get(f"{url}/models")
    except httpx2.TransportError as error:
        raise EndpointError(
            f"{transport_message(error, url)}; `twinfang up` starts a server, `base_url` names another"
        ) from error
    if answer.status_code in NO_LIST:
        return ModelList((), is_ours=False)
    if answer.status_code != 200:
        remedy = "; give the key with --api-key-file" if answer.status_code == 401 else ""
        raise EndpointError(f"{url}/models answers {message_of(answer.status_code, answer.content)}{remedy}")
    try:
        cards = [card for card in orjson.loads(answer.content)["data"] if isinstance(card["id"], str)]
        owners = [card.get("owned_by") for card in cards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EndpointError(f"{url}/models is no list of models: is this an OpenAI endpoint?") from error
    return ModelList(tuple(card["id"] for card in cards), is_ours=bool(owners) and set(owners) == {OURS})
