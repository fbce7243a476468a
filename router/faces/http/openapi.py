"""The OpenAPI document of the HTTP API, from the models that check the requests."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json

from kvrelay.machine import VERSION
from kvrelay.router.faces.http.chat import ChatRequest
from kvrelay.router.faces.http.completions import CompletionRequest
from kvrelay.router.faces.http.readers import DetokenizeRequest, TokenizeRequest

REFERENCE = "#/components/schemas/{model}"
BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatRequest, "The assistant's next message"),
    "/v1/completions": (CompletionRequest, "Text behind a prompt"),
    "/tokenize": (TokenizeRequest, "Token ids of text or messages"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
STREAMED = ("/v1/chat/completions", "/v1/completions")
PAGES = {
    "/v1/models": "The served model, under each of its names",
    "/health": "Answers while the router runs",
    "/ready": "200 while a request finds workers, else 503",
    "/version": "The version of kvrelay",
    "/metrics": "Metrics in Prometheus' text format",
    "/openapi.json": "This document",
}
SERVED = ", ".join([*(f"POST {path}" for path in BODIES), *(f"GET {path}" for path in PAGES)])
ERRORS = {
    "400": "A field is not served as it is, or there is no such field",
    "401": "The API key is missing or not known",
    "403": "The API key may not ask for that class of service",
    "404": "The model has another name",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "429": "The cluster is full; Retry-After says when to retry",
    "500": "A defect of kvrelay",
    "503": "No worker can take the request now, or the router is stopping",
    "504": "The client's deadline, or the limit on the first token, has passed",
}
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"type": "string", "description": "A chunk or an error, as JSON; `[DONE]` at the end of the stream."}
    },
}
"""Each event of a stream: before version 3.2, OpenAPI has no other place for it than the schema of the whole."""
NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


@cache
def document() -> bytes:
    """The document's JSON."""
    models = [(model, "validation") for model, _ in BODIES.values()]
    _, schemas = models_json_schema(models, ref_template=REFERENCE)  # type: ignore[arg-type]  # a literal type
    paths: dict[str, Any] = {path: {"post": _post(path, model, text)} for path, (model, text) in BODIES.items()}
    for path, text in PAGES.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        responses = {"200": {"description": text, "content": {kind: {}}}, "401": _error("401")}
        paths[path] = {"get": {"summary": text, "responses": responses | {"503": _error("503")}}}
    paths["/v1/models/{name}"] = {
        "get": {
            "summary": "The served model under one of its names",
            "parameters": [NAME],
            "responses": {
                "200": {"description": "The model"},
                **{code: _error(code) for code in ("401", "404", "503")},
            },
        }
    }
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvrelay", "version": VERSION},
            "paths": paths,
            "components": {
                "schemas": {**schemas["$defs"], "Error": ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _post(path: str, model: type[BaseModel], text: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": EVENT}
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": text, "content": content}, **{code: _error(code) for code in ERRORS}},
    }


def _error(code: str) -> dict[str, Any]:
    schema = {"$ref": REFERENCE.format(model="Error")}
    return {"description": ERRORS[code], "content": {"application/json": {"schema": schema}}}
