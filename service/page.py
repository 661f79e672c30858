"""``/docs``: the description of the API for people, as one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

#: The page may load nothing, from here or elsewhere, and run nothing.
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = "body { font: 15px/1.5 sans-serif; max-width: 60em; margin: auto } pre { overflow: auto }"


def render(api: Mapping[str, Any]) -> str:
    """The page of `api`, an OpenAPI description: each request with its examples, then the forms of
    bodies and replies."""
    return "".join(_parts(api))


def _parts(api: Mapping[str, Any]) -> Iterator[str]:
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(api['info']['description'])}</p>"
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>"
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for name, example in content["examples"].items():
                    yield f"<p>Ask {escape(name)}:</p>{_shown(example['value'])}"
            yield _shown({k: v for k, v in operation.items() if k in ("parameters", "responses")})
    for name, schema in api["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}">{escape(name)}</h3>'
        yield f"<pre>{escape(schema.get('description', ''))}</pre>{_shown(schema)}"


def _shown(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
