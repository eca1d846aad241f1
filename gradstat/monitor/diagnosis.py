"""`Diagnosis`: findings ordered from cause to effect, in plain words."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradstat._core.text import and_more, count_of, lines_of, listed, printable, steps_in_words, wrapped
from gradstat.recording.findings import Finding, in_words, reference_to
from gradstat.recording.recording import Recording, first_nonfinite
from gradstat.rules import RULES
from gradstat.rules.consequences import explained
from gradstat.tensor_stats import Judged

# Findings that begin within this many steps of each other form one incident.
_APART = 50
# Texts and pages have no more findings than this; `Diagnosis.to_dict` has all.
_SHOWN = 100
# A loss has fallen if its mean over a quarter of the steps, at least 4, is smaller by this part.
_LEAST, _FALLS = 4, 0.01


@dataclass(frozen=True)
class Incident:
    """Findings that began at about the same time, the likeliest cause first.

    Attributes:
        first, last: Steps in which the first and the last of the findings began.
        findings: The findings, in order.
    """

    first: int
    last: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Diagnosis(Judged):
    """Findings of a run, ordered by when they began and by how far upstream they are. Made by `Monitor.diagnose`.

    Attributes:
        findings: Errors and warnings by the step in which they began. Those of one step are in the order of
            `gradstat.monitor.RULES`, causes before effects: the batch, the state before the step, the forward pass in
            module order, the loss, the backward pass in its order. A rising loss comes after gradients that vanished.
            In an incident, an event that was observed comes before the findings that are inferred from numbers and
            that it explains. Then come errors that follow from another finding, and infos, in the same order.
        incidents: The errors and warnings in groups, by time.
        steps: How many steps the run had taken.
        model: Class name of the model.
        culprit: What a replay found, in words; empty if there was none.
        why_nothing: Why no step was recorded, if none was and the reason is known.
        notes: What no rule reports, in words: that there was no loss, that the loss has not fallen, NaN or Inf.
        ended_by: The exception that ended the run, in words; empty if none is known.
    """

    findings: tuple[Finding, ...]
    incidents: tuple[Incident, ...]
    steps: int
    model: str
    culprit: str = ""
    why_nothing: str = ""
    notes: tuple[str, ...] = ()
    ended_by: str = ""

    @classmethod
    def of(cls, recording: Recording, why_nothing: str = "") -> Diagnosis:
        """The diagnosis of a recording.

        Args:
            recording: From a monitor or a file.
            why_nothing: Why no step was seen, if none was.
        """
        rules = [rule.name for rule in RULES]
        order = {kind: {name: i for i, name in enumerate(table.names)} for kind, table in recording.tables.items()}
        backward = {name: i for i, name in enumerate(recording.backward_order)}

        def place(finding: Finding) -> tuple[int, int, int]:
            rule = rules.index(finding.rule) if finding.rule in rules else len(rules)  # user rules come last
            positions = order.get(finding.about, {})
            at = positions.get(finding.name, len(positions))
            if finding.about == "gradient":
                # Without a backward order, assume that parameters at the end of the model are nearest to the loss.
                at = backward.get(finding.name, -at)
            return finding.step, rule, at

        explains = {rule.name: rule.explains for rule in RULES}
        ranked = explained(sorted(recording.findings, key=place), recording.findings, explains)
        serious = [finding for finding in ranked if finding.severity != "info" and not _follows(finding)]
        groups: list[list[Finding]] = []
        for finding in serious:
            if groups and finding.step - groups[-1][-1].step <= _APART:
                groups[-1].append(finding)
            else:
                groups.append([finding])
        incidents = tuple(_incident(group, explains) for group in groups)
        serious = [finding for incident in incidents for finding in incident.findings]
        rest = [finding for finding in ranked if finding.severity == "info" or _follows(finding)]
        rest.sort(key=lambda finding: finding.severity == "info")
        steps = recording.meta.get("steps")
        if type(steps) is not int:  # meta comes from a file, where it may be anything
            steps = int(recording.steps[-1]) + 1 if len(recording.steps) else 0
        model, culprit, ended_by = (str(recording.meta.get(name) or "") for name in ("model", "culprit", "ended_by"))
        notes = tuple(_notes(recording, not serious)) if steps else ()
        return cls((*serious, *rest), incidents, steps, model or "the model", culprit, why_nothing, notes, ended_by)

    @property
    def ok(self) -> bool:
        """Whether steps were seen, and there is no error and no warning."""
        return bool(self.steps) and not self.incidents

    def headline(self) -> str:
        """The diagnosis in one sentence: what a replay found with its line of code, else what began first."""
        found, *where = self.culprit.splitlines() or [""]
        if where and where[0].startswith("  at "):
            code = [line.strip() for line in where[1:2] if line.startswith("   ")]
            return printable(": ".join([f"{found} {where[0].strip()}", *code]))
        if not self.steps and not self.incidents:
            return printable(f"nothing is known about {self.model}, since {self.why_nothing or 'no step was seen'}")
        if self.ok and self.ended_by:
            return printable(
                f"no finding in {count_of(self.steps, 'step')} of {self.model}, which then ended with {self.ended_by}"
            )
        if self.ok:
            return printable(f"nothing wrong in {count_of(self.steps, 'step')} of {self.model}")
        first = self.incidents[0].findings[0]
        counted = [f for f in self.findings if not _follows(f)]
        counts = [sum(f.severity == severity for f in counted) for severity in ("error", "warning")]
        words = " and ".join(count_of(n, word) for n, word in zip(counts, ("error", "warning"), strict=True) if n)
        followed = sum(map(len, self._followed().values()))
        errors = sum(_follows(f) and f.severity == "error" for f in self.findings)
        also = f", {count_of(errors, 'error')} among them" * bool(errors)
        words += f" (and {count_of(followed, 'finding')} that followed{also})" * bool(followed)
        name = f", {first.name}" * (first.about != "series" and first.name not in first.text)
        return printable(
            f"{words} in {count_of(self.steps, 'step')} of {self.model}; first in step {first.step}{name}: "
            f"{first.text}" + f"; the run ended with {self.ended_by}" * bool(self.ended_by)
        )

    def __str__(self) -> str:
        lines, culprit = [f"gradstat: {self.headline()}"], self.culprit.splitlines()
        if culprit and lines[0].startswith(f"gradstat: {printable(culprit[0])}"):  # the headline says the same
            lines[0] = f"gradstat: {culprit.pop(0)}"
        elif culprit:
            lines.append("")
        lines += culprit
        number = 0
        (shown, more), followed = self._shown(), self._followed()
        for i, incident in enumerate(shown):
            if len(self.incidents) > 1:
                lines += ["", f"incident {i + 1}, {steps_in_words((incident.first, incident.last))}"]
            for finding in incident.findings:
                number += 1
                lines += ["", f"{number}. {finding.rule} ({finding.severity}), since step {finding.step}"]
                lines.append(f"   {finding.text}")
                evidence = ", ".join(f"{key} = {_formatted(value)}" for key, value in in_words(finding.evidence))
                lines += [f"   evidence: {evidence}"] if finding.evidence else []
                effects = followed.get(reference_to(finding))
                lines += [f"   followed by: {', '.join(effects)}"] if effects else []
                for title, items in (("likely causes", finding.causes), ("what to try", finding.advice)):
                    lines += [f"   {title}:", *(f"     - {item}" for item in items)] if items else []
        lines += ["", more] if more else []
        infos = self._infos()
        if infos:
            lines += ["", "also noted:", *lines_of(infos, 10, "  {}".format)]
        return "\n".join(map(wrapped, map(printable, lines)))

    def _followed(self) -> dict[str, list[str]]:
        """By `reference_to` a cause, what followed from it, as the runner of rules noted it."""
        followed: dict[str, list[str]] = {}
        for finding in sorted(self.findings, key=lambda one: one.step):
            cause = str(finding.evidence.get("follows"))
            of = "" if finding.about == "series" else f" of {finding.name}"
            words = f"{finding.rule}{of} by step {finding.step}"
            if _follows(finding) and cause != reference_to(finding) and words not in followed.setdefault(cause, []):
                followed[cause].append(words)
        return followed

    def _shown(self) -> tuple[list[Incident], str]:
        """The incidents with the first findings, and how many findings are left out, in words."""
        shown, left = [], _SHOWN
        for incident in self.incidents:
            if left > 0:
                shown.append(replace(incident, findings=incident.findings[:left]))
            left -= len(incident.findings)
        return shown, and_more(-left, "... and {} more findings")

    def _infos(self) -> list[str]:
        infos = [f for f in self.findings if f.severity == "info" and not _follows(f)]
        return [*self.notes, *(f"step {f.step}: {f.text}" for f in infos)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        places = itertools.count()  # incidents have the findings in order
        incidents = [{**vars(one), "findings": [next(places) for _ in one.findings]} for one in self.incidents]
        values = {name: getattr(self, name) for name in ("steps", "model", "culprit", "notes", "ended_by")}
        findings = [finding.to_dict() for finding in self.findings]
        return {"ok": self.ok, "headline": self.headline(), **values, "findings": findings, "incidents": incidents}

    def to_html(self) -> str:
        """The diagnosis as an HTML fragment, all text escaped."""
        out = [f'<div class="gradstat-diagnosis"><p><b>{html.escape(self.headline())}</b></p>']
        if self.culprit:
            out.append(f"<pre>{html.escape(self.culprit)}</pre>")
        (shown, more), followed = self._shown(), self._followed()
        for incident in shown:
            out.append(f"<h3>{steps_in_words((incident.first, incident.last))}</h3><ol>")
            for f in incident.findings:
                causes, advice = (_listed(items) for items in (f.causes, f.advice))
                effects = ", ".join(followed.get(reference_to(f), ()))
                out.append(
                    f'<li class="{f.severity}"><b>{html.escape(f.rule)}</b> ({f.severity}), since step {f.step}, in '
                    f"<code>{html.escape(f.name)}</code><br>{html.escape(f.text)}"
                    + f"<br>followed by: {html.escape(effects)}"
                    * bool(effects)
                    + f"<details><summary>causes and advice</summary><p>likely causes</p>{causes}"
                    f"<p>what to try</p>{advice}</details></li>"
                )
            out.append("</ol>")
        out.append(f"<p>{more}</p>" if more else "")
        if self._infos():
            out.append("<p>also noted</p>" + _listed(self._infos()[:_SHOWN]))
        return "".join(out) + "</div>"

    _repr_html_ = to_html


def _follows(finding: Finding) -> bool:
    """Whether it follows from another finding, and is named there in a line."""
    return "follows" in finding.evidence


def _incident(findings: Sequence[Finding], explains: Mapping[str, Sequence[str]]) -> Incident:
    """An incident of ``findings``, in order; one that explains others comes first, though it may have shown later."""
    rules = {finding.rule for finding in findings}
    ordered = sorted(findings, key=lambda finding: rules.isdisjoint(explains.get(finding.rule, ())))
    return Incident(findings[0].step, findings[-1].step, tuple(ordered))


def _notes(recording: Recording, is_ok: bool) -> Iterator[str]:
    losses, nonfinite = recording.scalars.get("loss"), first_nonfinite(recording)
    if nonfinite is not None:
        step, kind, names = nonfinite
        yield f"step {step}: NaN or Inf in the {kind} of {listed(names, 1)}; no rule reports it"
    if losses is None:
        yield "no loss was recorded, so the rules on the loss had nothing to review"
        return
    losses = losses[np.isfinite(losses)]
    quarter = len(losses) // 4
    if is_ok and quarter >= _LEAST and recording.steps[0] == 0:
        first, last = float(losses[:quarter].mean()), float(losses[-quarter:].mean())
        if last > first - _FALLS * abs(first):
            yield (
                f"the loss does not fall: its mean is {first:.4g} in the first {count_of(quarter, 'step')} and "
                f"{last:.4g} in the last; inputs, gradients and weights show no cause, so look at the data and at each "
                "term of the loss"
            )


def _formatted(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_formatted, value[:5]))}{', ...' * (len(value) > 5)}]"
    return str(value)


def _listed(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
