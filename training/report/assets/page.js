"use strict";
// Draws the charts of the page from the numbers in #report-data. The colours follow the system's light or dark scheme.
(function () {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => window.innerWidth < 600;
  let charts = [];

  const LIGHT = ["#2f62c9", "#d1690e", "#1f8a5b", "#a83a8f", "#8b6b12", "#0f8896", "#c23934", "#6a55c8", "#6d7680", "#3d3f45"];
  const DARK = ["#86aefc", "#f0a35a", "#66c99a", "#dc8bc9", "#d3b45c", "#5ec4d0", "#f0847f", "#a99cf2", "#a5aeb8", "#d6d9de"];

  function look() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue("--" + name).trim();
    return { text: color("text"), muted: color("muted"), line: color("line"), card: color("card"), colors: dark.matches ? DARK : LIGHT };
  }

  // -- numbers --------------------------------------------------------------------------------------------------------

  function short(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e12) return +(value / 1e12).toPrecision(3) + "T";
    if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(+value.toPrecision(4));
  }
  // The unit that the largest of some byte counts is told in.
  function unitOf(values) {
    const most = Math.max(1, ...values.filter((value) => value !== null && value !== undefined));
    const power = Math.min(4, Math.floor(Math.log2(most) / 10));
    return { size: 1024 ** power, name: ["bytes", "KiB", "MiB", "GiB", "TiB"][power] };
  }
  const whole = (value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : "");
  function micro(value) {
    if (value >= 1e6) return +(value / 1e6).toPrecision(4) + " s";
    if (value >= 1e3) return +(value / 1e3).toPrecision(4) + " ms";
    return Math.round(value) + " us";
  }
  function exact(value) {
    return value === null || value === undefined ? "-" : String(+value.toPrecision(7));
  }
  function escaped(text) {
    return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  }
  function span(window) {
    return window[0] === window[1] ? String(window[0]) : window[0] + " to " + window[1];
  }

  // -- pieces of options ----------------------------------------------------------------------------------------------

  function draw(id, option) {
    const place = document.getElementById(id);
    if (!place) return;
    const chart = echarts.getInstanceByDom(place) || echarts.init(place);
    const { text, muted, card, line } = look();
    chart.setOption(
      {
        animation: false,
        backgroundColor: "transparent",
        textStyle: { fontFamily: "inherit", color: text },
        ...option,
        tooltip: { backgroundColor: card, borderColor: line, textStyle: { color: text, fontSize: 12 }, confine: true, ...option.tooltip },
        legend: option.legend && { type: "scroll", top: 0, left: 0, textStyle: { color: text }, pageTextStyle: { color: muted },
          pageIconColor: text, pageIconInactiveColor: line, itemWidth: 16, itemHeight: 8, ...option.legend },
      },
      true,
    );
    if (!charts.includes(chart)) charts.push(chart);
  }
  function axis(more) {
    const { muted, line } = look();
    return {
      axisLine: { lineStyle: { color: line } }, axisTick: { show: false }, axisLabel: { color: muted, hideOverlap: true },
      splitLine: { lineStyle: { color: line } }, nameTextStyle: { color: muted }, ...more,
    };
  }
  const stepAxis = () => axis({ type: "value", name: "step", nameLocation: "middle", nameGap: 24, min: "dataMin", max: "dataMax",
    splitLine: { show: false }, minInterval: 1, axisLabel: { color: look().muted, hideOverlap: true, formatter: whole } });
  // A name above the upper end of an upright axis.
  const upright = (name, more) => axis({ name, nameLocation: "end", nameGap: 10, ...more,
    nameTextStyle: { color: look().muted, align: "left", padding: [0, 0, 0, -4] } });
  function toolbox() {
    const { muted } = look();
    const tools = { dataZoom: { yAxisIndex: "none", title: { zoom: "zoom", back: "back" } }, restore: { title: "all" } };
    return { right: 0, top: -6, itemSize: 12, iconStyle: { borderColor: muted }, feature: narrow() ? {} : tools };
  }

  // -- kinds of charts ------------------------------------------------------------------------------------------------

  function lines(id, chart) {
    const { colors } = look();
    const inBytes = chart.unit === "bytes";
    const unit = inBytes ? unitOf(chart.series.flatMap((s) => data.curves[s.key])) : { size: 1, name: chart.unit };
    const scaled = (value) => (value === null || (chart.log && value <= 0) ? null : value / unit.size);
    const few = data.steps.length < 40, place = document.getElementById(id);
    draw(id, {
      color: colors,
      legend: { data: chart.series.map((s) => s.name), width: place.clientWidth - (narrow() ? 10 : 100) },
      grid: { left: 8, right: 14, top: 52, bottom: 30, containLabel: true },
      toolbox: toolbox(),
      tooltip: { trigger: "axis", valueFormatter: (value) => exact(value) + (inBytes ? " " + unit.name : "") },
      xAxis: stepAxis(),
      yAxis: upright(inBytes ? "memory, " + unit.name : unit.name, { type: chart.log ? "log" : "value", scale: true, axisLabel: { color: look().muted, formatter: short } }),
      series: chart.series.map((s) => {
        const points = data.curves[s.key].map((value, i) => [data.steps[i], scaled(value)]);
        const sparse = points.filter((point) => point[1] !== null).length < Math.max(2, points.length / 2);
        return {
          name: s.name, type: "line", data: sparse ? points.filter((point) => point[1] !== null) : points,
          showSymbol: few || sparse, symbolSize: 5, lineStyle: { width: 1.5 },
        };
      }),
    });
  }

  function ramp(low, high, diverging) {
    if (diverging) return dark.matches ? ["#4d8df0", "#262b33", "#f0784d"] : ["#2f62c9", "#f2f3f5", "#cc4a12"];
    return dark.matches ? ["#20262e", "#355a9c", "#a5c6ff"] : ["#eef2f8", "#7ea6e6", "#123c86"];
  }

  function heat(id, columns, rows, cells, scale) {
    const { text, muted } = look();
    draw(id, {
      grid: { left: 8, right: 14, top: 26, bottom: 62, containLabel: true },
      tooltip: { formatter: (point) => scale.say(point.data[0], point.data[1], point.data[2]) },
      xAxis: axis({ type: "category", data: columns, name: scale.xName, nameLocation: "middle", nameGap: 24, splitLine: { show: false } }),
      yAxis: upright(scale.yName, { type: "category", data: rows, nameLocation: "start", inverse: true, splitLine: { show: false } }),
      visualMap: {
        min: scale.min, max: scale.max, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemHeight: 110, itemWidth: 10,
        text: [short(scale.max) + (scale.open ? "+" : "") + " " + scale.unit, short(scale.min)], textStyle: { color: muted },
        inRange: { color: ramp(scale.min, scale.max, scale.diverging) },
      },
      series: [{ type: "heatmap", data: cells, progressive: 0, itemStyle: { borderWidth: 0 }, emphasis: { itemStyle: { borderColor: text, borderWidth: 1 } } }],
    });
  }

  function layerPicture(i) {
    const { layers, windows, pictures } = data.layers;
    const picture = pictures[i], cells = [];
    let low = Infinity, high = -Infinity;
    picture.columns.forEach((column, x) => column.forEach((value, y) => {
      if (value === null) return;
      cells.push([x, y, value]);
      low = Math.min(low, value);
      high = Math.max(high, value);
    }));
    if (picture.key === "max_over_mean") low = 1;
    if (picture.key === "at_home" || picture.key === "placed") {  // on one scale
      low = 1;
      pictures.filter((p) => p.key === "at_home").forEach((p) => p.columns.forEach((column) => column.forEach((value) => {
        high = Math.max(high, value ?? 1);
      })));
    }
    if (picture.key === "dropped_share") [low, high] = [0, Math.max(high, 1)];
    heat("layers-" + i, windows.map((w) => w[0]), layers, cells, {
      min: low, max: high > low ? high : low + 1e-9 + Math.abs(low) * 1e-6, xName: "step", yName: "layer", unit: picture.unit,
      say: (x, y, value) => `layer ${layers[y]}, step ${span(windows[x])}<br><b>${exact(value)}</b>`,
    });
  }

  function rankPicture(i) {
    const { windows, pictures } = data.ranks;
    const cells = [];
    pictures[i].columns.forEach((column, x) => column.forEach((value, y) => value === null || cells.push([x, y, value])));
    heat("ranks-" + i, windows.map((w) => w[0]), pictures[i].columns[0].map((_, rank) => rank), cells, {
      min: 0, max: 2, open: true, diverging: true, xName: "step", yName: "rank", unit: "times the mean",
      say: (x, y, value) => `rank ${y}, step ${span(windows[x])}<br><b>${exact(value)}</b> times the mean rank's load`,
    });
  }

  function homes() {
    if (!data.homes) return;
    const { layers, windows, ranks } = data.homes;
    const layer = +document.getElementById("homes-layer").value;
    const cells = [];
    ranks.forEach((window, x) => window[layer].forEach((value, y) => cells.push([x, y, value])));
    heat("homes-chart", windows.map((w) => w[0]), ranks[0][layer].map((_, i) => i), cells, {
      min: 0, max: Math.max(1, ...cells.map((cell) => cell[2])), xName: "step", yName: "expert", unit: "(rank)",
      say: (x, y, value) => `layer ${layers[layer]}, expert ${y}, step ${span(windows[x])}<br><b>rank ${value}</b>`,
    });
  }

  function experts() {
    if (!data.experts) return;
    const choice = document.getElementById("expert-layer");
    const { layers, windows, percent } = data.experts;
    const layer = +choice.value;
    const cells = [];
    percent.forEach((window, x) => window[layer].forEach((value, y) => cells.push([x, y, value])));
    heat("experts-chart", windows.map((w) => w[0]), percent[0][layer].map((_, i) => i), cells, {
      min: 0, max: 200, open: true, diverging: true, xName: "step", yName: "expert", unit: "% of an even share",
      say: (x, y, value) => `layer ${layers[layer]}, expert ${y}, step ${span(windows[x])}<br><b>${value} %</b> of an even share`,
    });
  }

  const NAMES = ["evaluation", "data", "forward", "backward", "pipeline exchange", "gradient reduction", "gradient norm", "optimizer", "checkpoint",
    "attention", "attention backward", "dispatch", "dispatch wait", "experts", "experts backward", "experts weight gradients",
    "combine", "shared expert", "shared expert backward", "message", "other"];
  const HUES = [9, 8, 0, 1, 6, 3, 4, 2, 5, 7, 7, 5, 6, 0, 1, 4, 3, 2, 2, 8, 9];

  function timeline() {
    if (!data.timeline.length) return;
    const step = data.timeline[+document.getElementById("timeline-step").value];
    const { colors, text } = look();
    const lanes = step.labels.flatMap((label) => [label, "layers", "messages"]);
    const place = document.getElementById("timeline-chart");
    place.style.height = lanes.length * 20 + 164 + "px";
    const used = [...new Set(step.spans.map((s) => s[1]))].sort((a, b) => a - b);
    const rectangle = (params, api) => {
      const lane = api.value(0), from = api.coord([api.value(1), lane]), to = api.coord([api.value(2), lane]);
      const height = api.size([0, 1])[1] * (lane % 3 === 2 ? 0.4 : 0.82);
      const shape = echarts.graphic.clipRectByRect(
        { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 0.5), height },
        { x: params.coordSys.x, y: params.coordSys.y, width: params.coordSys.width, height: params.coordSys.height },
      );
      return shape && { type: "rect", shape, style: api.style() };
    };
    draw("timeline-chart", {
      legend: { data: used.map((n) => NAMES[n]), type: narrow() ? "scroll" : "plain" },
      grid: { left: 8, right: 34, top: narrow() ? 48 : 74, bottom: 76, containLabel: true },
      tooltip: { formatter: (point) => `${escaped(NAMES[point.data.name])}, ${lanes[point.data.value[0] - point.data.value[0] % 3]}<br>`
        + `<b>${micro(point.data.value[2] - point.data.value[1])}</b> from ${micro(point.data.value[1])}` },
      xAxis: axis({ type: "value", name: "time", nameLocation: "middle", nameGap: 24, min: 0, max: step.microseconds, axisLabel: { color: look().muted, formatter: micro, hideOverlap: true } }),
      yAxis: upright("rank, its layers and messages", { type: "category", data: lanes, nameLocation: "start", inverse: true, splitLine: { show: false },
        axisLabel: { interval: 0, color: (value) => (value.startsWith("rank") || value.startsWith("stage") ? text : look().muted), fontSize: 11 } }),
      dataZoom: [{ type: "slider", filterMode: "weakFilter", height: 18, bottom: 8, labelFormatter: (value) => micro(value),
        textStyle: { color: look().muted } },
        ...(narrow() ? [] : [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }])],
      series: used.map((n) => ({
        name: NAMES[n], type: "custom", renderItem: rectangle, encode: { x: [1, 2], y: 0 },
        itemStyle: { color: colors[HUES[n]], opacity: NAMES[n].endsWith("backward") || NAMES[n] === "dispatch wait" ? 0.65 : 1 },
        data: step.spans.filter((s) => s[1] === n).map((s) => ({ value: [s[0], s[2], s[2] + s[3]], name: n })),
      })),
    });
    const percent = (part, whole) => (whole > 0 ? ((100 * part) / whole).toFixed(1) + " %" : "-");
    const rows = step.summary.map((s) => `<tr><td>${isNaN(s.rank) ? s.rank : "rank " + s.rank}</td><td class="number">${percent(s.working, step.microseconds)}</td>`
      + `<td class="number">${percent(s.waiting, step.microseconds)}</td><td class="number">${micro(s.messages)}</td>`
      + `<td class="number">${percent(s.hidden, s.messages)}</td></tr>`);
    const left = step.left_out ? `<p class="missing">The ${step.left_out} shortest spans are left out.</p>` : "";
    const some = step.num_traced > step.ranks.length ? `<p class="missing">${step.ranks.length} of ${step.num_traced} traced ranks.</p>` : "";
    document.getElementById("timeline-table").innerHTML = left + some + `<div class="table"><table><thead><tr><th>Step ${step.step}, `
      + `${micro(step.microseconds)}</th><th class="number">Working</th><th class="number">In pipeline exchanges</th><th class="number">Messages on their way</th>`
      + `<th class="number">of that beside a layer's work</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
  }

  function memoryRanks() {
    const { ranks, kinds } = data.memory;
    if (!ranks.length) return;
    const { colors, text } = look();
    const unit = unitOf(ranks.flatMap((r) => [r.peak, r.plan && r.plan.total]));
    const scaled = (value) => (value === null || value === undefined ? null : value / unit.size);
    const stacks = kinds.map((kind, i) => ({ name: kind, type: "bar", stack: "plan", data: ranks.map((r) => scaled(r.plan && r.plan[kind])),
      itemStyle: { color: colors[i], opacity: 0.75 } }));
    const peak = { name: "measured", type: "scatter", symbol: "rect", symbolSize: [ranks.length > 24 ? 8 : 26, 4], itemStyle: { color: text }, z: 5,
      data: ranks.map((r) => scaled(r.peak)) };
    const bare = { ...peak, type: "bar", itemStyle: { color: colors[0] }, symbolSize: undefined, barMaxWidth: 40 };
    const series = kinds.length ? [...stacks, peak] : [bare];
    draw("memory-ranks", {
      legend: { data: series.map((s) => s.name) },
      grid: { left: 8, right: 14, top: 52, bottom: 30, containLabel: true },
      tooltip: { trigger: "axis", valueFormatter: (value) => exact(value) + " " + unit.name },
      xAxis: axis({ type: "category", data: ranks.map((r) => r.rank), name: "rank", nameLocation: "middle", nameGap: 24, splitLine: { show: false } }),
      yAxis: upright("memory, " + unit.name, { type: "value", axisLabel: { color: look().muted, formatter: short } }),
      series,
    });
  }

  function eventsChart() {
    const list = data.events.filter((event) => event.step !== null);
    const place = document.getElementById("events-chart");
    if (!place) return;
    const { colors } = look();
    const kinds = [...new Set(list.map((event) => event.kind))];
    place.style.height = kinds.length * 26 + 86 + "px";
    draw("events-chart", {
      grid: { left: 8, right: 20, top: 26, bottom: 30, containLabel: true },
      tooltip: { formatter: (point) => `step ${point.data.value[0]}: ${escaped(point.data.text)}` },
      xAxis: { ...stepAxis(), min: Math.min(data.steps.length ? data.steps[0] : Infinity, ...list.map((e) => e.step)),
        max: Math.max(data.steps.length ? data.steps[data.steps.length - 1] : 0, ...list.map((e) => e.step)) },
      yAxis: upright("kind of event", { type: "category", data: kinds.map((kind) => kind.replaceAll("_", " ")), inverse: true, nameLocation: "start" }),
      series: [{ type: "scatter", symbolSize: 9,
        data: list.map((event) => ({ value: [event.step, kinds.indexOf(event.kind)], text: event.text, itemStyle: { color: colors[kinds.indexOf(event.kind) % colors.length] } })) }],
    });
  }

  // -- everything -----------------------------------------------------------------------------------------------------

  // [place, what draws there], in the page's order.
  function tasks() {
    const list = [];
    for (const [section, group] of Object.entries(data.charts)) {
      group.forEach((chart, i) => chart.series.length && list.push([section + "-" + i, () => lines(section + "-" + i, chart)]));
    }
    if (data.layers) data.layers.pictures.forEach((_, i) => list.push(["layers-" + i, () => layerPicture(i)]));
    if (data.ranks) data.ranks.pictures.forEach((_, i) => list.push(["ranks-" + i, () => rankPicture(i)]));
    list.push(["experts-chart", experts]);
    list.push(["homes-chart", homes]);
    if (data.plans.chart.series.length) list.push(["plans-chart", () => lines("plans-chart", data.plans.chart)]);
    list.push(["timeline-chart", timeline]);
    [data.memory.chart, data.memory.state].forEach((chart, i) => chart.series.length
      && list.push(["memory-" + i, () => lines("memory-" + i, chart)]));
    list.push(["memory-ranks", memoryRanks], ["events-chart", eventsChart]);
    return list.filter(([id]) => document.getElementById(id));
  }
  // What is in sight at once, the rest in slices, so that a page of many charts is there in no time.
  let queue = [];
  function drawAll() {
    const inSight = ([id]) => document.getElementById(id).getBoundingClientRect().top < window.innerHeight;
    const list = tasks();
    const now = list.filter(inSight);
    queue = list.filter((task) => !now.includes(task));
    now.forEach(([, task]) => task());
    setTimeout(drawMore, 0);
  }
  function drawMore(all) {
    const start = performance.now();
    while (queue.length && (all === true || performance.now() - start < 20)) queue.shift()[1]();
    if (queue.length) setTimeout(drawMore, 0);
    else document.documentElement.dataset.ready = "true";
  }
  drawAll();
  window.addEventListener("beforeprint", () => drawMore(true));
  document.getElementById("expert-layer")?.addEventListener("change", experts);
  document.getElementById("homes-layer")?.addEventListener("change", homes);
  document.getElementById("timeline-step")?.addEventListener("change", timeline);
  dark.addEventListener("change", drawAll);
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => charts.forEach((chart) => chart.resize()));
  });
})();
