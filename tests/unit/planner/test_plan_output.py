"""A plan for the reader: the picture and the printed text."""

from __future__ import annotations

import io
import re
import sys
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.recipes import begin, end, make_recipe, plan_of, write_model

from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.graph.judges import judge_lines
from leaderless.planner.show.graph_layout import GraphLink, place
from leaderless.planner.show.picture import NUM_COLORS, clip, draw_plan, text_width
from leaderless.planner.show.text import print_plan
from leaderless.planner.workflow import BUILTIN_STAGES, StageSpec, Workflow, resolve_workflow
from leaderless.rewards.judges.verdicts import pairs_of
from leaderless.worker.replan.active_plan import write_description

SVG = "{http://www.w3.org/2000/svg}"
KL = {"algorithm": {"kl": {"coefficient": 0.1}}}
TWO_POOLS = {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}}


def groups(svg, kind):
    """The parts of a picture that have a class."""
    return [part for part in ET.fromstring(svg).iter() if kind in part.get("class", "").split()]


def texts(part):
    return [text.text or "" for text in part.iter(f"{SVG}text")]


def tooltip(part):
    return part.find(f"{SVG}title").text


# The picture


def test_the_picture_shows_every_node_with_stage_role_and_layout():
    svg = draw_plan(plan_of("grpo", 4, **KL))
    boxes = {texts(box)[0]: texts(box)[1:] for box in groups(svg, "box")}
    assert list(boxes) == ["data", "rollout", "reward", "reference", "advantage", "samples", "policy"]
    assert boxes["reference"] == ["log_probs, role reference", "ranks 0-3 dp=4"]
    assert boxes["reward"] == ["reward", "ranks 0-3 dp=4"]
    assert boxes["data"] == ["128 prompts a step", "for 1024 samples"]


def test_the_picture_shows_every_edge_and_how_it_travels():
    plan = plan_of("grpo", 4, **TWO_POOLS)
    svg = draw_plan(plan)
    drawn = {
        (tooltip(part).split(" (")[0], kind): tooltip(part)
        for kind in ("local", "reshard")
        for part in groups(svg, kind)
        if part.find(f"{SVG}title") is not None
    }
    assert set(drawn) == {(f"{edge.source} -> {edge.target}", edge.kind) for edge in plan.edges}
    for edge in plan.edges:
        assert set(edge.columns) <= set(drawn[f"{edge.source} -> {edge.target}", edge.kind].split("\n"))
    assert "at most 11 MiB a step" in drawn["rollout -> policy", "reshard"]


def test_the_picture_shows_where_weights_go():
    svg = draw_plan(plan_of("grpo", 4, **TWO_POOLS))
    (weights,) = [part for part in groups(svg, "weights") if part.find(f"{SVG}title") is not None]
    assert tooltip(weights) == "weights of policy, ranks 2-3 -> 0-1, after each step\nfor rollout"
    assert not groups(draw_plan(plan_of("grpo", 4)), "weights")


def test_the_picture_shows_what_is_left_out():
    svg = draw_plan(plan_of("grpo"))
    assert [texts(part) for part in groups(svg, "pruned")] == [["old"], ["reference"]]
    assert "not needed with these settings" in svg
    everything = plan_of("grpo", **KL, batch={"updates_per_step": 2})
    assert not groups(draw_plan(everything), "pruned")


def test_pools_have_their_own_colours():
    def pools(plan):
        boxes = {texts(box)[0]: box.get("class") for box in groups(draw_plan(plan), "box") if texts(box)}
        return boxes["rollout"], boxes["reward"], boxes["policy"]

    assert pools(plan_of("grpo", 4)) == ("box pool-0",) * 3
    assert pools(plan_of("grpo", 4, **TWO_POOLS)) == ("box pool-0", "box pool-0", "box pool-1")


def test_a_node_that_reads_nothing_hangs_on_the_node_before():
    stages = "tests.unit.recipes:"
    workflow = begin().node("noise", run=f"{stages}noise", after="rollout")
    workflow = workflow.node("mix", run=f"{stages}noise_reward", after=["reward", "noise"])
    svg = draw_plan(plan_of(end(workflow, "mix")))
    order = [part for part in groups(svg, "order") if part.find(f"{SVG}title") is not None]
    assert [tooltip(part) for part in order] == ["noise comes after rollout and reads none of its columns"]


