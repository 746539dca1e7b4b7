"""Findings of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Self

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class DoctorFinding:
    """Result of a check."""

    name: str
    value: str
    level: Level = "ok"  # `ok`; `warning` if it may go wrong, or slowly; `error` if a run will fail
    remedy: str = ""  # way to mend it; empty if nothing has to be mended
    places: tuple[str, ...] = ()  # machines or ranks where it was found

    def to_json(self) -> dict[str, object]:
        """The finding as values that JSON can hold."""
        return asdict(self) | {"places": list(self.places)}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Self:
        """Read back what `to_json` has made."""
        return cls(**{**values, "places": tuple(values["places"])})  # type: ignore[arg-type]


@dataclass
class Findings:
    """Findings of one place, as they are made."""

    place: str
    found: list[DoctorFinding] = field(default_factory=list)

    def ok(self, name: str, value: str) -> None:
        """Note something that is as it should be."""
        self.found.append(DoctorFinding(name, value, places=(self.place,)))

    def warn_if(self, is_bad: bool, name: str, value: str, remedy: str) -> None:
        """Note something that may go wrong, or slowly, if it is bad."""
        self._note("warning" if is_bad else "ok", name, value, remedy)

    def fail_if(self, is_bad: bool, name: str, value: str, remedy: str) -> None:
        """Note something that makes a run fail if it is bad."""
        self._note("error" if is_bad else "ok", name, value, remedy)

    def _note(self, level: Level, name: str, value: str, remedy: str) -> None:
        self.found.append(DoctorFinding(name, value, level, "" if level == "ok" else remedy, (self.place,)))


def run_checks(place: str, checks: Iterable[Callable[[Findings], None]]) -> list[DoctorFinding]:
    """Findings of all checks; one that fails itself is a finding, too."""
    findings = Findings(place)
    for check in checks:
        try:
            check(findings)
        except Exception as error:  # noqa: BLE001 - it is reported; a rank that raised would leave the others waiting
            name = check.__name__.removeprefix("check_").replace("_", " ")
            message = f"{type(error).__name__}: {error}"
            findings.fail_if(True, name, message, "this check has failed; a run would meet the same error")
    return findings.found


def merged(findings: Sequence[DoctorFinding]) -> list[DoctorFinding]:
    """Equal findings of several places as one, the worst first of each level, in the order in which they came."""
    by_content: dict[DoctorFinding, list[str]] = {}
    for finding in findings:
        by_content.setdefault(replace(finding, places=()), []).extend(finding.places)
    joined = [replace(finding, places=tuple(dict.fromkeys(places))) for finding, places in by_content.items()]
    return sorted(joined, key=lambda finding: -LEVELS.index(finding.level))


def differences(name: str, values: Mapping[str, str], remedy: str) -> Iterator[DoctorFinding]:
    """An error for each value, the rarest first, or one finding if all places agree."""
    by_value: dict[str, list[str]] = {}
    for place, value in values.items():
        by_value.setdefault(value, []).append(place)
    level: Level = "ok" if len(by_value) == 1 else "error"
    for value, places in sorted(by_value.items(), key=lambda item: len(item[1])):
        yield DoctorFinding(name, value, level, remedy if level == "error" else "", tuple(places))
