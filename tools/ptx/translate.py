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
# W: twice as wide; N: u32; P: a predicate. Some instructions take different numbers of operands.
OPERANDS = {
    instruction: operands
    for operands, instructions in {
        "TT": "abs neg not rcp.rn sqrt.rn rsqrt.approx.ftz",
        "TTT": "add sub mul mul.lo mul.hi mul.rn div div.rn rem and or xor",
        "TTT TTTT": "min max",
        "TTTT": "mad.lo prmt",
        "DTD": "add.rn",
        "DTTD": "fma.rn",
        "WTT": "mul.wide",
        "WTTW": "mad.wide",
        "TTN": "shl shr",
        "TTNN": "bfe",
        "TTTNN": "bfi",
        "TTTP": "selp",
        "NT": "popc",
        "DT": "cvt cvt.rzi",
        "DT DTT": "cvt.rn",
        "DTT": "set.eq",
        "PTT": "setp.num setp.nan "
        + " ".join(f"setp.{test} setp.{test}u" for test in ("eq", "ne", "lt", "le", "gt", "ge")),
    }.items()
    for instruction in instructions.split()
}
# Some of them on integers, as calls take g++ longer to compile.
OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
OPERATORS |= {"setp.eq": "==", "setp.ne": "!=", "setp.lt": "<", "setp.le": "<=", "setp.gt": ">", "setp.ge": ">="}

SPACES = {"global": "kGlobal", "shared": "kShared", "shared::cta": "kShared", "param": "kParameter"}
CACHING = {"ca", "cg", "L1::no_allocate"}  # results do not depend on it
MEETINGS = {"bar.warp.sync", "shfl.sync.bfly.b32", "shfl.sync.down.b32", "vote.sync.any.pred"}
MEETINGS |= {"redux.sync.add.s32", "redux.sync.min.s32"}
ATOMICS = {"add", "inc"}
ORDERS = ("relaxed", "acquire", "release", "acq_rel")


class UnknownError(ValueError):
    """Something in PTX that is not translated."""


def names_of(ptx: str) -> list[str]:
    """The kernels in a module."""
    return re.findall(r"\.entry\s+([\w$]+)\s*\(", ptx)


def translated(ptx: str, name: str, dynamic_shared_bytes: int = 0) -> Translation:
    """Translates one kernel of a module."""
    start = re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx)
    assert start is not None, f"no kernel {name}"
    end = ptx.index("\n}", start.end())
    parameters, body = ptx[start.end() : end].split("{", 1)
    kernel = Translation(name, dynamic_shared_bytes)
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
    return kernel


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


