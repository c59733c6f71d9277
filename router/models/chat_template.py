"""The checkpoint's chat template, rendered as transformers does, without transformers.

A template is a program from a checkpoint, and its input comes from clients. So it runs in Jinja's sandbox,
and every exception that it raises is an error of the request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.models.json_files import read_json
from wire.errors import InvalidRequestError, ModelLoadError

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 400


class ChatTemplate:
    """Turns messages into the text of a prompt. A checkpoint may have another template for tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """``sources`` has ``default`` and perhaps ``tool_use``. Raises :class:`ModelLoadError` for invalid
        Jinja."""
        self._special_tokens = dict(special_tokens)
        self._sources = tuple(sources.values())
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, set[str]] = {}
        environment = _environment()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._variables[name] = find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                raise ModelLoadError(
                    f"the chat template {name!r} is not valid Jinja, line {error.lineno}: {error.message}"
                ) from error

    @classmethod
    def from_directory(cls, model_dir: Path) -> ChatTemplate | None:
        """Read chat_template.jinja or, without that file, tokenizer_config.json. None if neither has a
        template."""
        path = model_dir / "tokenizer_config.json"
        settings = read_json(path, required=False)
        try:
            said: Any = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            said = settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{model_dir / 'chat_template.jinja'} can't be read: {error}") from error
        if said is None:
            return None
        try:
            sources = {"default": said} if isinstance(said, str) else {t["name"]: t["template"] for t in said}
        except (TypeError, KeyError):
            sources = {}
        if "default" not in sources or not all(isinstance(source, str) for source in sources.values()):
            raise ModelLoadError(
                f"{path}: chat_template is neither text nor a list with a template 'default'"
            )
        template = cls(sources, _special_tokens(settings, model_dir))
        if not template.reads("tools", has_tools=True):
            logger.info("%s: its chat template does not show a request's tools to the model", model_dir)
        return template

    def reads(self, variable: str, *, has_tools: bool) -> bool:
        """Return whether the template reads a variable. If not, the rendered text is the same with and
        without the variable."""
        return variable in self._variables[self._name(has_tools)]

    def mentions(self, text: str) -> bool:
        """Return whether a template contains ``text``, so that the model must have learnt to write it."""
        return any(text in source for source in self._sources)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the prompt for ``variables``: ``messages``, ``tools``, … Raises
        :class:`InvalidRequestError`."""
        template = self._templates[self._name(bool(variables.get("tools")))]
        try:
            return template.render({**self._special_tokens, **variables})
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # a template is a program: it may raise anything
            reason = f"{type(error).__name__}: {error}"
        raise InvalidRequestError(
            f"the model's chat template refuses these messages: {reason[:MAX_REASON_CHARS]}", param="messages"
        )

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"


class _GenerationBlock(Extension):
    """``{% generation %}`` marks an assistant's text for training. Here only the block's body is rendered."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own type

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _special_tokens(settings: Mapping[str, Any], model_dir: Path) -> dict[str, str]:
    """Return the special tokens, such as ``bos_token``. In the files, each token is a text, or an object with
    a ``content``."""
    tokens = {}
    for said in (read_json(model_dir / "special_tokens_map.json", required=False), settings):
        for name, token in said.items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens
