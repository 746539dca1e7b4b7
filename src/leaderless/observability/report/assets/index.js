// The list of runs: searched, sorted, and chosen to be laid over one another. Texts go in through textContent.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const MAX_ROWS = 200;
  let runs = JSON.parse(byId("run-data").textContent);
  let query = "";
  let by = "changed";
  let isDescending = true;
  const chosen = new Set();
  const columns = [...document.querySelectorAll("button.drop")].map((button) => button.dataset.column);
  const body = document.querySelector("#runs tbody");

  const number = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));

  function ago(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  }

  function cell(tag, ...content) {
    const node = document.createElement(tag);
    node.append(...content);
    return node;
  }

  function rowOf(run) {
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = chosen.has(run.key);
    box.setAttribute("aria-label", `Choose ${run.key}`);
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(run.key);
      else chosen.delete(run.key);
      byId("compare").disabled = chosen.size < 2;
    });
    const link = document.createElement("a");
    link.href = `/runs/${encodeURIComponent(run.key)}`;
    link.textContent = run.key;
    const name = cell("th", link, ...run.tags.map((tag) => {
      const node = cell("span", tag);
      node.className = "tag count";
      return node;
    }));
    name.scope = "row";
    const state = cell("span", run.state);
    state.className = `tag ${run.state}`;
    const step = run.step === null ? "–" : run.num_steps ? `${run.step.toLocaleString("en")} of ${run.num_steps.toLocaleString("en")}` : String(run.step);
    const changed = run.changed ? ago(Math.max(0, Date.now() / 1000 - run.changed)) : "–";
    const accuracy = run.accuracy === null ? "–" : `${number(run.accuracy)} (step ${run.accuracy_step})`;
    const own = columns.map((column) => run[`column ${column}`]).map((value) => (typeof value === "string" ? value : number(value)));
    const shown = [state, step, run.left_s === null ? "–" : ago(run.left_s).replace(" ago", ""), accuracy, number(run.reward), number(run.loss), number(run.step_s), ...own, changed];
    return cell("tr", cell("td", box), name, ...shown.map((value) => cell("td", value)));
  }

  function compare(a, b) {
    const [left, right] = [a[by], b[by]];
    if (left === right) return a.key < b.key ? -1 : 1;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return (left < right ? -1 : 1) * (isDescending ? -1 : 1);
  }

  function render() {
    const found = runs.filter((run) => `${run.key} ${run.state} ${run.tags.join(" ")}`.toLowerCase().includes(query)).sort(compare);
    const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") || document.activeElement.getAttribute("href") : null;
    body.replaceChildren(...found.slice(0, MAX_ROWS).map(rowOf));
    if (focused) {
      const again = [...body.querySelectorAll("input, a")].find((one) => (one.getAttribute("aria-label") || one.getAttribute("href")) === focused);
      if (again) again.focus();
    }
    const more = found.length > MAX_ROWS ? `; the first ${MAX_ROWS} are shown` : "";
    byId("num-runs").textContent = `${found.length.toLocaleString("en")} of ${runs.length.toLocaleString("en")} runs${more}`;
    byId("no-runs").hidden = runs.length > 0;
    for (const button of document.querySelectorAll("button.sort")) {
      const order = button.dataset.by === by ? (isDescending ? "descending" : "ascending") : "none";
      button.closest("th").setAttribute("aria-sort", order);
    }
    document.documentElement.dataset.shownRuns = String(Math.min(found.length, MAX_ROWS));
  }

  byId("find-runs").addEventListener("input", (event) => {
    query = event.target.value.trim().toLowerCase();
    render();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement.tagName !== "INPUT") {
      event.preventDefault();
      byId("find-runs").focus();
    }
  });
  for (const button of document.querySelectorAll("button.sort")) {
    button.addEventListener("click", () => {
      isDescending = button.dataset.by === by ? !isDescending : true;
      by = button.dataset.by;
      render();
    });
  }
  byId("compare").addEventListener("click", () => {
    location.href = `/compare?${[...chosen].map((run) => `run=${encodeURIComponent(run)}`).join("&")}`;
  });
  function show(names) {
    location.search = new URLSearchParams(names.map((name) => ["column", name])).toString();
  }
  byId("add-column").addEventListener("change", (event) => {
    if (event.target.value) show([...columns, event.target.value]);
  });
  for (const button of document.querySelectorAll("button.drop")) {
    button.addEventListener("click", () => show(columns.filter((name) => name !== button.dataset.column)));
  }
  const stream = new EventSource(`/stream${location.search}`);
  stream.addEventListener("message", (event) => {
    runs = JSON.parse(event.data);
    render();
  });
  render();
}