def test_names_cannot_break_the_picture(monkeypatch):
    monkeypatch.setitem(BUILTIN_STAGES, '<&">', StageSpec("x:y", ("rewards",), ("<b>",), summary="a < b & c"))
    monkeypatch.setitem(BUILTIN_STAGES, "use", StageSpec("x:y", ("<b>",), has_effect=True, roles={"model": "score"}))
    workflow = begin().node("a", run='<&">', after="reward").node("b", run="use", after="a", role="judge")
    models = {"policy": "p", "judge": "m"}
    svg = draw_plan(plan_of(Workflow('<w & "w">', workflow.nodes), models=models))
    assert ET.fromstring(svg).get("aria-label") == 'tiny: workflow <w & "w"> on 1 rank'
    boxes = {texts(box)[0]: texts(box)[1] for box in groups(svg, "box")}
    assert boxes["a"] == '<&">'
    assert boxes["b"] == "use, role judge"


def test_the_picture_loads_nothing_and_keeps_its_style_to_itself():
    svg = draw_plan(plan_of("grpo", 4, **TWO_POOLS))
    assert not re.search(r"url\(|href|@import|<script", svg)
    assert "@media (prefers-color-scheme:dark)" in svg
    (style,) = ET.fromstring(svg).iter(f"{SVG}style")
    rules = re.sub(r"@media[^{]*\{(.*?\})\}", r"\1", style.text, flags=re.DOTALL)
    selectors = [rule.strip() for rule in re.findall(r"([^{}]+)\{", rules)]
    assert len(selectors) > 20
    assert all(selector.startswith(".leaderless-plan") for selector in selectors)
    # Every color that is used is set in light and in dark.
    for name in set(re.findall(r"var\((--[\w-]+)\)", style.text)) - {"--color"}:
        assert style.text.count(f"{name}:") == 2, name
    assert f"pool-{NUM_COLORS - 1}" in style.text


def test_everything_is_inside_the_picture():
    plan = plan_of("grpo", 4, **KL, **TWO_POOLS, batch={"updates_per_step": 2})
    root = ET.fromstring(draw_plan(plan))
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
    (moved,) = [part for part in root if part.get("transform")]
    shift_x, shift_y = map(float, re.findall(r"[\d.]+", moved.get("transform")))
    for part in moved.iter(f"{SVG}rect"):
        assert 0 <= float(part.get("x")) + shift_x <= width - float(part.get("width"))
        assert 0 <= float(part.get("y")) + shift_y <= height - float(part.get("height"))
    for part in moved.iter(f"{SVG}path"):
        numbers = list(map(float, re.findall(r"-?[\d.]+", part.get("d").split("H")[0])))
        assert all(0 <= x + shift_x <= width for x in numbers[::2])
        assert all(0 <= y + shift_y <= height for y in numbers[1::2])


def test_the_same_plan_gives_the_same_picture():
    assert draw_plan(plan_of("grpo", 4, **TWO_POOLS)) == draw_plan(plan_of("grpo", 4, **TWO_POOLS))


def test_long_texts_are_cut_where_they_do_not_fit():
    assert clip("short", 12, 100) == "short"
    cut = clip("a" * 100, 12, 100)
    assert cut.endswith("…")
    assert text_width(cut, 12) <= 100
    assert text_width("漢字", 10) == 20


# Graph layout


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 10))
    boxes = {str(index): (draw(st.floats(40, 200)), 70.0) for index in range(size)}
    pairs = list(combinations(range(size), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=15)) if pairs else []
    return boxes, [GraphLink(str(a), str(b), draw(st.floats(0, 150))) for a, b in chosen]


