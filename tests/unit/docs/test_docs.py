"""The documentation can be followed: links work, code is valid, and so are recipes and commands."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from tests.pages import BLOCK, PAGES, ROOT, Block, blocks, blocks_of

import leaderless
from leaderless import Run
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.cli.main import app
from leaderless.cli.plan import world_sizes
from leaderless.config import Recipe, load_recipe, load_section
from leaderless.config.source import Setting, apply_overrides, read_yaml
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.workflow import read_workflow
from leaderless.serving.lm_harness import HarnessTasks

MAX_IMAGE_BYTES = 300_000
MAX_WORDS, MAX_PATH = 2_000, 12
NAMED_BY = {"models": "role", "layout": "node", "channels": "node"}
ATTRIBUTES = {"batch.episode_ids", "batch.group_ids", "batch.ids", "batch.prompts"}
"""Attributes of a `Batch`, which only look like settings."""
PLACEHOLDERS = {"RECIPE", "RUN", "COMMAND"}

CONTINUOUS = (
    *("channels.rollout.capacity=2", "channels.rollout.mode=continuous", "layout.rollout.ranks=0"),
    *(f"layout.{node}.ranks=1" for node in ("reward", "old", "reference", "advantage", "policy")),
)
"""Settings of a run that may follow another one."""


def prose_of(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and MkDocs both make them from headings, or as a heading names its own."""
    return {anchor for _, anchor in headings_of(page)}


def headings_of(page: Path) -> list[tuple[int, str]]:
    """The level and the anchor of each heading of a page."""
    found = []
    for marks, heading in re.findall(r"^(#{1,6}) (.+)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M):
        own = re.search(r"\{#([\w-]+)\}$", heading)
        made = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        found.append((len(marks), own[1] if own else made))
    return found


def links_of(page: Path) -> list[str]:
    """Where the links and pictures of a page lead."""
    return re.findall(r"\]\(([^)\s]+)\)", prose_of(page))


def load_generator() -> ModuleType:
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))  # as when it is run
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_place(items: list[Block]) -> Any:
    return pytest.mark.parametrize("block", items, ids=str)


by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_generated_pages_and_pictures_are_not_stale() -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, text in load_generator().render().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `python docs/generate.py`"


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose_of(page))
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if page.is_relative_to(ROOT / "docs"):
            assert target.is_relative_to(ROOT / "docs"), f"{link} does not exist on the site"
        if anchor:
            assert anchor in anchors_of(target), f"{link}: there are {sorted(anchors_of(target))}"


@by_page
def test_every_picture_says_what_it_shows(page: Path) -> None:
    for text in re.findall(r"!\[([^\]]*)\]", prose_of(page)):
        assert len(text) > 10


def test_pictures_of_the_gallery_are_smaller_still() -> None:
    shown = [ROOT / "docs" / link for link in links_of(ROOT / "docs/gallery.md") if link.startswith("images/")]
    assert len(shown) >= 7
    assert max(picture.stat().st_size for picture in shown) < 100_000


def test_pictures_are_small_load_nothing_and_are_shown() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (ROOT / "docs/images").iterdir():
        assert picture.stat().st_size < MAX_IMAGE_BYTES, picture.name
        assert picture.name in shown, f"{picture.name} is on no page"
        if picture.suffix == ".svg":
            text = picture.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|<script|@import", text), picture.name


def test_every_page_is_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/-]+\.md)$", text, re.M)
    there = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(listed) == sorted(name for name in there if not name.endswith(".zh.md"))


def test_the_path_to_ones_own_task_is_short_and_the_same_on_the_site_and_on_its_first_page() -> None:
    title = "From the first run to your own task"
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition(f"\n  - {title}:\n")[2]
    pages = re.findall(r"^      - .*: (\S+)$", re.split(r"^  - ", site, maxsplit=1, flags=re.M)[0], re.M)
    for name, heading in (("index.md", f"## {title}\n"), ("index.zh.md", f"{{#{title.lower().replace(' ', '-')}}}\n")):
        section = (ROOT / "docs" / name).read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
        assert re.findall(r"^\| \d+ \| \[.*\]\((\S+)\)", section, re.M) == pages
    assert 1 < len(pages) <= MAX_PATH


