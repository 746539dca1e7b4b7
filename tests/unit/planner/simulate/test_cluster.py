"""Cluster files: what is read, and what is refused with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from benchmarks.simulated.controllers import FOLDER, ComparedCluster, ControllerConfig, load_compared_cluster
from pydantic import ValidationError
from tests.unit.planner.simulate.clusters import ROUND

from leaderless.config import RecipeError, load_section
from leaderless.planner.simulate.cluster import ClusterConfig

ROOT = Path(__file__).parents[4]
CLUSTERS = sorted((ROOT / "recipes/clusters").glob("*.yaml"))
FILES = [*CLUSTERS, *sorted(FOLDER.glob("*.yaml"))]
OURS = {name: section for name, section in ROUND.items() if name != "controllers"}


def refusal(tmp_path, **sections) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(OURS | sections, sort_keys=False))
    with pytest.raises(RecipeError) as caught:
        load_section(path, ClusterConfig)
    return str(caught.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_cluster_that_comes_along_is_valid_and_gives_the_source_of_each_number(path):
    assert path not in CLUSTERS or load_section(path, ClusterConfig).name
    assert load_compared_cluster(ROOT / "recipes/clusters" / path.name).controllers
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        values = line.partition("#")[0]
        if any(character.isdigit() for character in values) and not values.startswith("name"):
            assert "#" in line, f"{path.name}:{number} says nothing about where its number comes from"


def test_an_unknown_key_is_placed_and_the_nearest_is_named(tmp_path):
    message = refusal(tmp_path, dataloader={"tokens_per_sec": 5})
    place = f"{tmp_path}/cluster.yaml:"
    line = next(
        n for n, text in enumerate((tmp_path / "cluster.yaml").read_text().splitlines(), 1) if "per_sec:" in text
    )
    assert f"{place}{line}: dataloader.tokens_per_sec: unknown key (did you mean 'tokens_per_s'?)" in message
    assert "dataloader.tokens_per_s: must be given" in message


def test_a_key_of_another_section_is_named_with_it(tmp_path):
    assert "(did you mean 'host.interfaces'?)" in refusal(tmp_path, dataloader={"tokens_per_s": 5, "interfaces": 5})


def test_controllers_are_at_least_one_and_none_has_our_name():
    for controllers in ({}, {"ours": ROUND["controllers"]["one"]}):
        with pytest.raises(ValidationError, match="controllers"):
            ComparedCluster.model_validate(ROUND | {"controllers": controllers})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"host": {**ROUND["host"], "devices": 0}}, "host.devices=0: must be greater than or equal to 1"),
        ({"host": {**ROUND["host"], "devices": 3, "interfaces": 2}}, "host.interfaces=2 does not divide the 3 devices"),
        ({"controllers": {}}, "controllers: unknown key"),
        ({"dataloader": 5}, "dataloader=5: must be a section of settings"),
    ],
)
def test_what_no_cluster_can_be_is_refused(tmp_path, section, message):
    assert message in refusal(tmp_path, **section)


def test_every_constant_says_its_unit_and_its_meaning():
    units = (
        "_gib",
        "_tflops",
        "_utilization",
        "_gb_per_s",
        "_us",
        "_us_per_row",
        "_tokens",
        "_per_s",
        "_sigma",
        "_share",
    )
    counts = {"name", "devices", "interfaces", "dataloader_processes"}
    sections = [ClusterConfig, ControllerConfig, *(field.annotation for field in ClusterConfig.model_fields.values())]
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            assert field.description, name
            if field.annotation in {int, float, float | None}:
                assert name.endswith(units) or name in counts, name