@given(graph=graphs())
@settings(deadline=None)
def test_boxes_and_labels_do_not_overlap_and_links_run_downwards(graph):
    boxes, links = graph
    placement = place(boxes, links)
    areas = [(*center, *boxes[name]) for name, center in placement.centers.items()]
    areas += [(*route.label, link.label_width, 18) for link, route in zip(links, placement.routes, strict=True)]
    for (x1, y1, width1, height1), (x2, y2, width2, height2) in combinations(areas, 2):
        overlap_x = (width1 + width2) / 2 - abs(x1 - x2)
        overlap_y = (height1 + height2) / 2 - abs(y1 - y2)
        assert min(overlap_x, overlap_y) <= 1e-6
    for x, y, width, height in areas:
        assert -1e-6 <= x - width / 2 <= x + width / 2 <= placement.width + 1e-6
        assert -1e-6 <= y - height / 2 <= y + height / 2 <= placement.height + 1e-6
    for link, route in zip(links, placement.routes, strict=True):
        heights = [y for _, y in route.points]
        assert heights == sorted(set(heights))
        assert heights[0] == pytest.approx(placement.centers[link.source][1] + 35)
        assert heights[-1] == pytest.approx(placement.centers[link.target][1] - 35)
        assert route.label in route.points


@given(graph=graphs())
@settings(deadline=None)
def test_no_link_passes_behind_a_box(graph):
    boxes, links = graph
    placement = place(boxes, links)
    for link, route in zip(links, placement.routes, strict=True):
        for name, (width, height) in boxes.items():
            x, y = placement.centers[name]
            for point_x, point_y in route.points:
                is_inside = abs(point_x - x) < width / 2 and abs(point_y - y) < height / 2 - 1e-6
                assert not is_inside or name in {link.source, link.target}


def test_lines_that_need_not_cross_do_not():
    placement = place(dict.fromkeys("abcd", (60, 40)), [GraphLink("a", "d", 0), GraphLink("b", "c", 0)])
    x = {name: center[0] for name, center in placement.centers.items()}
    assert (x["a"] < x["b"]) == (x["d"] < x["c"])


# The printed text


