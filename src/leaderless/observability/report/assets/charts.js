// Draws the curves. Each is drawn when it comes near the visible part of the page, so that a long page opens at once.
"use strict";
{
  const root = document.documentElement;
  const charts = Object.entries(JSON.parse(document.getElementById("chart-data").textContent)).map(([id, data]) => ({
    element: document.getElementById(id),
    data,
    isLog: Boolean(data.is_log),
    isDrawn: false,
  }));
  const slider = document.getElementById("smoothing");
  let smoothing = 0;
  let zoom = null; // [first, last] step in view, the same in all charts

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const seriesColor = (index) => color(`--series-${(index % 8) + 1}`);
  const translucent = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

  // Plotly takes names for a kind of HTML; names come from the run, so that they must mean nothing but themselves.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Exponential moving average, divided by the weight gathered so far so that it does not start at zero.
  function smoothed(values, decay) {
    let average = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      average = decay * average + (1 - decay) * value;
      weight = decay * weight + (1 - decay);
      return average / weight;
    });
  }

  function curveTraces(data) {
    const format = data.unit === "share" ? ".1%" : ".4~g";
    const traces = [];
    if (data.band) {
      const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...edge, x: data.band.low.steps, y: data.band.low.values });
      traces.push({
        ...edge,
        x: data.band.high.steps,
        y: data.band.high.values,
        fill: "tonexty",
        fillcolor: translucent(seriesColor(0), 0.14),
      });
    }
    data.traces.forEach((trace, index) => {
      const hue = seriesColor(index);
      const isSparse = trace.steps.length <= 40;
      const curve = {
        x: trace.steps,
        y: trace.values,
        name: escaped(trace.name),
        mode: isSparse ? "lines+markers" : "lines",
        line: { color: hue, width: 1.6 },
        marker: { color: hue, size: 4 },
        hovertemplate: `%{y:${format}}<extra>${data.traces.length > 1 ? "%{fullData.name}" : ""}</extra>`,
      };
      if (smoothing > 0 && !isSparse) {
        const faint = { color: translucent(hue, 0.28), width: 1 };
        traces.push({ ...curve, line: faint, hoverinfo: "skip", hovertemplate: null, showlegend: false });
        traces.push({ ...curve, y: smoothed(trace.values, smoothing), line: { color: hue, width: 2 } });
      } else {
        traces.push(curve);
      }
    });
    return traces;
  }

  function stackTraces(data) {
    const traces = data.parts.map((part, index) => ({
      x: data.steps,
      y: part.values,
      name: escaped(part.name),
      mode: "lines",
      stackgroup: "nodes",
      line: { width: 0, shape: "hvh" },
      fillcolor: translucent(seriesColor(index), 0.8),
      hovertemplate: "%{y:.3~g} s",
    }));
    if (data.total) {
      traces.push({
        x: data.steps,
        y: data.total,
        name: "whole step",
        mode: "lines",
        line: { width: 1.4, color: color("--ink"), shape: "hvh" },
        hovertemplate: "%{y:.3~g} s",
      });
    }
    return traces;
  }

  const tracesOf = ({ data }) => (data.kind === "stack" ? stackTraces(data) : curveTraces(data));

  // The vertical range of what is in view; without a zoom the chart finds its own, unless all values are the same.
  function verticalRange(chart) {
    if (chart.data.kind !== "curves") return null;
    const [first, last] = zoom || [-Infinity, Infinity];
    const inView = chart.data.traces.flatMap((trace) =>
      trace.values.filter((value, i) => value !== null && trace.steps[i] >= first && trace.steps[i] <= last),
    );
    const values = chart.isLog ? inView.filter((value) => value > 0).map(Math.log10) : inView;
    if (!values.length) return null;
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    if (!zoom) return low === high && low > 0 && !chart.isLog ? [0, 2 * high] : null;
    const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  }

  // How the ticks of the vertical axis are written and where it may begin.
  function verticalAxis(chart) {
    const { data, isLog } = chart;
    if (data.kind === "stack") return { rangemode: "tozero", ticksuffix: " s" };
    const values = data.traces.flatMap((trace) => trace.values.filter((value) => value !== null && (!isLog || value > 0)));
    const largest = values.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    const least = values.reduce((a, b) => Math.min(a, b), largest);
    if (isLog) return { type: "log", exponentformat: "power", ...(largest / least >= 100 ? { dtick: 1 } : { nticks: 4 }) };
    const small = largest > 0 && largest < 1e-3 ? ".2~e" : "";
    return {
      rangemode: least >= 0 && !data.band ? "nonnegative" : "normal",
      tickformat: data.unit === "share" ? ".2~%" : small,
    };
  }

  // Ticks at whole steps, however few there are: Plotly would write 1.5 as 2.
  function stepAxis(chart) {
    const traces = chart.data.kind === "stack" ? [chart.data] : chart.data.traces;
    const steps = traces.flatMap((trace) => trace.steps);
    const [first, last] = zoom || [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), -Infinity)];
    return last - first < 6 ? { tick0: 0, dtick: 1 } : { nticks: 6 };
  }

  function layout(chart) {
    const { data } = chart;
    const text = color("--ink-faint");
    const line = color("--line");
    const tickfont = { size: 11, color: text };
    const axis = { gridcolor: color("--grid"), linecolor: line, zerolinecolor: line, tickfont };
    const legendFont = { size: 11, color: color("--ink-soft") };
    const range = verticalRange(chart);
    const isStack = data.kind === "stack";
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 52, r: 14, t: 12, b: isStack ? 40 : 26 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: color("--surface"), bordercolor: line, font: { size: 12, color: color("--ink") } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
      showlegend: isStack || data.traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: legendFont },
      xaxis: {
        ...axis,
        showgrid: false,
        tickformat: ",d",
        hoverformat: ",d",
        unifiedhovertitle: { text: "step %{x}" },
        ...stepAxis(chart),
        ...(zoom ? { range: zoom, autorange: false } : { autorange: true }),
      },
      yaxis: {
        ...axis,
        automargin: true,
        fixedrange: true, // a drag chooses steps, and all charts follow it
        nticks: 6,
        type: "linear",
        ...verticalAxis(chart),
        ...(range ? { range, autorange: false } : { autorange: true }),
      },
    };
  }

  const options = { displayModeBar: false };

  function draw(chart) {
    chart.isStale = false;
    Plotly.react(chart.element, tracesOf(chart), layout(chart), options);
    if (chart.isDrawn) return;
    chart.isDrawn = true;
    chart.element.on("plotly_relayout", (change) => followZoom(change));
    chart.element.on("plotly_click", (event) => {
      document.dispatchEvent(new CustomEvent("report:step", { detail: event.points[0].x }));
    });
    root.dataset.drawnCharts = charts.filter((one) => one.isDrawn).length;
  }

  function redraw() {
    charts.filter((chart) => chart.isDrawn).forEach(draw);
  }

  function followZoom(change) {
    if ("xaxis.range[0]" in change) {
      zoom = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    } else if (change["xaxis.autorange"]) {
      zoom = null;
    } else {
      return;
    }
    redraw();
  }

  function button(text, label, onClick) {
    const node = document.createElement("button");
    node.type = "button";
    node.textContent = text;
    node.title = label;
    node.setAttribute("aria-label", label);
    node.addEventListener("click", onClick);
    return node;
  }

  function addTools(chart) {
    const caption = chart.element.parentElement.querySelector("figcaption");
    const title = caption.querySelector("h4").textContent;
    const tools = document.createElement("div");
    tools.className = "tools";
    if (chart.data.kind === "curves" && chart.data.traces.some((trace) => trace.values.some((value) => value > 0))) {
      const scale = button("log", `${title}: logarithmic axis`, () => {
        chart.isLog = !chart.isLog;
        scale.setAttribute("aria-pressed", String(chart.isLog));
        draw(chart);
      });
      scale.setAttribute("aria-pressed", String(chart.isLog));
      tools.append(scale);
    }
    const save = () => {
      const figure = { data: tracesOf(chart), layout: { ...layout(chart), paper_bgcolor: color("--surface") } };
      const filename = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
      Plotly.downloadImage(figure, { format: "png", width: 900, height: 480, scale: 2, filename });
    };
    tools.append(button("png", `${title}: save as a picture`, save));
    caption.append(tools);
  }

  let isWaiting = false;
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    slider.nextElementSibling.value = smoothing ? smoothing.toFixed(2) : "off";
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      redraw();
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => charts.forEach(draw));

  // New points of a run that is under way. Arrays are replaced, as Plotly takes the same array for the same points.
  function extend(trace, more) {
    trace.steps = trace.steps.concat(more.steps);
    trace.values = trace.values.concat(more.values);
  }

  document.addEventListener("live:charts", (event) => {
    for (const chart of charts) {
      const news = event.detail[chart.element.id];
      if (!news) continue;
      if (news.data) chart.data = news.data;
      (news.traces || []).forEach((more, index) => extend(chart.data.traces[index], more));
      if (news.band && chart.data.band) {
        extend(chart.data.band.low, news.band.low);
        extend(chart.data.band.high, news.band.high);
      }
      if (news.shown) chart.element.parentElement.querySelector(".from-to").textContent = news.shown;
      if (chart.isDrawn && chart.isNear) draw(chart);
      else chart.isStale = true;
    }
  });

  charts.forEach(addTools);
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const chart = charts.find((one) => one.element === entry.target);
        chart.isNear = entry.isIntersecting;
        if (chart.isNear && (!chart.isDrawn || chart.isStale)) draw(chart);
      }
    },
    { rootMargin: "800px" },
  );
  // Cards change their width with the page, but also when the number of columns changes.
  const resizer = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.find((one) => one.element === entry.target);
      if (chart.isDrawn && entry.contentRect.width > 0) Plotly.Plots.resize(chart.element);
    }
  });
  for (const chart of charts) {
    // What is in view is there with the first frame.
    if (chart.element.getBoundingClientRect().top < innerHeight) draw(chart);
    observer.observe(chart.element);
    resizer.observe(chart.element);
  }
}
