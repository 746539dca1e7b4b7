// Keeps a page about runs up to date: what the server sends goes to the charts, the samples and the sections on top.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const now = byId("now");
  const runs = JSON.parse((now || byId("differences")).dataset.runs);
  const address = `?${runs.map((run) => `run=${encodeURIComponent(run)}`).join("&")}`;
  const { at } = (now || byId("differences")).dataset;
  const root = document.documentElement;
  let numUpdates = 0;

  // The server has escaped every value in this HTML. What the reader has opened stays open.
  function replace(place, html) {
    const open = [...place.querySelectorAll("details[open]")].map((one) => one.id);
    const focused = document.activeElement && place.contains(document.activeElement) ? document.activeElement.id : "";
    place.innerHTML = html;
    for (const one of place.querySelectorAll("details")) one.open = open.includes(one.id) && one.id !== "";
    if (focused && byId(focused)) byId(focused).focus();
  }

  // Marks the nodes that ranks are at, in the picture of the plan.
  function mark(doing) {
    for (const box of document.querySelectorAll("#now .leaderless-plan .box")) {
      const name = box.querySelector("text.name");
      const ranks = name && doing[name.textContent];
      box.classList.toggle("active", Boolean(ranks));
      const label = box.querySelector("text.present");
      if (label) label.remove();
      if (ranks) {
        const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
        text.setAttribute("class", "present");
        const frame = box.querySelector("rect").getBBox();
        text.setAttribute("x", String(frame.x + frame.width + 8));
        text.setAttribute("y", String(frame.y + frame.height / 2));
        text.textContent = `${/[-,]/.test(ranks) ? "ranks" : "rank"} ${ranks}`;
        box.append(text);
      }
    }
  }

  async function renewSamples() {
    const answer = await fetch(`/samples${address}`);
    if (answer.ok) document.dispatchEvent(new CustomEvent("live:samples", { detail: await answer.json() }));
  }

  function show(news) {
    if (news.reload) {
      location.reload();
      return;
    }
    if (news.now !== undefined) replace(byId("now-body"), news.now);
    if (news.outcome !== undefined) replace(byId("outcome-body"), news.outcome);
    if (news.doing) mark(news.doing);
    if (byId("stop") && news.can_stop !== undefined) byId("stop").hidden = !news.can_stop;
    if (news.charts) document.dispatchEvent(new CustomEvent("live:charts", { detail: news.charts }));
    if (news.has_samples) renewSamples();
    numUpdates += 1;
    root.dataset.updates = String(numUpdates);
  }

  const stream = new EventSource(`/stream${address}&at=${encodeURIComponent(at)}`);
  stream.addEventListener("open", () => { byId("connection").textContent = ""; });
  stream.addEventListener("error", () => { byId("connection").textContent = "No connection to leaderless ui: the page shows what was known then, and tries again."; });
  stream.addEventListener("message", (event) => show(JSON.parse(event.data)));

  if (now) {
    byId("stop").addEventListener("click", async () => {
      const said = byId("stop-said");
      if (!confirm("Stop this run after its present step, with a checkpoint?")) return;
      const answer = await fetch(`/stop${address}`, { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
      said.textContent = answer.ok ? "It stops after this step, with a checkpoint." : (await answer.json()).error;
    });
  }
}
