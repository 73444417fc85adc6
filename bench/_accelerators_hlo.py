"""What a compiled program does, read from the text that its compiler gives out.

XLA's own cost analysis counts the body of a loop once, and for GPUs there is none without a
device. So bytes and operations are counted here: every instruction that a device launches,
times the known trip counts of the loops around it.

* bytes: what it reads and writes in main memory. Of an operand that it only slices or
  gathers from, the slices; of a result that it updates in place, what it writes; nothing of
  what the compiler keeps in a TPU's on-chip memory.
* vector operations: elementwise arithmetic, fused or not, one for each element.
* random: those of them on 32-bit unsigned words. Nothing else in a step has that type; what
  makes a normal of a word is not counted here.
* matrix operations: two for each product of a contraction.
* cycles: of the TPU compiler's own estimate, which it writes beside each fusion.
* seconds: of each launch at a data sheet's rates, one after the other.

Operations are not instructions. A rotation of a cipher is three of the first and one of the
second, and an H100 has a unit for integers beside that which also multiplies: so a time
that is made of these counts is an estimate and may be longer than a measured one.
"""

import collections
import dataclasses
import functools
import math
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0} | {
    f"{kind}{bits}": bits // 8 for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)
}
BYTES |= {"bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8, "c128": 16}

#: What launches nothing and moves nothing.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "copy-done", "async-done", "all-reduce-done", "all-gather-done", "partition-id",
    "collective-permute-done", "replica-id", "opt-barrier", "domain", "add-dependency",
    "slice-done", "dynamic-slice-done", "fusion-done",
}  # fmt: skip
#: What moves numbers and computes none.
MOVES = {
    "broadcast", "reshape", "transpose", "copy", "slice", "dynamic-slice", "iota", "pad",
    "dynamic-update-slice", "concatenate", "gather", "scatter", "reverse", "bitcast",
    "bitcast-convert", "copy-start", "reduce", "sort", "dot", "convolution",
    "custom-call", "fusion", "while", "conditional", "call", "async-start", "rng",
    "async-update", "slice-start", "reduce-window", "get-dimension-size", "map",
}  # fmt: skip
#: Columns of an excerpt.
WIDTH = 96
COLLECTIVES = {
    "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter",
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


class Array(NamedTuple):
    """A dtype, a number of elements and the bytes in main memory of an array."""

    dtype: str
    size: int
    bytes: float


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool
    type: str

    @property
    def bytes(self) -> float:
        """Bytes of its result in main memory."""
        return sum(x.bytes for x in self.arrays)

    @property
    def size(self) -> int:
        """Elements of its result."""
        return sum(x.size for x in self.arrays)


def _matching(text: str, begin: int) -> int:
    """Returns the place after the parenthesis that closes the one at ``begin``."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i + 1
    raise ValueError(f"parentheses do not match in {text!r}")


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in BYTES:
            continue
        size = math.prod(int(d) for d in dims.split(",") if d)
        on_chip = re.search(r"S\([1-9]\d*\)", layout)
        found.append(Array(dtype, size, 0 if on_chip else size * BYTES[dtype]))
    return tuple(found)


def _parsed(line: str) -> Instruction | None:
    head = _LINE.match(line)
    if head is None:
        return None
    begin = head.end()
    end = _matching(line, begin) if line[begin] == "(" else line.index(" ", begin)
    opens = line.index("(", end)
    opcode, closes = line[end:opens].strip(), _matching(line, opens)
    if opcode == "fusion-start":  # It runs beside others, and moves as much.
        opcode = "fusion"
    inside = line[opens + 1 : closes - 1]
    literal = opcode in ("parameter", "constant")
    operands = [inside] if literal else _NAME.findall(inside)
    return Instruction(
        head[2],
        _arrays(line[begin:end]),
        opcode,
        tuple(operands),
        line[closes:],
        head[1] is not None,
        line[begin:end],
    )


def _shown(of: Instruction, body: dict[str, Instruction]) -> str:
    """Writes a line of a program without its layouts, but for what is on the chip."""

    def typed(name: str) -> str:
        x = body.get(name)
        return name if x is None else f"{_plain(x.type)} {name}"

    operands = ", ".join(dict.fromkeys(map(typed, of.operands)))
    root = "ROOT " * of.root
    line = f"{root}{of.name} = {_plain(of.type)} {of.opcode}({operands})"
    return textwrap.shorten(line, WIDTH + 40, placeholder=" ...)")


def _plain(kind: str) -> str:
    """Returns a type with no layout, and with S(1) where it is in on-chip memory."""
    kind = re.sub(r"/\*.*?\*/", "", kind)
    return re.sub(r"\{[^}]*?(S\(\d+\))?\}", lambda x: x[1] or "", kind)


def _ends(body: dict[str, Instruction], last: int) -> list[Instruction]:
    """Returns the last operations of a computation: what its result is made of."""
    waiting = [next(x for x in body.values() if x.root)]
    found: list[Instruction] = []
    while waiting and len(found) < last:
        of = waiting.pop(0)
        if of in found or of.opcode in ("parameter", "constant"):
            continue
        found.append(of)
        waiting += [body[name] for name in of.operands if name in body]
    return found[::-1]


@dataclasses.dataclass
class Counts:
    """What a program does in one run. Of loops of unknown length, one iteration."""

    launches: float = 0
    bytes: float = 0
    vector: float = 0
    random: float = 0
    matrix: float = 0
    cycles: float = 0
    random_cycles: float = 0
    seconds: float = 0

    def add(self, other: "Counts", times: float = 1) -> None:
        """Adds ``times`` runs of another program."""
        for field in dataclasses.fields(self):
            more = getattr(self, field.name) + times * getattr(other, field.name)
            setattr(self, field.name, more)


class Rates(NamedTuple):
    """What a chip does in a second, by its data sheet.

    Attributes:
      memory: bytes of main memory.
      matrix: operations of the matrix units, in bfloat16.
      vector: 32-bit operations outside of them; None: not published.
      integer: those of them on integers.
    """

    memory: float
    matrix: float
    vector: float | None = None
    integer: float | None = None

    def times(self, of: Counts) -> dict[str, float]:
        """Seconds of each unit at its rate."""
        found = {"memory": of.bytes / self.memory, "matrix": of.matrix / self.matrix}
        if self.vector and self.integer:
            floats = (of.vector - of.random) / self.vector
            found["vector"] = floats + of.random / self.integer
        return found


class Loop(NamedTuple):
    """A loop: how often it begins, its trip count if it is known, and its source."""

    runs: float
    trips: int | None
    source: str


class Program:
    """A compiled program, from ``compiled.as_text()``, for a chip of given rates.

    Attributes:
      counts: of one run of it.
      loops: every loop that is left, in the order of the program.
      conditionals: the source of every conditional.
      custom_calls: target -> how many lines.
      collectives: name -> how many lines.
      fusions: lines of fusions that are launched by themselves.
      copies: lines of copies that are launched by themselves.
      order: names of the computations whose instructions are launched.
    """

    def __init__(self, text: str, rates: Rates | None = None) -> None:
        self.rates = rates
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._frames(text)
        current: dict[str, Instruction] | None = None
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif line == "}":
                current = None
            elif current is not None and (found := _parsed(line)):
                current[found.name] = found
        self.loops: list[Loop] = []
        self.conditionals: list[str] = []
        self.fusions = self.copies = 0
        self.custom_calls: collections.Counter[str] = collections.Counter()
        self.collectives: collections.Counter[str] = collections.Counter()
        self.order: list[str] = []
        self._seen: set[str] = set()
        self.counts = self._run(self.entry, 1.0)

    def _frames(self, text: str) -> None:
        """Reads the tables by which an instruction names its lines of source."""
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] = {}
        for line in text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables.setdefault(line, {})
            elif found := re.match(r"^(\d+) (.*)$", line):
                current[int(found[1])] = found[2]
            elif line.startswith(("%", "ENTRY")):
                break
        self._files = {i: s.strip('"') for i, s in tables.get("FileNames", {}).items()}
        numbers = lambda s: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", s)}  # noqa: E731
        self._places = {
            i: numbers(s) for i, s in tables.get("FileLocations", {}).items()
        }
        self._stack = {i: numbers(s) for i, s in tables.get("StackFrames", {}).items()}

    @functools.cache  # noqa: B019 - a program lives as long as its analysis.
    def _lines(self, frame: int) -> tuple[str, ...]:
        """Returns the files and lines of a stack, innermost first."""
        found: list[str] = []
        while frame in self._stack:
            at = self._stack[frame]
            place = self._places.get(at["file_location_id"], {})
            name = self._files.get(place.get("file_name_id", 0), "")
            found.append(f"{name}:{place.get('line', 0)}")
            frame = at.get("parent_frame_id", 0) - 1  # The outermost has none.
        return tuple(found)

    def source(self, of: Instruction) -> str:
        """Returns the innermost line of the library that an instruction comes from."""
        found = re.search(r"stack_frame_id=(\d+)", of.rest)
        lines = self._lines(int(found[1])) if found else ()
        for line in lines:
            for part in ("/jaxdp/", "/kernels/"):
                if part in line and "site-packages" not in line:
                    return line[line.rindex(part) + 1 :]
        name = re.search(r'op_name="([^"]*)"', of.rest)
        return name[1] if name else ""

    # --- lines of it ----------------------------------------------------------------

    def excerpt(self, share: float, last: int) -> list[str]:
        """Lines of the launches that move most: ``share`` of what the first of them does.

        The program's own come first, then those of the loops and branches in it.

        Of a fusion: how many operations of each kind are in it, and its ``last`` ones.
        Copies are left out.
        """
        lines = []
        none = FREE | {"while", "conditional", "call", "copy-start", "copy"}
        moved = {
            (name, of.name): self._traffic(of, self.computations[name])
            for name in self.order
            for of in self.computations[name].values()
            if of.opcode not in none
        }
        for name in self.order:
            body = self.computations[name]
            for of in body.values():
                traffic = moved.get((name, of.name), 0)
                if not traffic or traffic < share * max(moved.values()):
                    continue
                lines.append("  " + _shown(of, body))
                if of.opcode == "fusion":
                    kinds = collections.Counter(x.opcode for x in self._inside(of))
                    found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
                    lines += textwrap.wrap(
                        f"fuses {found}",
                        width=WIDTH,
                        initial_indent=6 * " ",
                        subsequent_indent=8 * " ",
                        break_on_hyphens=False,
                    )
                    (called,) = self._called(of)
                    inner = self.computations[called]
                    lines += [6 * " " + _shown(x, inner) for x in _ends(inner, last)]
        return lines

    def _inside(self, of: Instruction) -> Iterator[Instruction]:
        """Yields what computes in a fusion, and in the fusions within it."""
        for name in self._called(of):
            for part in self.computations[name].values():
                if part.opcode == "fusion":
                    yield from self._inside(part)
                elif part.opcode not in FREE:
                    yield part

    # --- instructions ---------------------------------------------------------------

    def _called(self, of: Instruction, key: str = "calls|to_apply") -> list[str]:
        found = re.search(rf"\b(?:{key})=(\{{[^}}]*\}}|%?[\w.\-]+)", of.rest)
        names = found[1].strip("{}").split(", ") if found else []
        return [name.lstrip("%") for name in names]

    def _run(self, name: str, runs: float) -> Counts:
        """Counts a computation whose instructions are launched, and what it calls."""
        total, body = Counts(), self.computations[name]
        first = name not in self._seen
        if first:
            self.order.append(name)
        self._seen.add(name)
        for of in body.values():
            if of.opcode in FREE:
                continue
            if of.opcode == "while":
                trips = self._trips(of, body)
                if first:
                    self.loops.append(Loop(runs, trips, self.source(of)))
                times = 1 if trips is None else trips
                for part in ("body", "condition"):
                    (called,) = self._called(of, part)
                    total.add(self._run(called, runs * times), times)
            elif of.opcode == "conditional":
                if first:
                    self.conditionals.append(self.source(of))
                branches = self._called(of, "branch_computations") or [
                    *self._called(of, "true_computation"),
                    *self._called(of, "false_computation"),
                ]
                most = max(
                    (self._run(b, runs) for b in branches), key=lambda c: c.bytes
                )
                total.add(most)
            elif of.opcode in ("call", "async-start") and self._called(of):
                for called in self._called(of):
                    total.add(self._run(called, runs))
            else:
                total.add(self._launched(of, body, first))
        return total

    def _trips(self, of: Instruction, body: dict[str, Instruction]) -> int | None:
        """Returns how often a loop runs: as annotated, or by its counter's bounds."""
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', of.rest):
            return int(found[1])
        (called,) = self._called(of, "condition")
        condition = self.computations[called]
        test = next(x for x in condition.values() if x.root)
        if test.opcode != "compare" or "direction=LT" not in test.rest:
            return None
        left, right = (condition[name] for name in test.operands)
        place = re.search(r"index=(\d+)", left.rest)
        if left.opcode != "get-tuple-element" or place is None:
            return None
        start = body[body[of.operands[0]].operands[int(place[1])]]
        if right.opcode == "get-tuple-element":
            other = re.search(r"index=(\d+)", right.rest)
            right = (
                body[body[of.operands[0]].operands[int(other[1])]] if other else right
            )
        while start.opcode == "copy":
            start = body[start.operands[0]]
        if {start.opcode, right.opcode} != {"constant"}:
            return None
        distance = int(right.operands[0]) - int(start.operands[0])
        return -(-distance // self._stride(of, int(place[1])))

    def _stride(self, of: Instruction, place: int) -> int:
        """Returns what a loop adds to its counter: more than 1 where it is unrolled."""
        (called,) = self._called(of, "body")
        body = self.computations[called]
        after = body.get(next(x for x in body.values() if x.root).operands[place])
        while after and after.opcode == "copy":
            after = body.get(after.operands[0])
        added = after.operands if after and after.opcode == "add" else ()
        numbers = (body[x] for x in added if x in body)
        return next((int(x.operands[0]) for x in numbers if x.opcode == "constant"), 1)

    def _launched(
        self, of: Instruction, body: dict[str, Instruction], first: bool
    ) -> Counts:
        name = of.opcode.removesuffix("-start")
        if first:
            self.fusions += of.opcode == "fusion"
            self.copies += name == "copy"
            if name in COLLECTIVES:
                self.collectives[name] += 1
            if target := re.search(r'custom_call_target="([^"]*)"', of.rest):
                self.custom_calls[target[1]] += 1
        total = Counts(launches=1, bytes=self._traffic(of, body))
        total.add(self._arithmetic(of, body))
        if found := re.search(r'"estimated_cycles":"(\d+)"', of.rest):
            total.cycles = float(found[1])
            if total.vector and not total.matrix:
                # A fusion's cycles by the operations that are in it.
                total.random_cycles = total.cycles * total.random / total.vector
        if self.rates:
            total.seconds = max(self.rates.times(total).values())
        return total

    def _arithmetic(self, of: Instruction, body: dict[str, Instruction]) -> Counts:
        """Counts the arithmetic of an instruction and of all that is fused in it."""
        total = Counts()
        if of.opcode == "fusion":
            for called in self._called(of):
                inner = self.computations[called]
                for part in inner.values():
                    total.add(self._arithmetic(part, inner))
        elif of.opcode in ("dot", "convolution"):
            total.matrix = self._products(of, body)
        elif of.opcode == "reduce":
            total.vector = sum(
                body[name].size for name in of.operands[: len(of.operands) // 2]
            )
        elif of.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', of.rest)
            if target and ("gemm" in target[1] or "matmul" in target[1]):
                total.matrix = self._products(of, body)
        elif of.opcode not in FREE | MOVES | COLLECTIVES:
            total.vector = of.size
        if of.opcode != "fusion" and any(x.dtype == "u32" for x in of.arrays):
            total.random = total.vector
        return total

    def _products(self, of: Instruction, body: dict[str, Instruction]) -> float:
        """Operations of a contraction: by the sizes of its operands and its result."""
        left, right = (body[name].size for name in of.operands[:2])
        out = of.arrays[0].size
        shared = re.search(r'lhs_batch_dim\w+"?[=:][\[{]([\d,"]*)[\]}]', of.rest)
        if of.opcode == "convolution":
            return self._convolved(of, body)
        batch = 1
        if shared and shared[1]:
            dims = self._dims(body[of.operands[0]])
            places = shared[1].replace('"', "").split(",")
            batch = math.prod(dims[int(i)] for i in places)
        # (m k)(k n) over m n, of each member of a batch.
        contracted = math.sqrt((left / batch) * (right / batch) / (out / batch))
        return 2.0 * out * contracted

    def _convolved(self, of: Instruction, body: dict[str, Instruction]) -> float:
        """A TPU's products: all dimensions of the kernel but its output features."""
        found = re.search(r"dim_labels=\w+_(\w+)->", of.rest)
        dims = self._dims(body[of.operands[1]])
        out = of.arrays[0].size
        if not found:
            return 0.0
        labels = found[1]
        kernel = math.prod(
            d for label, d in zip(labels, dims, strict=True) if label != "o"
        )
        if batch := re.search(r"batch_group_count=(\d+)", of.rest):
            kernel /= int(batch[1])
        # A window that is dilated or padded stands for a batch: one place of it is used.
        window = re.search(r"window=\{size=([\dx]+)([^}]*)\}", of.rest)
        if window and re.search("stride|dilate", window[2]):
            kernel /= math.prod(int(s) for s in window[1].split("x"))
        return 2.0 * out * kernel

    @staticmethod
    def _dims(of: Instruction) -> list[int]:
        found = _ARRAY.search(of.type)
        return [int(d) for d in found[2].split(",") if d] if found else []

    def _traffic(self, of: Instruction, body: dict[str, Instruction]) -> float:
        """Bytes that a launched instruction reads and writes in main memory."""
        if of.opcode == "fusion":
            (called,) = self._called(of)
            inner = self.computations[called]
            return self._fused_reads(inner) + self._written(inner)
        operands = [body[name] for name in of.operands if name in body]
        if of.opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * of.bytes
        if of.opcode == "dynamic-update-slice":
            return 2 * operands[1].bytes
        if of.opcode in ("copy-start", "slice-start"):
            # (copy, source, ...) and ((source), slice, ...): in or out of chip memory.
            target = of.arrays[of.opcode == "slice-start"]
            moved = target.size * BYTES[target.dtype]
            return moved * (bool(operands[0].bytes) + bool(target.bytes))
        results = of.arrays
        if of.opcode == "custom-call" and len(results) > 1:
            # A routine of a library names the room it works in as its last result.
            results = results[:-1] if results[-1].dtype in ("s8", "u8") else results
        return sum(x.bytes for x in (*results, *operands))

    def _fused_reads(self, inner: dict[str, Instruction]) -> float:
        return sum(
            self._read(x, inner) for x in inner.values() if x.opcode == "parameter"
        )

    def _read(self, x: Instruction, inner: dict[str, Instruction]) -> float:
        """Bytes that are read of an array within a fusion: no more than all of it."""
        total = 0.0
        for user in inner.values():
            if x.name not in user.operands:
                continue
            if user.opcode == "bitcast":
                total += self._read(user, inner)
            elif user.opcode in ("slice", "dynamic-slice", "gather"):
                if user.operands[0] == x.name:
                    each = BYTES[x.arrays[0].dtype] if x.arrays else 0
                    total += user.size * each if x.bytes else 0
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == x.name:
                continue
            elif user.opcode == "fusion":
                (called,) = self._called(user)
                nested = self.computations[called]
                at = user.operands.index(x.name)
                for p in nested.values():
                    if p.opcode == "parameter" and p.operands == (str(at),):
                        total += self._read(p, nested)
            else:
                return x.bytes
        return min(total, x.bytes)

    def _written(self, inner: dict[str, Instruction]) -> float:
        root = next(x for x in inner.values() if x.root)

        def of(x: Instruction) -> float:
            if x.opcode == "tuple":
                return sum(of(inner[name]) for name in x.operands)
            if x.opcode == "bitcast" and x.operands[0] in inner:
                return of(inner[x.operands[0]]) if x.bytes else 0
            if x.opcode == "dynamic-update-slice":
                return min(
                    inner[x.operands[1]].size * BYTES[x.arrays[0].dtype], x.bytes
                )
            if x.opcode == "fusion":
                return self._written(self.computations[self._called(x)[0]])
            return x.bytes

        return of(root)
