// The browser of samples. All text from the run goes in through textContent and never as HTML.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const kinds = Object.fromEntries(
    ["sample-data", "held-out-data"].map((id) => [id, JSON.parse(byId(id).textContent)]),
  );
  let steps = kinds["sample-data"].length ? kinds["sample-data"] : kinds["held-out-data"];
  const range = byId("step-range");
  const list = byId("groups");
  const GROUPS_PER_PAGE = 24;
  let position = 0;
  let state = "";
  let query = "";
  let from = null;
  let to = null;
  let numShown = GROUPS_PER_PAGE;

  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
  const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
  const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
  const numberOf = (samples) => samples.reduce((sum, sample) => sum + sample.count, 0);
  const holds = (text) => text.toLowerCase().includes(query);

  // The text with what was searched for marked.
  function marked(text) {
    const lower = text.toLowerCase();
    // Lower case can be longer than the text in a few scripts; positions would then be wrong.
    if (!query || lower.length !== text.length) return [text];
    const parts = [];
    let from = 0;
    for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, from)) {
      parts.push(text.slice(from, at), make("mark", "", text.slice(at, at + query.length)));
      from = at + query.length;
    }
    parts.push(text.slice(from));
    return parts;
  }

  // A text that is folded when it is long, with a button that unfolds it.
  function foldable(text, label) {
    const body = make("div", "text", ...marked(text));
    const isLong = text.length > 900 || text.split("\n").length > 10;
    if (!isLong || (query && holds(text))) return [body];
    body.classList.add("folded");
    const button = make("button", "fold", `Show all of this ${label}`);
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => {
      const isFolded = body.classList.toggle("folded");
      button.textContent = isFolded ? `Show all of this ${label}` : "Show less";
      button.setAttribute("aria-expanded", String(!isFolded));
    });
    return [body, button];
  }

  // All texts of a sample: its response, and what was said in its episode.
  function textsOf(sample, step) {
    const episode = step.episodes[sample.episode];
    return [sample.response, ...(episode ? [episode.error, ...episode.messages.map((message) => message.text)] : [])];
  }

  function matchingSamples(group, step) {
    const isFoundInGroup = holds(group.prompt) || holds(group.answer);
    return group.samples.filter((sample) => {
      const isInRange = (from === null && to === null)
        || (sample.reward !== null && (from === null || sample.reward >= from) && (to === null || sample.reward <= to));
      if (!isInRange) return false;
      const fits = !state || (state === "truncated" ? sample.is_truncated : sample.state === state);
      return fits && (!query || isFoundInGroup || textsOf(sample, step).some(holds) || sample.details.some((d) => holds(d.error) || holds(d.said)));
    });
  }

  function matchesOf(step) {
    return step.groups.map((group) => ({ group, samples: matchingSamples(group, step) })).filter(({ samples }) => samples.length);
  }

  function pictureOf(source, name) {
    const picture = make("img", "picture");
    picture.src = source;
    picture.alt = name;
    return picture;
  }

  function groupHeader(group) {
    const valid = group.samples.filter((sample) => sample.state !== "failed");
    const total = valid.reduce((sum, sample) => sum + sample.count * sample.reward, 0);
    const facts = [];
    const fact = (name, value) => facts.push(make("span", "", `${name} `, make("b", "", ...value)));
    if (group.answer) fact("expected", marked(group.answer));
    fact("correct", [`${numberOf(valid.filter((sample) => sample.state === "correct"))} of ${numberOf(group.samples)}`]);
    if (valid.length) fact("mean reward", [number(total / numberOf(valid))]);
    if (group.samples.every((sample) => sample.advantage === 0)) {
      facts.push(make("span", "", "no signal: these responses change no weight"));
    }
    if (group.group_id) facts.push(make("span", "", `group ${group.group_id}`));
    const pictures = group.images.map((source, index) => pictureOf(source, `image ${index + 1} of the prompt`));
    return make("header", "", ...pictures, ...foldable(group.prompt, "prompt"), make("div", "summary", ...facts));
  }

  // Tokens one by one: the darker, the less probable.
  function tokenView(tokens) {
    const view = make("div", "text tokens");
    const name = tokens.old ? "old" : "rollout";
    const marks = tokens.text.map((text, index) => {
      const node = make("span", "token", text === "\n" ? "⏎\n" : text);
      const logProb = tokens[name] ? tokens[name][index] : null;
      const isMasked = Boolean(tokens.mask && !tokens.mask[index]);
      if (isMasked) node.classList.add("masked");
      else if (logProb !== null) node.style.setProperty("--shade", `${Math.round(70 * (1 - Math.exp(logProb)))}%`);
      const lines = [JSON.stringify(text), isMasked ? "not sampled by the policy" : ""];
      for (const one of ["rollout", "old"]) {
        const value = tokens[one] ? tokens[one][index] : null;
        if (value !== null) lines.push(`${one}_log_probs ${value.toFixed(3)} (probability ${Math.exp(value).toPrecision(3)})`);
      }
      node.title = lines.filter(Boolean).join("\n");
      return node;
    });
    view.append(...marks);
    if (tokens.total > marks.length) view.append(make("span", "note", ` … ${counted(tokens.total - marks.length, "more token")}`));
    return view;
  }

  const seconds = (value) => `${value < 0.1 ? value.toFixed(3) : value < 10 ? value.toFixed(2) : value.toFixed(0)} s`;

  // A message of an episode: who says it, what, and what came of it.
  function bubble(message, isFailed, agents) {
    const place = agents.indexOf(message.who);
    const isSaid = message.kind === "said";
    const node = make("div", `bubble ${message.kind}`);
    if (isSaid && place > 0) node.classList.add(`agent-${Math.min(place, 3)}`);
    const facts = make("div", "bubble-facts", make("b", "", isSaid ? message.who || "policy" : message.who));
    const fact = (text, className = "") => facts.append(make("span", className, text));
    if (isSaid) {
      if (message.turn !== null) fact(`turn ${message.turn + 1}`);
      fact(`${counted(message.tokens, "token")} ${isFailed ? "left out" : "trained"}`, isFailed ? "cut" : "");
      if (message.is_truncated) fact("cut", "cut");
      if (message.reward) fact(`reward ${signed(message.reward)}`, message.reward > 0 ? "gain" : "loss");
      if (message.seconds !== null) fact(`answered in ${seconds(message.seconds)}`);
    } else if (message.kind === "tool") {
      if (message.refusal) fact(message.refusal.replaceAll("_", " "), "loss");
      if (message.seconds !== null) fact(seconds(message.seconds));
    }
    node.append(facts);
    node.append(...(message.images || []).map((source, index) => pictureOf(source, `image ${index + 1} of the message`)));
    if (message.text) node.append(...foldable(message.text, "message"));
    for (const call of message.calls || []) {
      node.append(make("div", "call", make("b", "", call.name), " ", ...marked(call.arguments)));
    }
    return node;
  }

  function conversationView(episode) {
    const isFailed = Boolean(episode.cause);
    const view = make("div", "conversation", ...episode.messages.map((message) => bubble(message, isFailed, episode.agents)));
    if (episode.total > episode.messages.length) {
      view.append(make("p", "note", `${counted(episode.total - episode.messages.length, "more message")} in episodes/`));
    }
    if (isFailed) view.append(make("div", "bubble failure", make("b", "", `failed: ${episode.cause}`), make("div", "text", ...marked(episode.error))));
    const spent = Object.entries(episode.seconds).filter(([, value]) => value > 0);
    const end = episode.is_cut ? "cut at a limit" : isFailed ? "" : "over";
    view.append(make("p", "note", [end, ...spent.map(([name, value]) => `${name} ${seconds(value)}`)].filter(Boolean).join(" · ")));
    if (episode.has_drifted) {
      view.append(make("p", "note", make("b", "", "drifted: "), "the model has seen other tokens than if its chat template had written the conversation anew each turn. What was sampled is trained all the same; leaderless template MODEL shows where a template does so."));
    }
    return view;
  }

  // Samples of one episode share its conversation, which is shown with the first of them.
  function responseCell(sample, shown) {
    const episode = steps[position].episodes[sample.episode];
    let content = foldable(sample.response, "response");
    if (episode && shown.has(sample.episode)) content = [make("p", "note", "The same episode as above.")];
    else if (episode) content = [conversationView(episode)];
    shown.add(sample.episode);
    const cell = make("div", "", ...content);
    const tokens = steps[position].tokens[sample.sample_id];
    if (!tokens) return cell;
    const plain = [...cell.childNodes];
    const button = make("button", "fold", "Tokens");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const showsTokens = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(showsTokens));
      cell.replaceChildren(...(showsTokens ? [tokenView(tokens)] : plain), button);
    });
    cell.append(button);
    return cell;
  }

  function sampleRow(sample, shown) {
    const tags = make("div", "tags", make("span", `tag ${sample.state}`, sample.state));
    if (sample.count > 1) {
      const times = make("span", "tag count", `× ${sample.count}`);
      times.title = `${sample.count} equal responses`;
      tags.append(times);
    }
    if (sample.is_truncated) tags.append(make("span", "tag cut", "cut"));
    if (sample.role) tags.append(make("span", "tag", sample.role));
    const verdict = make("div", "verdict", tags);
    const line = (name, value) => verdict.append(make("div", "", `${name} `, make("b", "", value)));
    line("reward", number(sample.reward));
    if (sample.advantage !== null) line("advantage", signed(sample.advantage));
    const graded = sample.details.filter((detail) => !detail.error);
    if (graded.length > 1 || graded.some((detail) => detail.value !== sample.reward)) {
      verdict.append(make("div", "", graded.map((detail) => `${detail.name} ${number(detail.value)}`).join(" · ")));
    }
    for (const detail of sample.details.filter((one) => one.error)) {
      verdict.append(make("div", "error", `${detail.name}: `, ...marked(detail.error)));
    }
    for (const detail of sample.details.filter((one) => one.said)) {
      verdict.append(make("details", "", make("summary", "", `${detail.name} says`), make("pre", "", ...marked(detail.said))));
    }
    return make("div", "sample", verdict, responseCell(sample, shown));
  }

  function withShown(samples) {
    const shown = new Set();
    return samples.map((sample) => sampleRow(sample, shown));
  }

  function showElsewhere() {
    const place = byId("elsewhere");
    const others = query ? steps.map((_, index) => index).filter((i) => i !== position && matchesOf(steps[i]).length) : [];
    place.hidden = !others.length;
    const links = others.slice(0, 20).map((index) => {
      const button = make("button", "", String(steps[index].step));
      button.type = "button";
      button.addEventListener("click", () => goTo(index));
      return button;
    });
    place.replaceChildren("Also found at step ", ...links.flatMap((link) => [link, " "]), others.length > 20 ? ` and ${others.length - 20} more` : "");
  }

  function render() {
    const recorded = steps[position];
    const matches = matchesOf(recorded);
    const shown = matches.slice(0, numShown);
    range.value = String(position);
    range.setAttribute("aria-valuetext", `step ${recorded.step}`);
    byId("step-output").value = String(recorded.step);
    byId("step-back").disabled = position === 0;
    byId("step-forward").disabled = position === steps.length - 1;
    const total = recorded.groups.reduce((sum, group) => sum + numberOf(group.samples), 0);
    const found = matches.reduce((sum, match) => sum + numberOf(match.samples), 0);
    const shownOf = found === total ? "" : `${found.toLocaleString("en")} of `;
    const more = recorded.num_recorded > total ? `; ${recorded.num_recorded - total} more are in samples/` : "";
    byId("found").textContent = `${shownOf}${counted(total, "response")} to ${counted(matches.length, "prompt")}${more}`;
    list.replaceChildren(
      ...shown.map(({ group, samples }) => make("article", "group", groupHeader(group), ...withShown(samples))),
    );
    byId("more").hidden = matches.length <= shown.length;
    showElsewhere();
    document.documentElement.dataset.shownSamples = list.querySelectorAll(".sample").length;
  }

  function goTo(index) {
    range.max = String(steps.length - 1);
    position = Math.min(Math.max(index, 0), steps.length - 1);
    numShown = GROUPS_PER_PAGE;
    render();
  }

  function nearest(step) {
    const distances = steps.map((recorded) => Math.abs(recorded.step - step));
    return distances.indexOf(Math.min(...distances));
  }

  if (steps.length) {
    byId("browser").hidden = false;
    byId("kinds").hidden = !Object.values(kinds).every((kind) => kind.length);
    const kindButtons = document.querySelectorAll("input[name=kind]");
    const choose = (kind) => {
      const step = steps[position].step;
      steps = kinds[kind];
      for (const radio of kindButtons) radio.checked = radio.value === kind;
      goTo(nearest(step));
    };
    for (const radio of kindButtons) radio.addEventListener("change", () => choose(radio.value));
    range.addEventListener("input", () => goTo(Number(range.value)));
    byId("step-back").addEventListener("click", () => goTo(position - 1));
    byId("step-forward").addEventListener("click", () => goTo(position + 1));
    byId("more").addEventListener("click", () => {
      numShown += GROUPS_PER_PAGE;
      render();
    });
    for (const radio of document.querySelectorAll("input[name=state]")) {
      radio.addEventListener("change", () => {
        state = radio.value;
        goTo(position);
      });
    }
    let pause = 0;
    byId("find").addEventListener("input", (event) => {
      clearTimeout(pause);
      pause = setTimeout(() => {
        query = event.target.value.trim().toLowerCase();
        goTo(position);
      }, 150);
    });
    const bound = (id, set) => byId(id).addEventListener("input", (event) => {
      set(event.target.value === "" ? null : Number(event.target.value));
      goTo(position);
    });
    bound("reward-from", (value) => { from = value; });
    bound("reward-to", (value) => { to = value; });
    document.addEventListener("report:step", (event) => {
      goTo(nearest(event.detail));
      byId("samples").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    });
    // A run that is under way has recorded more: whoever looks at the newest step goes on to the new one.
    document.addEventListener("live:samples", (event) => {
      const isAtEnd = position === steps.length - 1;
      const { step } = steps[position];
      const kind = steps === kinds["held-out-data"] ? "held-out-data" : "sample-data";
      Object.assign(kinds, event.detail);
      steps = kinds[kind].length ? kinds[kind] : steps;
      byId("kinds").hidden = !Object.values(kinds).every((one) => one.length);
      goTo(isAtEnd ? steps.length - 1 : nearest(step));
    });
    goTo(steps.length - 1); // what the policy says now
  }
}
