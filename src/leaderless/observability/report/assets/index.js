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
    const name = cell("th", link);
    name.scope = "row";
    const state = cell("span", run.state);
    state.className = `tag ${run.state}`;
    const step = run.step === null ? "–" : run.num_steps ? `${run.step.toLocaleString("en")} of ${run.num_steps.toLocaleString("en")}` : String(run.step);
    const changed = run.changed ? ago(Math.max(0, Date.now() / 1000 - run.changed)) : "–";
    return cell("tr", cell("td", box), name, cell("td", state), cell("td", step), cell("td", number(run.reward)), cell("td", number(run.loss)), cell("td", number(run.step_s)), cell("td", changed));
  }

  function compare(a, b) {
    const [left, right] = [a[by], b[by]];
    if (left === right) return a.key < b.key ? -1 : 1;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return (left < right ? -1 : 1) * (isDescending ? -1 : 1);
  }

  function render() {
    const found = runs.filter((run) => `${run.key} ${run.state}`.toLowerCase().includes(query)).sort(compare);
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
  const stream = new EventSource("/stream");
  stream.addEventListener("message", (event) => {
    runs = JSON.parse(event.data);
    render();
  });
  render();
}
