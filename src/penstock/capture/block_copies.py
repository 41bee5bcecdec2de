"""After a trace, inserts the operators of blocks that were not run, as copies of a block that was.

    begins(x, 1)   linear(x, h.1.w)   relu   ends(y, 1)   ...   again(z, 2)
                   `------ span of call 1 ------'               linear(z, h.2.w)   relu

The result is the graph that tracing every block would give. Before a span is copied, it is compared
with the span of the previous call. It may use only its arguments, its own tensors, constants, and
sizes that depend only on the batch; and only its results may be used outside.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from penstock.capture.block_calls import BlockCalls, Call, Kind, again, begins
from penstock.capture.block_spans import (
    MARKS,
    Attributes,
    CallSpan,
    Unlike,
    check_closed,
    described,
    is_dropped,
    name_in,
    signature,
    span_of,
)
from penstock.capture.opaque import OpaqueTable
from penstock.capture.operators import written_inputs

__all__ = ["copy_blocks"]


def copy_blocks(
    traced: fx.GraphModule, root: nn.Module, calls: BlockCalls, table: OpaqueTable
) -> frozenset[type]:
    """Replace the placeholders of blocks of ``root`` by operators, and remove the marks.

    Returns:
        The classes of blocks that do not do the same, or whose calls cannot be copied. If there are
        any, the graph is useless: these must be traced one by one.
    """
    graph = traced.graph
    copies = _Copies(graph, calls.calls, Attributes(traced, root, table))
    # Blocks inside a span were called before it ended, so they have been copied already.
    for call in (call for call in calls.calls if call.copied):
        try:
            copies.put(call)
        except Unlike:
            return frozenset([type(call.block.module)])
    for node in reversed(graph.nodes):
        if node.target in MARKS:
            graph.erase_node(node)
    return frozenset()


class _Copies:
    """Puts copies into one graph."""

    def __init__(self, graph: fx.Graph, calls: Sequence[Call], attributes: Attributes) -> None:
        self._graph = graph
        self._begins = {n.args[1]: n for n in graph.nodes if n.target is begins}
        self._stand_ins = {n.args[1]: n for n in graph.nodes if n.target is again}
        self._attributes = attributes
        self._templates: dict[int, CallSpan] = {}
        self._written: set[int] = set()
        self._earlier = _earlier_calls(calls)

    def put(self, call: Call) -> None:
        """Replace the placeholder of ``call`` by a copy of the second call of its kind."""
        stand_in = self._stand_ins.get(call.number)
        if stand_in is None:
            raise Unlike  # It is in a region, whose tensors are passed in.
        span = self._template(call.kind)
        self._note_writes(span, call)
        new: dict[fx.Node, fx.Node] = dict(zip(span.inputs, stand_in.args[0], strict=True))  # pyright: ignore
        if any(described(node) != described(other) for node, other in new.items()):
            raise Unlike
        stacks = self._stacks(span, call, stand_in)

        def counterpart(node: fx.Node) -> fx.Node:
            if node in new:
                return new[node]
            if self._attributes.tensor(node) is None:
                return node  # A constant, or a size that all calls share.
            return self._attributes.of_other_block(node, span.call.block, call.block)

        with self._graph.inserting_before(stand_in):
            for node, stack in zip(span.nodes, stacks, strict=True):
                if not is_dropped(node):
                    new[node] = copied = self._graph.node_copy(node, counterpart)
                    copied.meta["nn_module_stack"] = stack
                    if "stack_trace" in node.meta:
                        copied.meta["stack_trace"] = _trace(node, span, stand_in)
        for reader in list(stand_in.users):
            result = span.results[reader.args[1]]  # pyright: ignore[reportArgumentType, reportCallIssue]
            reader.replace_all_uses_with(counterpart(result))
            self._graph.erase_node(reader)
        self._graph.erase_node(stand_in)

    def _template(self, kind: Kind | None) -> CallSpan:
        """The span of the second call, which must do what the first does."""
        assert kind is not None
        first, second = kind.traced[:2]
        if second.number not in self._templates:
            spans = [self._span(call) for call in (first, second)]
            one, other = (signature(span, self._attributes) for span in spans)
            if one != other:
                raise Unlike
            for span in spans:
                check_closed(span)
                self._note_writes(span, span.call)
            self._templates[second.number] = spans[1]
        return self._templates[second.number]

    def _span(self, call: Call) -> CallSpan:
        begin = self._begins.get(call.number)
        if begin is None:
            raise Unlike
        return span_of(call, begin)

    def _note_writes(self, span: CallSpan, call: Call) -> None:
        """Raise `Unlike` if two calls write the same tensor of the model.

        The second would read what the first wrote, so its operators are not a copy.
        """
        written: set[int] = set()
        for node in span.nodes:
            for source in written_inputs(node) if node.op == "call_function" else ():
                if source.op != "get_attr":
                    continue
                tensor = self._attributes.tensor(source)
                if tensor is None:
                    raise Unlike
                written.add(id(call.block.tensors[name_in(span.call.block, tensor)]))
        if written & self._written:
            raise Unlike
        self._written |= written

    def _stacks(
        self, span: CallSpan, call: Call, stand_in: fx.Node
    ) -> list[dict[str, tuple[str, Any]]]:
        """The modules around the copy of each operator: those around the call, then those inside.

        PyTorch numbers the calls of a module in the keys: ``h.0``, ``h.0@1``.
        """
        around, before = stand_in.meta["nn_module_stack"], f"{span.call.block.path}."
        inner = [
            list((node.meta.get("nn_module_stack") or {}).items())[len(span.stack) :]
            for node in span.nodes
        ]
        each = Counter(key.partition("@")[0] for key in {key for keys in inner for key, _ in keys})
        later = self._earlier[call.number] - self._earlier[span.call.number]

        def renamed(key: str, path: str, kind: Any) -> tuple[str, tuple[str, Any]]:
            name, _, number = key.partition("@")
            count = int(number or 0) + each[name] * later
            if path.startswith(before) and name.endswith(path):
                own = f"{call.block.path}.{path.removeprefix(before)}"
                name, path = name.removesuffix(path) + own, own
            return f"{name}@{count}" if count else name, (path, kind)

        return [dict(around) | dict(renamed(key, *entry) for key, entry in keys) for keys in inner]


def _trace(node: fx.Node, span: CallSpan, stand_in: fx.Node) -> str:
    """The code lines of the copy of ``node``: those that lead to the call, then those inside."""
    own = node.meta["stack_trace"] or ""
    inside = own.removeprefix(span.trace)
    return (stand_in.meta.get("stack_trace") or "") + inside if inside != own else own


def _earlier_calls(calls: Sequence[Call]) -> list[int]:
    """For each call the number of earlier calls of the same block."""
    seen: Counter[str] = Counter()
    earlier: list[int] = []
    for call in calls:
        earlier.append(seen[call.block.path])
        seen[call.block.path] += 1
    return earlier