def test_each_title_of_the_site_has_one_translation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    block = text.partition("nav_translations:\n")[2]
    titles = re.findall(r"^ {12}(.+?): .+$", re.split(r"^ {0,11}\S", block, maxsplit=1, flags=re.M)[0], re.M)
    assert len(titles) > 40
    assert sorted(titles) == sorted(set(titles))


def numbers_in(rows: list[str]) -> list[str]:
    """The numbers in the prose of a table, sorted."""
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", "\n".join(rows))))


IN_BOTH = sorted(page for pattern in ("*.md", "concepts/*.md", "guides/*.md") for page in (ROOT / "docs").glob(pattern))


def test_pages_to_begin_with_concepts_and_guides_are_in_both_languages() -> None:
    missing = [
        page.name
        for page in IN_BOTH
        if not page.name.endswith(".zh.md") and not page.with_name(f"{page.stem}.zh.md").exists()
    ]
    assert not missing


def test_guides_and_concepts_are_short() -> None:
    """What is only looked up belongs to the reference, and what was measured to the pages about performance.

    The table of evidence is both: it has a row for each feature.
    """
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in IN_BOTH}
    assert {
        name: count for name, count in words.items() if count > MAX_WORDS and not name.startswith("evidence.")
    } == {}


CHINESE = sorted((ROOT / "docs").rglob("*.zh.md"))


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_says_what_the_english_one_says(chinese: Path) -> None:
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    assert headings_of(chinese) == headings_of(english)
    assert [(b.source, b.text) for b in blocks_of(chinese)] == [(b.source, b.text) for b in blocks_of(english)]
    assert sorted(links_of(chinese)) == sorted(links_of(english))
    texts = [BLOCK.sub("", page.read_text(encoding="utf-8")) for page in (chinese, english)]
    here, there = (set(re.findall(r"`([^`\n]+)`", text)) for text in texts)
    assert here == there, "settings, metrics and commands"
    tables = [re.findall(r"^\|.*", text, re.M) for text in texts]
    assert len(tables[0]) == len(tables[1])
    assert numbers_in(tables[0]) == numbers_in(tables[1])
    assert re.search(r"[\u4e00-\u9fff]{20}", re.sub(r"\W", "", texts[0])), "it is in Chinese"


def test_code_blocks_have_a_language() -> None:
    assert not [str(block) for block in blocks("")]
    known = {"python", "yaml", "shell", "text", "json"}  # one name for each, or a test of blocks would miss some
    assert {block.language for page in PAGES for block in blocks_of(page)} <= known


@by_place([block for page in PAGES for block in blocks_of(page) if block.source])
def test_quoted_code_stands_in_its_file(block: Block) -> None:
    assert block.source is not None
    assert block.text in (ROOT / block.source).read_text(encoding="utf-8")


@by_place(blocks("python"))
def test_python_is_python_and_imports_what_exists(block: Block, tmp_path: Path) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "leaderless":
            assert {name.name for name in node.names} <= set(leaderless.__all__)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not block.source and not names & {"AutoTokenizer"}:
        (tmp_path / "recipes").symlink_to(ROOT / "recipes")
        with chdir(tmp_path):  # some blocks write files
            exec(compile(tree, str(block), "exec"), {"__name__": "docs"})


