"""Hooks for schemathesis: requests that the description allows are made ones that make sense, as it
cannot say that groups divide channels, or that a window fits into its image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import parquet_bodies  # noqa: F401 -- a hook too
import schemathesis

from confpred.problem.conv import ConvNd, kind_of
from confpred.problem.conv2d import LIMITS


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """`body`, where it asks for predictions, of problems that can be computed."""
    if not isinstance(body, dict) or "device" not in body:
        return body
    made = {name: whole(value) for name, value in body.items()}
    if isinstance(body.get("limits"), dict):
        made["limits"] = dict(body["limits"])
        if "workspace_bytes" in made["limits"]:
            made["limits"]["workspace_bytes"] = whole(made["limits"]["workspace_bytes"])
    if "problem" in body:
        made["problem"] = layer(body["problem"])
    if "problems" in body:
        made["problems"] = [layer(fields) for fields in body["problems"]]
    return made


def layer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Allowed `fields` with sizes that fit each other, of tensors that are not too large."""
    made = {name: whole(value) for name, value in fields.items()}
    if kind_of(made) is ConvNd or not {"h", "r"} <= made.keys():
        made |= {"d": 1, "h": 1, "t": 1, "r": 1, "rank": 3, "cut": 0, "padding": 0, "dilation": 1}
        made["stride"] = max(made["stride"]) if isinstance(made.get("stride"), list) else 1
    for name in ("n", "h", "w"):
        made[name] = made[name] % 16 + 1
    for name in ("r", "s"):
        made[name] = made[name] % 7 + 1
    for size, window in (("h", "r"), ("w", "s")):
        made[size] += LIMITS["dilation"][1] * made[window]
    groups = made.get("groups", 1)
    for name in ("c", "k"):
        made[name] = max(made[name] // groups, 1) * groups
    direction = made.get("direction", "fprop")
    if direction != "fprop":
        made |= {"activation": "none", "residual": False}
    if direction == "dgrad":
        made["bias"] = False
    if direction != "wgrad":
        made["deterministic"] = False
    return made


def whole(value: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, and confpred does not."""
    if isinstance(value, list):
        return [whole(each) for each in value]
    return int(value) if isinstance(value, float) else value
