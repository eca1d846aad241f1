"""Translates kernels in PTX to C++ for device.h: a function per kernel, with its registers as variables.

An instruction, modifier or declaration that is not listed here is an error that names it. To add an instruction that
only computes, add its operands to `OPERANDS` and a function of that name to device.h.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

BITS = {f"{kind}{bits}": bits for bits in (8, 16, 32, 64) for kind in "usb"}
BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "e4m3x2": 16, "pred": 1}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
SPECIAL = {"%tid.x": "t->thread", "%ctaid.x": "t->block", "%nctaid.x": "t->blocks", "%ntid.x": "t->threads"}

# Operands of instructions that only compute, the target first. T: of the instruction's last type; D: of its first;
# W: twice as wide; N: u32; P: a predicate.
OPERANDS = dict.fromkeys(
    ["add", "sub", "mul", "mul.lo", "mul.hi", "div", "rem", "min", "max", "and", "or", "xor"], "TTT"
)
OPERANDS |= dict.fromkeys(["add.rn", "sub.rn", "mul.rn", "div.rn", "div.full"], "TTT")
OPERANDS |= dict.fromkeys(["abs", "neg", "not", "rcp.rn", "sqrt.rn"], "TT")
OPERANDS |= {f"{op}.approx{ftz}": "TT" for op in ("rcp", "sqrt", "rsqrt", "ex2", "lg2") for ftz in ("", ".ftz")}
OPERANDS |= dict.fromkeys(["fma.rn", "mad.lo", "prmt"], "TTTT")
OPERANDS |= {"mul.wide": "WTT", "mad.wide": "WTTW", "shl": "TTN", "shr": "TTN", "selp": "TTTP", "popc": "NT"}
OPERANDS |= {"bfi": "TTTNN", "bfe": "TTNN", "set.eq": "DTT"}
OPERANDS |= {f"setp.{test}": "PTT" for test in ("eq", "ne", "lt", "le", "gt", "ge", "num", "nan")}
OPERANDS |= {f"setp.{test}u": "PTT" for test in ("eq", "ne", "lt", "le", "gt", "ge")}

# Some of them on integers, as calls take g++ longer to compile.
OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}

SPACES = {"global": "kGlobal", "shared": "kShared", "shared::cta": "kShared", "param": "kParameter"}
CACHING = {"ca", "cg", "L1::no_allocate"}  # results do not depend on it
MEETINGS = {"shfl.sync.bfly", "shfl.sync.down", "shfl.sync.up", "shfl.sync.idx", "vote.sync.any", "vote.sync.all"}
MEETINGS |= {"redux.sync.add", "redux.sync.min", "redux.sync.max"}
ATOMICS = {"add", "inc", "exch"}
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
IGNORED = {"prefetch.global.L2", ".pragma", ".loc"}


class UnknownError(ValueError):
    """Something in PTX that is not translated."""


@dataclass
class Kernel:
    """A translated kernel."""

    name: str
    code: str  # C++
    parameters: list[tuple[int, int]]  # offset and size in bytes
    shared_bytes: int
    places: dict[int, str]  # for lines of the PTX: line in the source, and instruction


def names_of(ptx: str) -> list[str]:
    """The kernels in a module."""
    return re.findall(r"\.entry\s+([\w$]+)\s*\(", ptx)


def translated(ptx: str, name: str, dynamic_shared_bytes: int = 0) -> Kernel:
    """Translates one kernel of a module."""
    start = re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx)
    assert start is not None, f"no kernel {name}"
    end = ptx.index("\n}", start.end())
    parameters, body = ptx[start.end() : end].split("{", 1)
    kernel = _Translation(name, dynamic_shared_bytes)
    kernel.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    for declaration in re.findall(r"^(?:\.extern )?\.shared[^;]*", ptx, re.M):
        kernel.declare_shared(declaration)
    kernel.declare_parameters(parameters.split(")")[0])
    line = 0
    try:
        for line, text in _statements(body, 1 + ptx.count("\n", 0, end - len(body))):
            kernel.add(line, text)
    except UnknownError as error:
        raise UnknownError(f"{name}, line {line}: {error}; see tools/ptx/translate.py") from None
    return kernel.result()


def _statements(body: str, line: int) -> list[tuple[int, str]]:
    """Statements with their lines: instructions, declarations, labels with a colon, and braces that nest scopes."""
    found = []
    # A brace that begins a statement nests a scope; others list registers.
    pattern = re.compile(r"(\s+|//[^\n]*)|(\.loc[^\n]*|[$\w]+:(?!:)|[{}])|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);")
    at = 0
    while at < len(body):
        match = pattern.match(body, at)
        if match is None:
            raise UnknownError(f"statement {body[at : at + 60]!r}")
        if match[1] is None:
            found.append((line, " ".join(re.sub(r"//[^\n]*", "", match[2] or match[3]).split())))
        line += match[0].count("\n")
        at = match.end()
    return found


def _split(operands: str) -> list[str]:
    """Splits at commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{\[])+", operands)]