@by_place(blocks("json"))
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@by_place(blocks("yaml"))
def test_yaml_is_a_recipe_or_part_of_one_or_a_workflow(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    settings = yaml.safe_load(block.text)
    if settings.keys() == {"scrape_configs"}:
        pytest.skip("is for Prometheus: tests/contracts/test_prometheus_server.py checks it")
    if settings.keys() & {"nodes", "base"}:
        read_workflow(file)
    elif settings.keys() >= {"name", "workflow"}:
        load_recipe(file)
    else:
        assert settings.keys() <= Recipe.model_fields.keys()
        file.write_text(yaml.safe_dump(merged(base_recipe(), read_yaml(file).settings)), encoding="utf-8")
        last_ranks = re.findall(r"(\d+)[\"}]", str(settings.get("layout", "")).replace("'", '"'))
        with chdir(tmp_path):  # without the model of the quickstart, which some blocks name
            Run(file).plan(max((int(rank) + 1 for rank in last_ranks), default=1))


def base_recipe() -> dict[str, Setting]:
    """The recipe that a part of a recipe is merged into."""
    data = {"train": {"path": "rows.jsonl", "source": "kind"}, "evaluation": {"path": "test.jsonl"}}
    return {"name": "a", "workflow": "grpo", "models": {"policy": "m"}, "data": data, "reward": {"math": 1}, "steps": 1}


def merged(base: dict[str, Setting], part: Any) -> dict[str, Setting]:
    """A recipe with a part of it replaced, section by section."""
    result = dict(base)
    for key, value in part.items():
        inner = result.get(key)
        is_section = isinstance(inner, dict) and isinstance(value, dict) and key == "data"
        result[key] = merged(inner, value) if is_section else value  # type: ignore[arg-type]
    return result


def commands() -> list[tuple[str, list[str]]]:
    """Every call of the command line in shell blocks and in the prose, once, with its place."""
    found: dict[tuple[str, ...], str] = {}
    for place, words in named_commands():
        found.setdefault(tuple(words), place)
    return [(place, list(words)) for words, place in found.items()]


def named_commands() -> Iterator[tuple[str, list[str]]]:
    for block in blocks("shell"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "leaderless" in words and words[0] != "pip":
                yield str(block), words[words.index("leaderless") + 1 :]
    for page in PAGES:
        for line in re.findall(r"`leaderless ([^`\n]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            if page.parent.name != "reference" and not PLACEHOLDERS & set(line.split()):
                yield str(page.relative_to(ROOT)), shlex.split(line)


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: str(value)[:60])
def test_commands_are_taken_and_can_be_planned(place: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = typer.main.get_command(app)
    end = next((place for place, word in enumerate(words) if word in {">", "&"}), len(words))
    name, *arguments = words[:end]
    if name.startswith("--") or not arguments:
        assert name in {"--help", "--version", *group.commands}, place
        return
    params = group.commands[name].make_context(name, list(arguments)).params
    target = Path(str(params.get("target", "")))
    if target == Path("recipe.yaml"):
        target = Path("recipes/quickstart/grpo.yaml")  # stands for a reader's own
        if any(one.startswith("run.follow=") for one in params["overrides"] or []):  # of a run that was continuous
            params["overrides"] = [*params["overrides"], *CONTINUOUS]
    if target.suffix == ".yaml":
        monkeypatch.chdir(ROOT)
        overrides = params["overrides"] or []
        named = re.findall(r"ranks=\S*?(\d+)(?=\s|$)", " ".join(overrides))
        needed = max((int(rank) + 1 for rank in named), default=1)
        if name == "simulate":
            assert load_section(params["cluster"], ClusterConfig).name
            world_size = max(world_sizes(params["world_size"]))
            if params["prompts_per_rank"] is not None:
                overrides = [*overrides, f"batch.prompts_per_step={world_size * params['prompts_per_rank']}"]
        else:
            world_size = params.get("world_size") or max(params.get("workers") or 1, needed)
        Run(target, *overrides).plan(world_size)
    elif params.get("evaluator") is not None:
        HarnessTasks(tuple(params["task"]), arguments=tuple(params["overrides"] or ())).check()
    elif params.get("overrides"):
        source = read_yaml(ROOT / "recipes/quickstart/grpo.yaml")
        Recipe.model_validate(apply_overrides(source, params["overrides"]).settings)


@by_place([block for block in blocks("shell") if "#!" in block.text])
def test_scripts_are_valid_shell(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in PAGES:
        named = re.findall(r"^make ([a-z-]+)|`make ([a-z -]+)`", page.read_text(encoding="utf-8"), re.M)
        assert {word for match in named for word in " ".join(match).split()} <= targets, page


def test_the_chinese_readme_has_the_same_sections_code_links_and_pictures() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh.md"

    def levels(page: Path) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", BLOCK.sub("", page.read_text(encoding="utf-8")), re.M)]

    def links(page: Path) -> list[str]:
        found = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
        return [link.replace(".zh.md", ".md") for link in found if link not in {english.name, chinese.name}]

    assert levels(english) == levels(chinese)
    assert [b.text for b in blocks_of(english)] == [b.text for b in blocks_of(chinese)]
    assert links(english) == links(chinese)


def test_lines_of_the_readme_fit_on_a_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_becomes_a_list_or_part_of_a_table_by_chance(page: Path) -> None:
    before, width = "", 0
    for line in BLOCK.sub("", page.read_text(encoding="utf-8")).splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
            width = width if before.startswith("|") else cells
            assert cells == width, line
        elif re.match(r"([-*]|\d+\.) ", line):
            assert not before.strip() or re.match(r"\s|([-*]|\d+\.) ", before), f"{before}\n{line}"
        before = line


def test_pages_name_files_that_exist() -> None:
    folders = (ROOT, ROOT / "src", ROOT / "src/leaderless", ROOT / "tests")
    for page in PAGES:
        for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", page.read_text(encoding="utf-8")):
            assert any((folder / name).exists() for folder in folders), f"{page.relative_to(ROOT)}: {name}"


def shown(number: float) -> str:
    """A difference as tables have it."""
    return re.sub(r"e-0(\d)$", r"e-\1", f"{number:.1e}") if number else "0"


def test_differences_from_trl_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "docs/performance/preferences_trl.json").read_text(encoding="utf-8"))["losses"]
    page = (ROOT / "docs/algorithms/dpo.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|.*\| (0|\d\S*) \| (0|\d\S*) \|$", page.partition("\n## Compared with TRL\n")[2], re.M)
    expected = [(shown(one["loss_difference"]), shown(one["gradient_difference"])) for one in measured.values()]
    assert table == expected


def test_differences_from_verl_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "docs/performance/verl.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/guides/from-verl.md").read_text(encoding="utf-8").partition("\n## Formulas compared\n")[2]
    table = re.findall(r"^\| (.+) \| (0|\d\S*) \| (\d\S*) \|$", page.partition("\n## ")[0], re.M)
    assert table == [
        (name, shown(one["difference"]), f"{one['largest']:.2f}") for name, one in measured["formulas"].items()
    ]
    assert f"verl {measured['versions']['verl']} " in page


def test_each_advantage_and_each_loss_is_in_the_table_to_choose_from() -> None:
    page = (ROOT / "docs/algorithms/index.md").read_text(encoding="utf-8")
    for kind, registered in (("advantage", ADVANTAGES), ("loss", POLICY_LOSSES)):
        rows = re.findall(r"^\| (`.*?) \|", page.partition(f"\n| {kind} | ")[2].partition("\n\n")[0], re.M)
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(registered)


def test_pages_name_settings_that_exist() -> None:
    pages = (ROOT / "docs/reference/configuration").glob("*.md")
    known = {name for page in pages for name in re.findall(r"`([^`]+)`", page.read_text(encoding="utf-8"))}
    setting = re.compile(r"`((?:" + "|".join(Recipe.model_fields) + r")(?:\.[a-z_]+)+)`")
    for page in PAGES:
        theirs = r"<!-- settings, written by.*<!-- end of settings -->"  # of other frameworks; test_convert checks ours
        for name in setting.findall(re.sub(theirs, "", page.read_text(encoding="utf-8"), flags=re.S)):
            own = re.sub(r"^roles\.[a-z_]+\.", "", name)  # a role has the general settings
            general = re.sub(rf"^({'|'.join(NAMED_BY)})\.[a-z_]+", lambda m: f"{m[1]}.<{NAMED_BY[m[1]]}>", own)
            assert {name, general} & known or name in ATTRIBUTES, f"{page.relative_to(ROOT)}: {name}"


def test_each_section_of_a_recipe_has_a_page_with_its_settings() -> None:
    folder = ROOT / "docs/reference/configuration"
    pages = {page.stem: page.read_text(encoding="utf-8") for page in folder.glob("*.md")}
    assert pages.keys() == Recipe.model_fields.keys() - {"name", "workflow", "steps", "seed"}
    for name, page in pages.items():
        assert re.search(rf"^# `{name}", page, re.M), "its title, by which the search of the site ranks"
    for setting, page in {"rollout.temperature": "rollout", "rollout.external.python": "rollout"}.items():
        assert [name for name, text in pages.items() if f"| `{setting}` |" in text] == [page]


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = re.sub(r"\"\s*\n\s*f?\"", "", sources)  # texts that continue on the next line
    page = (ROOT / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    before_learning = page.partition("## It runs, but does not learn")[0]
    messages = re.findall(r"^(?:\| |\*\*)`([^`]+)`", before_learning, re.M)
    assert len(messages) > 15
    for message in messages:  # the text between values
        parts = re.split(r"…|[()]|'[^']*'|\d[\d.]*|[a-z_]+\.[a-z_.]+:?|SIG\w+", message)
        longest = max((part.strip(" :,();.") for part in parts), key=len)
        assert longest in said, f"no message says '{longest}'"
