"""Folded filters, casts of weights and all else of weights alone, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Run = Callable[[list[Any]], Any]


def frozen(
    gm: fx.GraphModule,
    static: Sequence[int],
    compile: Callable[[fx.GraphModule, Sequence[int]], Run],
) -> Run:
    """Split `gm` into a part that depends on its static inputs alone, and the rest.

    Args:
        gm: a graph of inference.
        static: places of parameters and buffers among the inputs.
        compile: compiles the rest, given its own static inputs.

    Returns:
        A function that computes the first part at the first call, keeps the results, and runs the
        rest with them at every call.
    """
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    changed = {n for node in graph.nodes if _writes(node) for n in node.all_input_nodes}
    fixed = {inputs[i] for i in static} - changed
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes:
            random = any("nondeterministic" in str(tag) for tag in getattr(node.target, "tags", ()))
            if not random and all(n in fixed for n in node.all_input_nodes) and not _writes(node):
                fixed.add(node)
    _return_copies(graph, fixed)
    results = [
        n for n in fixed
        if n.op != "placeholder" and not isinstance(n.meta.get("val"), (list, tuple))
        and any(user not in fixed for user in n.users)
    ]  # fmt: skip
    if not results:
        return compile(gm, static)
    first = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in fixed:
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output([copies[n] for n in results])
    once = fx.GraphModule(gm, first)
    for node in reversed(results):  # each goes before the ones that are there
        with graph.inserting_after(inputs[-1]):
            given = graph.placeholder(f"frozen_{node.name}")
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
    graph.eliminate_dead_code()
    more = range(len(inputs), len(inputs) + len(results))
    run = compile(gm, [*static, *more])
    kept: list[Any] = []

    def call(given: list[Any]) -> Any:
        if not kept:
            kept.extend(once(*given))
        both = [*given, *kept]
        given.clear()
        return run(both)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _return_copies(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Let `graph` return copies of what is kept, as its caller may write to them."""
    output = graph.output_node()
    for node in [n for n in output.all_input_nodes if n in fixed and n.op != "placeholder"]:
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        output.replace_input_with(node, copy)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