def _label(name: str) -> str:
    return "label_" + name.replace("$", "_")


@dataclass
class _Translation:
    name: str
    dynamic_shared_bytes: int
    files: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # of variables in shared memory, and of parameters
    shared_bytes: int = 0
    parameters: list[tuple[int, int]] = field(default_factory=list)
    families: dict[str, int] = field(default_factory=dict)  # bits of registers by prefix
    scopes: list[dict[str, int]] = field(default_factory=lambda: [{}])  # bits of registers by name, innermost last
    tables: dict[str, list[str]] = field(default_factory=dict)  # of labels
    places: dict[int, str] = field(default_factory=dict)
    source: str = "?"
    lines: list[str] = field(default_factory=list)

    def result(self) -> Kernel:
        registers = "".join(f"  R{bits} {name};\n" for name, bits in self.scopes[0].items())
        code = f'#include "device.h"\nextern "C" void kernel(Thread* t) {{\n{registers}' + "\n".join(self.lines)
        return Kernel(self.name, code + "\n}\n", self.parameters, self.shared_bytes, self.places)

    # Declarations

    def declare_shared(self, text: str) -> None:
        match = re.fullmatch(r"(?:\.extern )?\.shared \.align (\d+) \.b8 ([\w$]+)\[(\d*)\]", text)
        if match is None:
            raise UnknownError(f"declaration {text!r}")
        self.offsets[match[2]] = -(-self.shared_bytes // int(match[1])) * int(match[1])
        self.shared_bytes = self.offsets[match[2]] + int(match[3] or self.dynamic_shared_bytes)

    def declare_parameters(self, text: str) -> None:
        end = 0
        for one in filter(None, _split(text)):
            pattern = r"\.param\s+(?:\.align (\d+) )?\.(\w+) (?:\.ptr \.global \.align \d+ )?([\w$]+)(?:\[(\d+)\])?"
            match = re.fullmatch(pattern, one)
            if match is None:
                raise UnknownError(f"parameter {one!r}")
            unit = BITS[match[2]] // 8
            align = int(match[1] or unit)
            self.offsets[match[3]] = -(-end // align) * align
            end = self.offsets[match[3]] + unit * int(match[4] or 1)
            self.parameters.append((self.offsets[match[3]], end - self.offsets[match[3]]))

    def declare_registers(self, text: str) -> None:
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        if match is None or match[1] not in BITS:
            raise UnknownError(f"declaration {text!r}")
        for name in _split(match[2]):
            if family := re.fullmatch(r"(%\w+)<\d+>", name):
                self.families[family[1]] = BITS[match[1]]
            else:
                self.scopes[-1]["v_" + name.strip("%")] = BITS[match[1]]
                if len(self.scopes) > 1:
                    self.lines.append(f"R{BITS[match[1]]} v_{name.strip('%')};")

    # Operands

    def register(self, name: str) -> tuple[str, int] | None:
        """The variable and the bits of a register."""
        if name == "_":
            return "t->unused", 64
        variable = "v_" + name.strip("%")
        for scope in reversed(self.scopes):
            if variable in scope:
                return variable, scope[variable]
        family = re.fullmatch(r"(%[a-z]+)\d+", name)
        if family is None or family[1] not in self.families:
            return None
        self.scopes[0][variable] = self.families[family[1]]
        return variable, self.scopes[0][variable]

    def source_of(self, operand: str, kind: str) -> str:
        """The C++ expression for an operand that is read."""
        if operand.startswith("!"):
            return f"!{self.source_of(operand[1:], kind)}"
        if found := self.register(operand):
            return f"{found[0]}.{kind}"
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand in self.offsets:
            return f"{self.offsets[operand]}u"
        if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", operand):
            bits = int(match[1], 16)
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            bits = int(operand.rstrip("U"), 0)
        else:
            raise UnknownError(f"operand {operand!r}")
        if kind == "pred":
            return "true" if bits else "false"
        number = f"{bits % (1 << BITS[kind]):#x}u"
        return f"{kind}({number})" if kind[1:].isdigit() and kind[0] != "f" else f"from_bits<{kind}>({number})"

    def target_of(self, operand: str, kind: str) -> str:
        """The C++ variable to assign a value of a type to; a wider register is extended."""
        found = self.register(operand)
        if found is None:
            raise UnknownError(f"target {operand!r}")
        if found[1] > BITS[kind] and operand != "_":
            kind = f"{'s' if kind[0] == 's' else 'u'}{found[1]}"
        return f"{found[0]}.{kind}"

    def address_of(self, operand: str) -> str:
        match = re.fullmatch(r"\[ ?([%\w$]+) ?(?:\+ ?(-?\d+))? ?\]", operand)
        if match is None:
            raise UnknownError(f"address {operand!r}")
        found = self.register(match[1])
        base = f"{found[0]}.u{found[1]}" if found else self.source_of(match[1], "u64")
        return f"u64({base}) + {int(match[2] or 0)}"

    # Statements

    def add(self, line: int, text: str) -> None:
        if text == "{":
            self.scopes.append({})
            self.lines.append("{")
        elif text == "}":
            self.scopes.pop()
            self.lines.append("}")
        elif text.endswith(":"):
            self.label = text[:-1]
            self.lines.append(f"{_label(self.label)}:;")
        elif text.startswith(".reg "):
            self.declare_registers(text)
        elif text.startswith(".shared "):
            self.declare_shared(text)
        elif text.startswith(".loc "):
            # Where it was inlined comes second, which says more if the first is in a library.
            places = [(self.files[file], line) for file, line in re.findall(r"(?:loc|inlined_at) (\d+) (\d+)", text)]
            path, number = next((place for place in places if place[0].startswith(str(ROOT))), places[0])
            self.source = f"{path}:{number}"
        elif text.startswith(".branchtargets "):
            self.tables[self.label] = _split(text.removeprefix(".branchtargets "))
        else:
            match = re.fullmatch(r"(?:@(!?%?\w+) )?([\w.:]+) ?(.*)", text)
            if match is None:
                raise UnknownError(text)
            code = self.instruction(line, match[2], _split(match[3]))
            if "t->" in code:
                self.places[line] = f"{self.source}, `{text}`"
            self.lines.append(f"if ({self.source_of(match[1], 'pred')}) {{{code}}}" if match[1] else code)

    def instruction(self, line: int, opcode: str, operands: list[str]) -> str:
        """The C++ statements for an instruction."""
        parts = opcode.split(".")
        types = [part for part in parts if part in BITS]
        kind, base = (types or [""])[-1], ".".join(part for part in parts if part not in BITS)
        if opcode in IGNORED or parts[0] == "":
            if opcode not in IGNORED:
                raise UnknownError(f"directive {opcode}")
            return ";"
        if base in OPERANDS:
            return self.computation(base, types, operands)
        if base in MEETINGS:
            return self.meeting(line, base, kind, operands)
        if parts[0] in ("ld", "st"):
            return self.access(line, parts, kind, operands)
        if parts[0] == "atom":
            return self.atomic(line, parts, kind, operands)
        match base:
            case "mov":
                return self.move(kind, operands)
            case "cvt" | "cvt.rn" | "cvt.rzi":
                values = ", ".join(self.source_of(operand, types[1]) for operand in operands[1:])
                return f"{self.target_of(operands[0], types[0])} = {base.replace('.', '_')}<{types[0]}>({values});"
            case "cvta.to.global":
                return f"{self.target_of(operands[0], kind)} = {self.source_of(operands[1], kind)};"
            case "cvta.shared":
                return f"{self.target_of(operands[0], kind)} = kSharedWindow + {self.source_of(operands[1], kind)};"
            case "bra" | "bra.uni":
                return f"goto {_label(operands[0])};"
            case "brx.idx":
                cases = "".join(f"case {i}: goto {_label(to)};" for i, to in enumerate(self.tables[operands[1]]))
                return f'switch ({self.source_of(operands[0], "u32")}) {{{cases}}} t->fail("no such branch", {line});'
            case "ret" | "exit":
                return "return;"
            case "bar.sync" if len(operands) == 1:
                return f"t->barrier({self.source_of(operands[0], 'u32')}, {line});"
            case "bar.warp.sync":
                return f"t->meet(k_bar_warp_sync, {self.source_of(operands[0], 'u32')}, 0, 0, 0, {line});"
            case "fence.acq_rel.gpu" | "fence.acq_rel.sys" | "membar.gl" | "membar.sys":
                return "t->fence();"
        raise UnknownError(f"instruction {opcode}")

    def computation(self, base: str, types: list[str], operands: list[str]) -> str:
        kinds = {"T": types[-1], "D": types[0], "W": WIDE.get(types[-1], ""), "N": "u32", "P": "pred"}
        expected = [kinds[letter] for letter in OPERANDS[base]]
        if len(operands) != len(expected) or len(types) != 1 + ("D" in OPERANDS[base]):
            raise UnknownError(f"{base} of {operands}")
        values = [*map(self.source_of, operands[1:], expected[1:])]
        if base in OPERATORS and types[0][0] in "usbp" and types[0] != "bf16x2":  # integers and predicates
            return f"{self.target_of(operands[0], types[0])} = {OPERATORS[base].join(values)};"
        name = base.replace(".", "_") + (f"<{types[0]}>" if "D" in OPERANDS[base] else "")
        return f"{self.target_of(operands[0], expected[0])} = op_{name}({', '.join(values)});"

    def move(self, kind: str, operands: list[str]) -> str:
        target, source = operands
        if target.startswith("{"):
            parts = _split(target.strip("{} "))
            part = f"u{BITS[kind] // len(parts)}"
            whole = self.source_of(source, f"u{BITS[kind]}")
            each = [f"{self.target_of(p, part)} = whole >> {i * BITS[part]};" for i, p in enumerate(parts)]
            return f"{{const u64 whole = {whole}; {' '.join(each)}}}"
        if source.startswith("{"):
            parts = _split(source.strip("{} "))
            part = f"u{BITS[kind] // len(parts)}"
            each = [f"u64({self.source_of(p, part)}) << {i * BITS[part]}" for i, p in enumerate(parts)]
            return f"{self.target_of(target, f'u{BITS[kind]}')} = {' | '.join(each)};"
        return f"{self.target_of(target, kind)} = {self.source_of(source, kind)};"

    def access(self, line: int, parts: list[str], kind: str, operands: list[str]) -> str:
        modifiers = [part for part in parts[1:] if part not in BITS and part not in CACHING]
        space = SPACES[modifiers.pop(0)] if modifiers and modifiers[0] in SPACES else "kGeneric"
        count = {"v2": 2, "v4": 4}.get(modifiers.pop(0), 0) if modifiers else 1
        if modifiers or not count:
            raise UnknownError(f"instruction {'.'.join(parts)}")
        memory, values = operands if parts[0] == "st" else operands[::-1]
        each = _split(values.strip("{} "))
        if len(each) != count:
            raise UnknownError(f"{'.'.join(parts)} of {len(each)} registers")
        where = f"{space}, {self.address_of(memory)}, {BITS[kind] // 8 * count}, {line}"
        if parts[0] == "ld":
            assigned = " ".join(f"{self.target_of(v, kind)} = m[{i}];" for i, v in enumerate(each))
            return f"{{const auto m = (const {kind}*)t->read({where}); {assigned}}}"
        return f"{{const {kind} m[] = {{{', '.join(self.source_of(v, kind) for v in each)}}}; t->write(m, {where});}}"

    def meeting(self, line: int, base: str, kind: str, operands: list[str]) -> str:
        target, *sources = operands
        inside = ""
        if "|" in target:
            target, inside = target.split("|")
            inside = f" {self.target_of(inside, 'pred')} = t->is_inside;"
        mask = self.source_of(sources.pop(), "u32")
        first = self.source_of(sources[0], kind)
        others = ", ".join([self.source_of(s, "u32") for s in sources[1:]] + ["0"] * (3 - len(sources)))
        operation = "k_" + base.replace(".", "_") + ("_" + kind if base.startswith("redux") else "")
        value = f"t->meet({operation}, {mask}, {first}, {others}, {line})"
        return f"{self.target_of(target, kind)} = {value};{inside}"

    def atomic(self, line: int, parts: list[str], kind: str, operands: list[str]) -> str:
        modifiers = [part for part in parts[1:] if part not in BITS]
        operation = modifiers.pop()
        order = next((part for part in modifiers if part in ORDERS), "relaxed")
        space = next((SPACES[part] for part in modifiers if part in SPACES), "kGeneric")
        if operation not in ATOMICS or set(modifiers) - {order, "gpu", "sys", "global"} or len(operands) != 3:
            raise UnknownError(f"instruction {'.'.join(parts)}")
        where = f"{space}, {self.address_of(operands[1])}, {BITS[kind] // 8}, {line}"
        flags = f"{'true' if 'acq' in order else 'false'}, {'true' if order in ('release', 'acq_rel') else 'false'}"
        by = self.source_of(operands[2], kind)
        return (
            f"{{const auto m = ({kind}*)t->atomic({where}, {flags}); const {kind} by = {by}, old = *m;"
            f" *m = atom_{operation}(old, by); {self.target_of(operands[0], kind)} = old;}}"
        )