def printed(plan, width=100, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    print_plan(plan, console)
    return console.file.getvalue()


def squeezed(text):
    """A text without its line breaks."""
    return re.sub(r"\s+", "", text)


def test_the_print_shows_every_node_and_what_it_reads_and_writes():
    plan = plan_of("grpo", 4, **TWO_POOLS, **KL)
    text = printed(plan)
    for node in plan.nodes:
        line = next(line for line in text.split("\n") if line.startswith(f" {node.name} ") and "ranks" in line)
        assert f" {node.node.run} " in line
        assert f" {node.layout} " in line
    columns = squeezed("\n".join(line[50:] for line in text.split("\n")))
    assert "readspolicy_versions,prompt_tokens,response_mask,rollout_log_probs,temperatures,tokens<-rollout" in columns
    assert "writesrewards,reward_valid,reward_details" in columns
    assert re.search(r"^ old +nobody reads what it writes", text, re.MULTILINE)


def test_the_print_shows_batch_sizes_edges_models_and_weights():
    text = printed(plan_of("grpo", 4, **TWO_POOLS, batch={"updates_per_step": 2}))
    assert "tiny  workflow grpo, 4 ranks, plan " in text
    assert "128 prompts, 1,024 samples; at most 64 prompts a rank" in text
    assert "at most 64 prompts, 512 samples" in text
    assert "6 updates" in text
    assert re.search(r"^ rollout -> policy +reshard +11 MiB +policy_versions", text, re.MULTILINE)
    assert re.search(r"^ data -> rollout +local +576 KiB +prompt_tokens, rows", text, re.MULTILINE)
    assert re.search(r"^ policy +ranks 2-3 dp=2 +scores, is trained", text, re.MULTILINE)
    assert "weights(policy->0-1)" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_print_shows_every_chain_at_any_width(width):
    plan = plan_of("grpo", 4, **TWO_POOLS, **KL)
    text = printed(plan, width)
    assert all(len(line) <= width for line in text.split("\n"))
    assert "…" not in text
    section = text.split("What each rank does")[1].split("Models")[0]
    starts = list(re.finditer(r"^ (\d\S*) \((\d) *ranks\)", section, re.MULTILINE)) or list(
        re.finditer(r"^ (\d-\d)", section, re.MULTILINE)
    )
    assert [start[1] for start in starts] == ["0-1", "2-3"]
    first, second = section[starts[0].start() : starts[1].start()], section[starts[1].start() :]
    for rank, part in ((0, first), (2, second)):
        column = squeezed("\n".join(line[starts[0].end() - starts[0].start() :] for line in part.split("\n")))
        assert "->".join(squeezed(str(action)) for action in plan.chain(rank)) in column


def test_ranks_that_share_a_chain_share_a_line():
    text = printed(plan_of("grpo", 1024, batch={"prompts_per_step": 1024}))
    assert text.count("load -> rollout -> reward -> advantage -> samples -> policy") == 1
    assert "0-1023 (1,024 ranks)" in text
    assert len(text.split("\n")) < 70


def test_the_print_shows_what_memory_is_for(tmp_path):
    plan = plan_of("grpo", 2, models={"policy": write_model(tmp_path / "m")})
    text = printed(plan)
    for part in ("policy weights", "policy optimizer", "while policy trains", "kv cache", "activations", "peak"):
        assert re.search(rf"^ +{part} +[\d.]+ (B|KiB|MiB|GiB)", text, re.MULTILINE), part
    assert "unknown" not in text


def test_the_print_says_why_memory_is_unknown():
    assert "unknown: the config.json of the model is not on this machine" in printed(plan_of("grpo"))


def test_names_are_no_markup():
    name = "[red]:smile:[/red]"
    text = printed(plan_of(Workflow(name, resolve_workflow("grpo").nodes), models={"policy": "m"}))
    assert f"workflow {name}," in text


def test_there_is_colour_in_a_terminal_and_none_in_a_file():
    plan = plan_of("grpo", 4, **TWO_POOLS)
    assert "\x1b[" not in printed(plan)
    assert "\x1b[" in printed(plan, force_terminal=True, color_system="standard")


def test_a_run_without_the_drawing_library_says_so_and_goes_on(tmp_path, monkeypatch):
    for name in ("picture", "graph_layout"):
        monkeypatch.delitem(sys.modules, f"leaderless.planner.show.{name}")
    monkeypatch.setitem(sys.modules, "grandalf.graphs", None)
    recipe, said = make_recipe(run={"directory": str(tmp_path)}), []
    directory = RunDirectory.of(recipe)
    directory.path.mkdir()
    write_description(directory, recipe, plan_of("grpo"), said.append)
    assert said == ["the plan is not drawn: grandalf.graphs is not installed"]
    assert directory.plan.exists()
    assert not directory.picture.exists()


@pytest.mark.parametrize(("siblings", "opponents"), [(2, 2), (3, 1), (3, 2), (8, 2), (8, 7)])
def test_the_print_shows_what_judges_are_asked_at_most(siblings: int, opponents: int) -> None:
    address = {"url": "http://127.0.0.1:8000/v1", "max_requests": 5}
    sections = {
        "reward": {
            "judge": address | {"model": "wise"},
            "judge-pairs": address | {"model": "fair", "pairwise": {"opponents": opponents}},
        },
        "batch": {"prompts_per_step": 4, "responses_per_prompt": siblings},
    }
    plan, recipe = plan_of("grpo", 2, **sections), make_recipe(**sections)
    pairs = pairs_of([str(number) for number in range(siblings)], range(siblings), opponents)
    lines = judge_lines(recipe, plan)
    most = "questions a step, at most 10 requests at a time"
    assert dict(lines) == {
        "judge": f"wise at {address['url']}: {4 * siblings} {most}",
        "judge-pairs": f"fair at {address['url']}: {4 * 2 * len(pairs)} {most}",
    }
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan, console, judges=lines)
    assert all(squeezed(line) in squeezed(console.file.getvalue()) for _, line in lines)


def test_a_judge_that_compares_needs_whole_groups() -> None:
    judge = {"url": "http://127.0.0.1:8000/v1", "model": "fair"}
    for options, is_needed in (({}, False), ({"pairwise": {}}, True)):
        plan = plan_of("grpo", reward={"judge": judge | options})
        assert plan["reward"].needs_whole_groups is is_needed
