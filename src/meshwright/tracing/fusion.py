"""Decide which values of a compiled graph get memory, and for how long, by the rules of Inductor, PyTorch's compiler.

Matrix products, convolutions, attention and the like are separate kernels and write their results. Everything else is
fused: a value is written only if one of its readers cannot compute it inline. Such readers are the caller, a separate
kernel, and a later kernel that reads a reduction. A value with several readers is written if it is made of many values.
Kernels over the same number of elements are merged if one reads what the other reads or writes, at the place of the
later one. Then the kernels of forward are put into the order that needs least memory (`kernel_order.py`). A value is
freed after its last read, or overwritten if the next one has its size. Thresholds are those that Inductor has by
default.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx

from meshwright.tracing import nodes
from meshwright.tracing.kernel_order import Dependencies, order_kernels
from meshwright.tracing.layouts import Buffer, buffer_of, find_padding
from meshwright.tracing.nodes import Key

READS_IF_SHARED = 4
"""A value with several readers is written if it is made of more values than this."""
READS, OPERATORS = 8, 30
"""Any value is written if it is made of more values, or by more operators, than this."""
NEAR = 16
"""How many kernels back an operator may be fused with one that reads the same value."""

Keys = dict[Key, None]
"""An ordered set of values."""


@dataclass(eq=False)
class CompiledKernel:
    """One kernel: a separate operator, or several fused ones."""

    node: fx.Node | None = None
    """The separate operator; None for fused ones."""
    rows: int = 0
    length: int = 1
    """Elements that it writes, and how many are reduced to each."""
    reads: Keys = field(default_factory=dict)
    writes: Keys = field(default_factory=dict)
    takes: dict[Key, Key] = field(default_factory=dict)
    """From a value that it writes to the dead value whose memory it overwrites."""
    frees: list[Key] = field(default_factory=list)
    """Values that are not read after it."""

    def fits(self, rows: int, length: int) -> bool:
        """Whether an operator over this number of elements can be fused into it."""
        if self.node is not None:
            return False
        if self.length == 1:
            return self.rows == rows * length
        return (rows, length) in ((self.rows, self.length), (self.rows, 1), (self.rows * self.length, 1))


@dataclass(frozen=True, kw_only=True)
class Program:
    """The kernels of a graph in the order in which they run."""

    inputs: tuple[fx.Node, ...]
    unread: tuple[fx.Node, ...]
    """Inputs that no kernel reads."""
    constants: tuple[fx.Node, ...]
    """Tensors that the graph itself holds, such as those that a model's code makes from numbers."""
    kernels: tuple[CompiledKernel, ...]
    buffers: dict[Key, Buffer]
    """The buffers of all values that are in memory at some time."""
    outputs: tuple[tuple[Key, fx.Node] | None, ...]
    """The results: a value, and the node that views it. None for a result that is no tensor."""


def fuse(graph: fx.Graph, mine: frozenset[str] = frozenset(), *, reorders: bool = True) -> Program:
    """The program that Inductor would run for a graph. It may overwrite inputs named `mine` after their last read.

    Without `reorders`, the kernels run in the graph's order.
    """
    return _Fusion(graph, mine, reorders=reorders).program()