def _matched(pattern: str, text: str, what: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise UnknownError(f"{what} {text!r}")
    return match


def _split(operands: str) -> list[str]:
    """Splits at commas outside of brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{\[])+", operands)]


def _label(name: str) -> str:
    return "label_" + name.replace("$", "_")


@dataclass
class Translation:
    """A kernel, to which statements are added."""

    name: str
    dynamic_shared_bytes: int
    files: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # of variables in shared memory, and of parameters
    shared_bytes: int = 0
    parameters: list[tuple[int, int]] = field(default_factory=list)  # offset and size in bytes
    families: dict[str, int] = field(default_factory=dict)  # bits of registers by prefix
    scopes: list[dict[str, int]] = field(default_factory=lambda: [{}])  # bits of registers by name, innermost last
    tables: dict[str, list[str]] = field(default_factory=dict)  # of labels
    places: dict[int, str] = field(default_factory=dict)  # for lines of the PTX: line in the source, and instruction
    source: str = "?"
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> str:
        """C++."""
        begin = '#include "device.h"\nextern "C" void kernel(Thread* t) {'
        return "\n".join([begin, *self.lines, "}\n"])

    # Declarations

    def declare_shared(self, text: str) -> None:
        match = _matched(r"(?:\.extern )?\.shared \.align (\d+) \.b8 ([\w$]+)\[(\d*)\]", text, "declaration")
        self.offsets[match[2]] = -(-self.shared_bytes // int(match[1])) * int(match[1])
        self.shared_bytes = self.offsets[match[2]] + int(match[3] or self.dynamic_shared_bytes)

    def declare_parameters(self, text: str) -> None:
        end = 0
        for one in filter(None, _split(text)):
            pattern = r"\.param\s+(?:\.align (\d+) )?\.(\w+) (?:\.ptr \.global \.align \d+ )?([\w$]+)(?:\[(\d+)\])?"
            match = _matched(pattern, one, "parameter")
            unit = BITS[match[2]] // 8
            align = int(match[1] or unit)
            self.offsets[match[3]] = -(-end // align) * align
            end = self.offsets[match[3]] + unit * int(match[4] or 1)
            self.parameters.append((self.offsets[match[3]], end - self.offsets[match[3]]))

    def declare_registers(self, text: str) -> None:
        match = _matched(rf"\.reg \.({'|'.join(BITS)}) (.*)", text, "declaration")
        for name in _split(match[2]):
            if family := re.fullmatch(r"%(\w+)<(\d+)>", name):
                self.families[family[1]] = BITS[match[1]]
                name = f"all_{family[1]}[{family[2]}]"  # thousands of variables compile slower than an array
            else:
                name = "v_" + name.strip("%")
                self.scopes[-1][name] = BITS[match[1]]
            self.lines.append(f"R{BITS[match[1]]} {name};")

    # Operands

    def register(self, name: str) -> tuple[str, int] | None:
        """The variable and the bits of a register."""
        if name == "_":
            return "t->unused", 64
        variable = "v_" + name.strip("%")
        for scope in reversed(self.scopes):
            if variable in scope:
                return variable, scope[variable]
        family = re.fullmatch(r"%([a-z]+)(\d+)", name)
        if family is None or family[1] not in self.families:
            return None
        return f"all_{family[1]}[{family[2]}]", self.families[family[1]]

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
        match = _matched(r"0[fFdD]([0-9a-fA-F]+)|(-?(?:0[xX][0-9a-fA-F]+|\d+))U?", operand, "operand")
        bits = int(match[1], 16) if match[1] else int(match[2], 0)
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
        match = _matched(r"\[ ?([%\w$]+) ?(?:\+ ?(-?\d+))? ?\]", operand, "address")
        found = self.register(match[1])
        base = f"{found[0]}.u{found[1]}" if found else self.source_of(match[1], "u64")
        return f"u64({base}) + {int(match[2] or 0)}"

    # Statements

    def add(self, line: int, text: str) -> None:
        if text in ("{", "}"):
            self.lines.append(text)
            self.scopes = [*self.scopes, {}] if text == "{" else self.scopes[:-1]
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
            match = _matched(r"(?:@(!?%?\w+) )?([\w.:]+) ?(.*)", text, "statement")
            code = self.instruction(line, match[2], _split(match[3]))
            if "t->" in code:
                self.places[line] = f"{self.source}, `{text}`"
            self.lines.append(f"if ({self.source_of(match[1], 'pred')}) {{{code}}}" if match[1] else code)

    def instruction(self, line: int, opcode: str, operands: list[str]) -> str:
        """The C++ statements for an instruction."""
        parts = opcode.split(".")
        types = [part for part in parts if part in BITS]
        kind, base = (types or [""])[-1], ".".join(part for part in parts if part not in BITS)
        if base in OPERANDS:
            return self.computation(base, types, operands)
        if opcode in MEETINGS:
            return self.meeting(line, base, kind, operands)
        match parts[0], base:
            case "ld" | "st", _:
                return self.access(line, parts, kind, operands)
            case "atom", _:
                return self.atomic(line, parts, kind, operands)
            case _, "mov" | "cvta.to.global":
                return self.move(kind, operands)
            case _, "cvta.shared":
                return f"{self.target_of(operands[0], kind)} = kSharedWindow + {self.source_of(operands[1], kind)};"
            case _, "bra" | "bra.uni":
                return f"goto {_label(operands[0])};"
            case _, "brx.idx":
                cases = "".join(f"case {i}: goto {_label(to)};" for i, to in enumerate(self.tables[operands[1]]))
                return f'switch ({self.source_of(operands[0], "u32")}) {{{cases}}} t->fail("no such branch", {line});'
            case _, "ret":
                return "return;"
            case _, "bar.sync" if operands == ["0"]:
                return f"t->barrier({line});"
            case _ if opcode == ".pragma":
                return ";"
        raise UnknownError(f"instruction {opcode}")

    def computation(self, base: str, types: list[str], operands: list[str]) -> str:
        letters = next((letters for letters in OPERANDS[base].split() if len(letters) == len(operands)), "")
        if not letters or not 1 <= len(types) <= 1 + ("D" in letters):
            raise UnknownError(f"{base} of {operands}")
        kinds = {"T": types[-1], "D": types[0], "W": WIDE.get(types[-1], ""), "N": "u32", "P": "pred"}
        target, *sources = [kinds[letter] for letter in letters]
        values = [*map(self.source_of, operands[1:], sources)]
        if base in OPERATORS and types[0][0] in "usbp" and "f" not in types[0]:  # integers and predicates
            result = OPERATORS[base].join(values)
        else:  # what cannot be deduced from the operands is given
            given = f"<{target}>" if letters[0] == "W" or len(types) > 1 else ""
            result = f"op_{base.replace('.', '_')}{given}({', '.join(values)})"
        return f"{self.target_of(operands[0], target)} = {result};"

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
        *targets, mask = operands
        target, *values = targets or ["_", "0"]  # that of a barrier
        target, *inside = target.split("|")
        first = self.source_of(values[0], kind or "u32")
        rest = [*(self.source_of(operand, "u32") for operand in values[1:]), "0", "0"][:2]
        met = f"t->meet({base.replace('.', '_')}, {self.source_of(mask, 'u32')}, {first}, {', '.join(rest)}, {line})"
        found = "".join(f" {self.target_of(one, 'pred')} = t->is_inside;" for one in inside)
        return f"{self.target_of(target, kind or 'u32')} = {met};{found}"

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
