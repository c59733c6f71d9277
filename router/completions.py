"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from router.access.client import client_of
from router.api_schemas import Completion, answers
from router.completion_request import CompletionBody, check_completion
from router.completion_response import CompletionWriter
from router.deadline import deadline_of
from router.json_body import body_schema
from router.openai_errors import request_id_of
from router.services import services_of
from router.text_request import read_once_known
from router.text_response import respond

router = APIRouter()


@router.post(
    "/v1/completions", responses=answers(Completion, streams=True), openapi_extra=body_schema(CompletionBody)
)
async def create_completion(request: Request) -> Response:
    services = services_of(request)
    client = client_of(request)
    with services.metrics.refusals(client.api_key.name):
        deadline = deadline_of(request, services.config)
        completion = await check_completion(
            # by no name, which would keep it as long as the answer
            await read_once_known(request, CompletionBody, services, client, deadline=deadline),
            services,
            request_id=request_id_of(request),
            client=client,
        )
    return await respond(request, completion, CompletionWriter(completion), services, deadline=deadline)