class _Fusion:
    def __init__(self, graph: fx.Graph, mine: frozenset[str], *, reorders: bool) -> None:
        self._nodes, self._mine, self._reorders = list(graph.nodes), mine, reorders
        self._kernels: list[CompiledKernel] = []
        self._made_by: dict[Key, int] = {}
        """The kernel that writes a value."""
        self._inlined: dict[fx.Node, tuple[Keys, int]] = {}
        """For each value that is not written, the values it is made of, and the number of operators."""
        self._buffers: dict[Key, Buffer] = {}
        self._copies: dict[tuple[Key, Buffer], Key] = {}
        """Copies of matrices that products read: two products may pad one matrix alike."""
        self._roots: dict[fx.Node, Key] = {}
        """For each node, the value whose memory it is or views."""
        self._readers: dict[Key, list[fx.Node]] = {}

    def program(self) -> Program:
        for node in self._nodes:
            self._find_root(node)
        for node in filter(nodes.computes, self._nodes):
            self._lower(node)
        self._kernels = [kernel for kernel in self._kernels if kernel.node is not None or kernel.writes]
        outputs = tuple(self._output(leaf) for leaf in self._nodes[-1].args[0])
        kept = {output[0] for output in outputs if output is not None}
        if self._reorders:
            self._reorder(kept)
        last = self._last_reads(kept)
        self._assign_memory(last, kept)
        inputs = tuple(node for node in self._nodes if node.op == "placeholder")
        return Program(
            inputs=inputs,
            unread=tuple(node for node in inputs if (node, 0) not in last and (node, 0) not in kept),
            constants=tuple(node for node in self._nodes if nodes.is_constant(node)),
            kernels=tuple(self._kernels),
            buffers={key: self._buffer(key) for kernel in self._kernels for key in kernel.reads | kernel.writes},
            outputs=outputs,
        )

    def _find_root(self, node: fx.Node) -> None:
        self._roots[node] = (node, 0)
        if nodes.is_view(node):
            self._roots[node] = self._roots[node.all_input_nodes[0]]
        elif nodes.is_getitem(node):
            source, index = node.all_input_nodes[0], node.args[1]
            assert isinstance(index, int)
            self._roots[node] = self._roots[source] if nodes.is_view(source) else (source, index)
        if node.op == "output" or nodes.computes(node):
            for key in {self._roots[source]: None for source in node.all_input_nodes}:
                self._readers.setdefault(key, []).append(node)

    def _lower(self, node: fx.Node) -> None:
        reads, operators = self._made_of(node)
        made = nodes.made_by(node)
        if nodes.is_separate(node):
            self._launch(CompiledKernel(node=node), made, self._padded(node, reads))
        elif self._is_written(node, len(reads), operators):
            kernel = self._find_kernel(*nodes.domain_of(node), reads)
            self._launch(kernel, made, reads)
            self._delay_sources(kernel, *nodes.domain_of(node), reads)
        else:
            self._inlined[node] = reads, operators

    def _made_of(self, node: fx.Node) -> tuple[Keys, int]:
        """The values in memory that a node reads, and how many operators are computed inline."""
        reads: Keys = {}
        operators = 1
        for key in (self._roots[source] for source in node.all_input_nodes):
            if key not in nodes.values_of(key[0]):
                continue  # a number, or the state of a generator
            inner, count = self._inlined.get(key[0], ({key: None}, 0))
            reads |= inner
            operators += count
        return reads, operators

    def _is_written(self, node: fx.Node, reads: int, operators: int) -> bool:
        readers = [reader for key in nodes.values_of(node) for reader in self._readers.get(key, ())]
        if nodes.name_of(node) in nodes.REDUCTIONS or any(self._wants_written(reader, node) for reader in readers):
            return True
        return operators > OPERATORS or reads > (READS_IF_SHARED if len(readers) > 1 else READS)

    def _wants_written(self, reader: fx.Node, node: fx.Node) -> bool:
        if nodes.is_scatter(reader):
            base = nodes.base_of(reader)
            return base is not None and self._roots[base][0] is node
        return reader.op == "output" or nodes.is_separate(reader)

    def _padded(self, node: fx.Node, reads: Keys) -> Keys:
        """The values that a matrix product reads: copies of its matrices if it is padded."""
        matrices = nodes.matrices_of(node)
        padding = find_padding(*(m.meta["val"] for m in matrices)) if matrices is not None else None
        if matrices is None or padding is None:
            return reads
        self._buffers[node, 0] = padding.result
        for index, (matrix, buffer) in enumerate(zip(matrices, padding.copies, strict=True), start=1):
            if buffer is not None:
                source = self._roots[matrix]
                copy = self._copies.setdefault((source, buffer), (node, -index))
                if copy not in self._buffers:
                    self._buffers[copy] = buffer
                    elements = matrix.meta["val"].numel()
                    self._launch(self._find_kernel(elements, 1, {source: None}), [copy], {source: None})
                reads = {key: None for key in reads if key != source} | {copy: None}
        return reads

    def _find_kernel(self, rows: int, length: int, reads: Keys) -> CompiledKernel:
        """A kernel over as many elements that reads or writes one of the values; else a new one."""
        first = max((self._made_by.get(key, -1) for key in reads), default=-1)
        for kernel in self._kernels[max(first, len(self._kernels) - NEAR, 0) :]:
            if kernel.fits(rows, length) and reads.keys() & (kernel.reads | kernel.writes).keys():
                if kernel.length == 1:
                    kernel.rows, kernel.length = rows, length
                return kernel
        return CompiledKernel(rows=rows, length=length)

    def _launch(self, kernel: CompiledKernel, writes: list[Key], reads: Keys) -> None:
        if kernel not in self._kernels[-NEAR:]:
            self._kernels.append(kernel)
        place = self._kernels.index(kernel, max(0, len(self._kernels) - NEAR))
        kernel.reads |= reads
        kernel.writes |= dict.fromkeys(writes)
        self._made_by |= dict.fromkeys(writes, place)

    def _delay_sources(self, kernel: CompiledKernel, rows: int, length: int, reads: Keys) -> None:
        """Move earlier kernels that compute a kernel's inputs, and that no other kernel reads, into this one.

        What they read then stays in memory until here: a sum over all layers keeps every layer's part of it.
        """
        for place in sorted({self._made_by[key] for key in reads if key in self._made_by}):
            source = self._kernels[place]
            others = (other for other in self._kernels[place + 1 :] if other is not kernel)
            if source is kernel or not source.fits(rows, length) or not kernel.fits(source.rows, source.length):
                continue
            if any(source.writes.keys() & other.reads.keys() for other in others):
                continue
            kernel.reads = source.reads | kernel.reads
            kernel.writes = source.writes | kernel.writes
            self._made_by |= dict.fromkeys(source.writes, self._kernels.index(kernel))
            source.reads, source.writes = {}, {}

    def _reorder(self, kept: set[Key]) -> None:
        """Run the kernels in the order that needs least memory, unless some are collectives, which keep their order."""
        if any(kernel.node is not None and nodes.is_collective(kernel.node) for kernel in self._kernels):
            return
        given = Dependencies(
            reads=[
                [k for k in kernel.reads if k in self._made_by and k not in kernel.writes] for kernel in self._kernels
            ],
            writes=[list(kernel.writes) for kernel in self._kernels],
            sizes={key: self._buffer(key).bytes for kernel in self._kernels for key in kernel.writes},
            kept=frozenset(key for key in kept if key in self._made_by),
        )
        self._kernels = [self._kernels[place] for place in order_kernels(given)]

    def _last_reads(self, kept: set[Key]) -> dict[Key, int]:
        """The last kernel that reads each value. A value that only its own kernel reads is not written."""
        last = {key: place for place, kernel in enumerate(self._kernels) for key in kernel.reads}
        for place, kernel in enumerate(self._kernels):
            for key in [k for k in kernel.writes if k not in kept and last.get(k, place) == place]:
                if kernel.node is None:
                    del kernel.writes[key]
                    kernel.reads.pop(key, None)
                    last.pop(key, None)
        return last

    def _assign_memory(self, last: dict[Key, int], kept: set[Key]) -> None:
        ends: dict[int, list[Key]] = {}
        for key, place in last.items():
            if key not in kept:
                ends.setdefault(place, []).append(key)
        for place, kernel in enumerate(self._kernels):
            ending = ends.get(place, [])
            free = [key for key in ending if key in self._made_by or key[0].name in self._mine]
            for key in kernel.writes:
                buffer = self._buffer(key, inside=key not in kept)
                over = next((k for k in free if self._may_take(kernel, k, buffer)), None)
                if over is not None:
                    kernel.takes[key] = over
                    free.remove(over)
            kernel.frees = [*ending, *(key for key in kernel.writes if key not in last and key not in kept)]

    def _may_take(self, kernel: CompiledKernel, key: Key, wanted: Buffer) -> bool:
        """Whether a kernel may write a result over a value that it is the last to read."""
        has = self._buffer(key)
        if (has.elements, has.dtype) != (wanted.elements, wanted.dtype):
            return False
        if kernel.node is None:
            return True
        base = nodes.base_of(kernel.node)
        return nodes.is_scatter(kernel.node) and base is not None and self._roots[base] == key

    def _buffer(self, key: Key, inside: bool = True) -> Buffer:
        """The buffer of a value. The compiler may choose the strides of values inside the graph."""
        if key not in self._buffers:
            value = nodes.values_of(key[0])[key]
            self._buffers[key] = buffer_of(value, aligned=inside and key[0].op != "placeholder")
        return self._buffers[key]

    def _output(self, leaf: object) -> tuple[Key, fx.Node] | None:
        shown = isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor)
        return (self._roots[leaf], leaf) if isinstance(leaf, fx.Node) and shown else None
