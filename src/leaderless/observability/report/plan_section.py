"""The plan in short: nodes and where they run, what moves, batch sizes, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from leaderless.observability.report.markup import Html, element, format_bytes, join
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.untrusted import as_list, as_mapping, as_number, as_text


def plan_section(run: RunFiles) -> Html:
    """Picture and tables of the plan; a sentence where there is none.

    Args:
        run: What was read of the run.
    """
    parts: list[Html] = []
    if run.picture:
        picture = element(
            "div", Html(run.picture), class_="picture scroll", tabindex="0", role="region", aria_label="Workflow"
        )
        parts.append(picture)
    if not run.plan:
        return join(*parts, element("p", "plan.json was not found or could not be read.", class_="note"))
    parts += [element("h3", "Nodes"), _nodes(run.plan)]
    pruned = [as_text(name) for name in as_list(run.plan.get("pruned"))]
    if pruned:
        parts.append(element("p", f"Left out, as nobody reads what they write: {', '.join(pruned)}.", class_="note"))
    parts += [element("h3", "What moves between ranks"), _moves(run.plan)]
    parts.append(
        element(
            "div", _block("Batch sizes", _batch_sizes(run.plan)), _block("Memory", _memory(run.plan)), class_="columns"
        )
    )
    return join(*parts)


def _nodes(plan: Mapping[str, object]) -> Html:
    rows = []
    for node in map(as_mapping, as_list(plan.get("nodes"))):
        after = ", ".join(map(as_text, as_list(node.get("after")))) or "data"
        cells = (as_text(node.get("run")), as_text(node.get("role")) or "–", after, as_text(node.get("layout")))
        rows.append((as_text(node.get("name")), *cells))
    return _table(("Node", "Stage", "Role", "After", "Layout"), rows)


def _moves(plan: Mapping[str, object]) -> Html:
    edges = [as_mapping(edge) for edge in as_list(plan.get("edges"))]
    moving = [edge for edge in edges if as_text(edge.get("kind")) != "local"]
    if not moving:
        return element("p", "Nothing: every node finds its rows on its own rank.", class_="note")
    rows = [
        (
            f"{as_text(edge.get('source'))} → {as_text(edge.get('target'))}",
            ", ".join(map(as_text, as_list(edge.get("columns")))),
            _bytes(edge.get("max_bytes")),
        )
        for edge in moving
    ]
    return _table(("Edge", "Columns", "At most, per step"), rows)


def _batch_sizes(plan: Mapping[str, object]) -> Html:
    return _terms((name.replace("_", " "), as_text(value)) for name, value in as_mapping(plan.get("batch")).items())


def _memory(plan: Mapping[str, object]) -> Html:
    memory = as_mapping(plan.get("memory_bytes"))
    if not memory:
        return element("p", "Not estimated: the size of a model was not known.", class_="note")
    kinds = ((kind, as_mapping(memory.get(kind))) for kind in ("cpu", "accelerator"))
    return join(*(_memory_of(f"on a{'n' * (kind == 'accelerator')} {kind}", estimate) for kind, estimate in kinds))


def _memory_of(where: str, estimate: Mapping[str, object]) -> Html:
    return join(
        _terms([(f"peak on the fullest rank {where}, estimated", _bytes(estimate.get("peak")))]),
        element("h4", f"Resident all the time, {where}"),
        _terms((name, _bytes(value)) for name, value in as_mapping(estimate.get("resident")).items()),
        *(
            join(
                element("h4", f"While {name}, {where}"),
                _terms((part, _bytes(value)) for part, value in as_mapping(parts).items()),
            )
            for name, parts in as_mapping(estimate.get("phases")).items()
        ),
    )


def _bytes(value: object) -> str:
    number = as_number(value)
    return "–" if number is None else format_bytes(number)


def _block(title: str, content: Html) -> Html:
    return element("div", element("h3", title), content)


def _terms(pairs: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Html:
    rows = [element("div", element("dt", term), element("dd", value)) for term, value in pairs]
    return element("dl", *rows, class_="terms")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {titles[0]}")
