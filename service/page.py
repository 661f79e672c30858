"""``/docs``: the description of the API for people, as one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

#: The page may load nothing, from here or elsewhere, and run nothing.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = """body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
pre { background: #f4f4f4; padding: 1em; overflow: auto; white-space: pre-wrap; }
td { border-top: 1px solid #ccc; padding: .3em 1em .3em 0; vertical-align: top; }"""


def render(api: Mapping[str, Any]) -> str:
    """The page of `api`, an OpenAPI description."""
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    return "\n".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style>",
            f"<h1>{title}</h1><p>{escape(api['info']['description'])}</p>",
            *(part for path in api["paths"] for part in _path(path, api["paths"][path])),
            *(
                part
                for name, each in api["components"]["schemas"].items()
                for part in _schema(name, each)
            ),
            "</html>",
        )
    )


def _path(path: str, methods: Mapping[str, Any]) -> Iterator[str]:
    for method, operation in methods.items():
        yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>"
        fields = {
            each["name"]: {**each["schema"], **each} for each in operation.get("parameters", ())
        }
        yield from _table(fields, ())
        for content in operation.get("requestBody", {}).get("content", {}).values():
            yield f"<p>Body: {_kind(content['schema'])}</p>"
            for name, example in content.get("examples", {}).items():
                yield f"<p>{escape(name)}:</p><pre>{escape(json.dumps(example['value']))}</pre>"
        for status, reply in operation["responses"].items():
            kinds = [_kind(each["schema"]) for each in reply.get("content", {}).values() if each]
            yield f"<div>{status}: {escape(reply['description'])} {' '.join(kinds)}</div>"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}">{escape(name)}</h3>'
    yield f"<pre>{escape(schema.get('description', ''))}</pre>"
    yield from _table(schema.get("properties", {}), schema.get("required", ()))


def _table(fields: Mapping[str, Any], required: Any) -> Iterator[str]:
    yield "<table>"
    for name, field in fields.items():
        notes = [field["description"]] if "description" in field else []
        notes += ["required"] if name in required else []
        notes += [f"default: {json.dumps(field['default'])}"] if "default" in field else []
        yield f"<tr><td>{escape(name)}<td>{_kind(field)}<td>{escape('; '.join(notes))}"
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for choice in ("anyOf", "oneOf"):
        if choice in schema and "type" not in schema:
            return " or ".join(map(_kind, schema[choice]))
    if "enum" in schema:
        return escape(", ".join(map(str, schema["enum"])))
    kind = schema.get("type", "anything")
    text = escape(" or ".join(kind) if isinstance(kind, list) else kind)
    if "minimum" in schema and "maximum" in schema:
        text += f" from {schema['minimum']} to {schema['maximum']}"
    return f"{text} of {_kind(schema['items'])}" if "items" in schema else text
