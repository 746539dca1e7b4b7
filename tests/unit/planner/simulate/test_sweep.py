"""Several simulated steps, and how they are shown."""

from __future__ import annotations

import io
import json
import re

import pytest
from benchmarks.simulated.charts import charts_of, draw_png, write_page
from benchmarks.simulated.show import print_sweep
from benchmarks.simulated.sweep import Settings, Sweep, settings_of, simulate
from rich.console import Console
from tests.unit.planner.simulate.clusters import cluster, plan_for, pools_recipe
from tests.unit.recipes import make_recipe

from leaderless.config import Recipe


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return pools_recipe(tmp_path)


def sweep_of(recipe, world_sizes=(2, 4, 8), prompts=(), contexts=(), **constants) -> Sweep:
    axis, settings = settings_of(recipe, world_sizes, prompts, contexts, None)

    def plan(overrides, world_size):
        changed = recipe.model_dump()
        for override in overrides:
            key, value = override.split("=")
            section, name = key.split(".")
            changed[section][name] = int(value)
        other = Recipe.model_validate(changed)
        return other, plan_for(other, world_size)

    machines = cluster(**constants)
    return Sweep(recipe.name, machines, axis, tuple(simulate(settings, plan, machines)))


def test_one_thing_varies():
    recipe = make_recipe()
    assert settings_of(recipe, [8], [], [], None) == ("world_size", (Settings(8, ()),))
    axis, settings = settings_of(recipe, [8, 64], [], [], 4)
    assert axis == "world_size"
    assert [s.overrides for s in settings] == [("batch.prompts_per_step=32",), ("batch.prompts_per_step=256",)]
    axis, settings = settings_of(recipe, [8], [16, 32], [], None)
    assert axis == "prompts_per_step"
    assert [s.overrides for s in settings] == [("batch.prompts_per_step=16",), ("batch.prompts_per_step=32",)]


def test_a_context_is_a_prompt_and_its_response_and_a_micro_batch_has_room_for_it():
    recipe = make_recipe(data={"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 1000})
    axis, settings = settings_of(recipe, [8], [], [5000, 20_000], None)
    assert axis == "context_tokens"
    assert settings[0].overrides == ("rollout.max_response_tokens=4000", "batch.micro_batch_tokens=16384")
    assert settings[1].overrides == ("rollout.max_response_tokens=19000", "batch.micro_batch_tokens=20000")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([8, 64], [16, 32], [], None), "ranks and prompts both have several values: vary one of them"),
        (([8], [16], [], 4), "a step cannot have 16 prompts and 4 for each rank: give one"),
        (([8], [], [512], None), r"a context of 512 tokens leaves no room for a response behind a prompt of 512"),
    ],
)
def test_what_makes_no_sweep_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        settings_of(make_recipe(), *given)


def test_efficiency_is_relative_to_the_first_point(recipe):
    sweep = sweep_of(recipe)
    assert [point.world_size for point in sweep.points] == [2, 4, 8]
    assert sweep.ways == ("ours", "one")
    first, _, last = sweep.points
    assert sweep.efficiency(first, "one") == 1
    expected = (last.estimates["one"].tokens_per_s / 8) / (first.estimates["one"].tokens_per_s / 2)
    assert sweep.efficiency(last, "one") == pytest.approx(expected)
    assert last.gain("one") == pytest.approx(last.estimates["ours"].tokens_per_s / last.estimates["one"].tokens_per_s)


def test_the_same_points_give_the_same_numbers_again(recipe):
    one, again = ([point.estimates for point in sweep_of(recipe, world_sizes=(2, 4)).points] for _ in range(2))
    assert one == again


def test_numbers_can_be_read_back(recipe):
    sweep = sweep_of(recipe, world_sizes=(4,))
    read = json.loads(json.dumps(sweep.to_json()))
    point = read["points"][0]
    assert read["axis"] == "world_size"
    assert read["cluster"]["name"] == "round numbers"
    assert point["estimates"]["ours"]["seconds"] == sweep.points[0].estimates["ours"].seconds
    assert point["estimates"]["one"]["transitions"]["policy"]["interface_bytes"] > 0


def test_charts_show_every_measure_of_every_way(recipe):
    ranks, context = sweep_of(recipe), sweep_of(recipe, (4,), contexts=(128, 256))
    assert [chart.title.split(" (")[0] for chart in charts_of(ranks)] == [
        "tokens per second",
        "tokens per second and rank, as a share of those on 2",
        "throughput of ours, as a multiple of the controller's",
        "seconds of all transitions in a step",
        "GB through the busiest interface, per transition",
        "GB of rows in the busiest process",
    ]
    assert len(charts_of(context)) == 5
    throughput, efficiency, gain, *_, memory = charts_of(ranks)
    assert [line.name for line in throughput.lines] == ["ours", "single controller (one)", "linear"]
    assert throughput.lines[2].values[2] == pytest.approx(4 * throughput.lines[0].values[0])
    assert efficiency.lines[0].values[0] == 1
    assert gain.lines[0].values == tuple(point.gain("one") for point in ranks.points)
    assert memory.lines[-1].values == (pytest.approx(2**30 / 1e9),) * 3


def test_nothing_is_drawn_where_no_byte_leaves_the_host(recipe):
    sweep = sweep_of(recipe, (2, 4))
    interface = charts_of(sweep)[4]
    assert interface.lines[0].values[0] is None
    assert interface.lines[0].values[1] > 0


def test_a_page_holds_all_charts_and_loads_nothing(recipe, tmp_path):
    path = tmp_path / "page.html"
    sweep = sweep_of(recipe, (2, 4))
    write_page(sweep, path)
    text = path.read_text()
    for chart in charts_of(sweep):
        assert json.dumps(chart.title)[1:-1].replace("'", "\\u0027") in text or chart.title in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)


def test_a_picture_is_drawn_where_matplotlib_is(recipe, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    draw_png(sweep_of(recipe, (2,)), path)  # on one host: no byte goes through an interface
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_png(sweep_of(recipe, (2, 4)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < path.stat().st_size < 150_000


def printed(sweep: Sweep) -> str:
    text = io.StringIO()
    print_sweep(sweep, Console(width=80, file=text))
    return text.getvalue()


def test_the_table_fits_a_terminal_and_says_that_it_is_a_model(recipe):
    sweep = sweep_of(recipe, (2, 4))
    text = printed(sweep)
    assert "on round numbers: a model, not a measurement" in text
    assert max(map(len, text.splitlines())) <= 80
    assert f"{sweep.points[1].estimates['one'].tokens_per_s:,.0f}" in text
    assert "which has" not in text


def test_what_does_not_fit_is_named(recipe):
    text = " ".join(printed(sweep_of(recipe, (4,), device__memory_gib=0.001, host__memory_gib=0.002)).split())
    assert re.search(r"4 ranks: models and activations take [\d.]+ GiB of a device, which has 0.001 GiB", text)
    assert re.search(r"4 ranks: rows take \S+ MiB of a host on the way 'one', which has 0.002 GiB", text)
    assert "'ours'" not in text
