"""How quick the live page is, for its guide."""

from __future__ import annotations

import json
from pathlib import Path

from generate_markup import between

RESULTS = Path(__file__).parent / "performance/live_page.json"
ROWS = {
    "en": {
        "list first": "list of {runs:,} runs, the first time",
        "list again": "list of {runs:,} runs, from then on",
        "page first": "page of a run of {steps:,} steps with {metrics} metrics, the first time",
        "page again": "the same, from then on",
        "update": "one more step on that page: {update_kb:.1f} kB",
        "browser list": "in a browser: the list is there",
        "browser page": "in a browser: the page has curves",
        "browser search_runs": "in a browser: a search in the list",
        "browser log_axis": "in a browser: a logarithmic axis",
        "browser smoothing": "in a browser: all curves in view are smoothed",
        "browser filter": "in a browser: a filter of samples",
        "browser search_samples": "in a browser: a search in samples, with the wait for another letter",
    },
    "zh": {
        "list first": "{runs:,} 次运行的列表，第一次",
        "list again": "{runs:,} 次运行的列表，之后每次",
        "page first": "{steps:,} 步、{metrics} 个指标的运行的页面，第一次",
        "page again": "同上，之后每次",
        "update": "该页面上再多一步：{update_kb:.1f} kB",
        "browser list": "浏览器中：列表出现",
        "browser page": "浏览器中：页面画出曲线",
        "browser search_runs": "浏览器中：在列表中搜索",
        "browser log_axis": "浏览器中：改为对数轴",
        "browser smoothing": "浏览器中：平滑可见的所有曲线",
        "browser filter": "浏览器中：筛选样本",
        "browser search_samples": "浏览器中：搜索样本，含等待下一个字母的时间",
    },
}
HEAD = {"en": ("", "seconds", "of the processor"), "zh": ("", "秒", "处理器的秒")}
MEMORY = {
    "en": "{cores} cores, {megabytes} MB of metrics. The server takes {begin} MB, and {end} MB with that run.",
    "zh": "{cores} 核，指标文件 {megabytes} MB。服务器启动时占 {begin} MB 内存，打开该运行后占 {end} MB。",
}


def with_live_page(page: str, language: str) -> str:
    """A page with the newest results of `benchmarks/live_page.py` between its two marks."""
    return between(page, "live page", _content(language) if RESULTS.exists() else None)


def _content(language: str) -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    measured = {f"{kind} {time}": found[kind][time] for kind in ("list", "page") for time in ("first", "again")}
    seconds = {name: (one["whole_s"], one["cpu_s"]) for name, one in measured.items()}
    seconds["update"] = (found["update"]["median_ms"] / 1000, None)
    for name, value in (found["browser"] or {}).items():
        what, _, unit = name.rpartition("_")
        seconds[f"browser {what}"] = (value if unit == "s" else value / 1000, None)
    facts = {**found, "update_kb": found["update"]["bytes"] / 1000}
    lines = [f"| {' | '.join(HEAD[language])} |", "| --- | ---: | ---: |"]
    for name, text in ROWS[language].items():
        if name in seconds:
            whole, cpu = seconds[name]
            lines.append(f"| {text.format(**facts)} | {_shown(whole)} | {'' if cpu is None else _shown(cpu)} |")
    begin, end = (round(size / 1e6) for size in (found["list"]["rss_begin"], found["page"]["rss"]))
    return MEMORY[language].format(**facts, begin=begin, end=end) + "\n\n" + "\n".join(lines)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.095 else f"{seconds:.3f}"
