"use strict";
// Charts of a run. Numbers come from the JSON in this page; nothing is fetched, and text only ever becomes text nodes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const series = data.series;
  const steps = series.step;
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 26;
  const first = steps.length ? series.first : 0;
  const last = steps.length ? steps[steps.length - 1] : 0;
  const state = { from: first, to: last, smoothing: 0.9, log: false, at: null };
  const charts = [];
  const byId = (id) => document.getElementById(id);

  // ---------------------------------------------------------------- numbers

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  function short(value) {
    if (!isNumber(value)) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function bytes(value) {
    if (!isNumber(value)) return "-";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (Math.abs(value) >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
    return `${place ? value.toFixed(1) : value} ${units[place]}`;
  }

  function duration(value) {
    if (!isNumber(value)) return "-";
    if (value === 0) return "0 s";
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
    if (value < 60) return `${Number(value.toPrecision(3))} s`;
    if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
    return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step);
    return found;
  }

  function byteTicks(low, high, count) {
    const unit = 2 ** (10 * Math.max(0, Math.floor(Math.log2(Math.max(high, 1)) / 10)));
    return ticks(low / unit, high / unit, count).map((one) => one * unit);
  }

  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1)
      for (const one of [1, 2, 5]) if (one * 10 ** power >= low && one * 10 ** power <= high) found.push(one * 10 ** power);
    return found.length > 1 ? found : [low, high];
  }

  // A mean that forgets: each point weighs `smoothing` less than the one after it; gaps neither count nor are filled.
  function smoothed(values, amount) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (!isNumber(value)) return null;
      sum = amount * sum + (1 - amount) * value;
      weight = amount * weight + (1 - amount);
      return sum / weight;
    });
  }

  function visible() {
    const found = [];
    for (let n = 0; n < steps.length; n += 1)
      if (steps[n] >= state.from && steps[n] <= state.to) found.push(n);
    return found;
  }

  function nearest(step) {
    const found = visible();
    if (!found.length) return null;
    return found.reduce((best, n) => (Math.abs(steps[n] - step) < Math.abs(steps[best] - step) ? n : best), found[0]);
  }

  // ---------------------------------------------------------------- drawing

  function svg(tag, attributes, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, String(value));
    for (const child of children) node.append(child);
    return node;
  }

  function label(x, y, words, attributes) {
    const node = svg("text", { x, y, ...attributes });
    node.textContent = words;
    return node;
  }

  // A path that breaks where a value is missing; a value without neighbours becomes a dot.
  function line(points, name, dot) {
    const group = svg("g", {});
    let path = "", run = [];
    const close = () => {
      if (run.length === 1) group.append(svg("circle", { cx: run[0][0], cy: run[0][1], r: 2, class: dot }));
      else if (run.length) path += `M${run.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;
      run = [];
    };
    for (const point of points) if (isNumber(point[1])) run.push(point); else close();
    close();
    if (path) group.prepend(svg("path", { d: path, class: name }));
    return group;
  }

  function area(low, high, name) {
    let path = "", run = [];
    const close = () => {
      if (run.length) {
        const up = run.map((n) => high[n]), down = run.map((n) => low[n]).reverse();
        path += `M${[...up, ...down].map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}Z`;
      }
      run = [];
    };
    low.forEach((point, n) => { if (isNumber(point[1]) && isNumber(high[n][1])) run.push(n); else close(); });
    close();
    return svg("path", { d: path, class: name });
  }

  function extent(lists, low) {
    const known = lists.flat().filter(isNumber);
    if (!known.length) return null;
    known.sort((a, b) => a - b);
    // one spike among many points must not flatten the rest: it is cut at the edge, and the read-out tells its value
    const high = known.length > 50 ? known[Math.min(known.length - 1, Math.floor(known.length * 0.995))] : known[known.length - 1];
    const least = low === undefined ? known[0] : low;
    return least === high ? [least - Math.abs(least || 1) / 10, high + Math.abs(high || 1) / 10] : [least, high];
  }

  class StepChart {
    // build(chart, places): draws between the axes. values(place): lines of the read-out. range(places): [low, high].
    constructor(name, options) {
      this.host = byId(`chart-${name}`);
      this.options = options;
      this.height = options.height || 220;
      if (!this.host) return;
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      this.root = svg("svg", { role: "img", tabindex: 0, "aria-label": this.host.dataset.title });
      this.host.append(this.root, this.tip);
      this.listen();
      charts.push(this);
    }

    x(step) {
      const span = Math.max(1, state.to - state.from);
      return LEFT + ((step - state.from) / span) * (this.width - LEFT - RIGHT);
    }

    y(value) {
      if (!isNumber(value) || (this.isLog && value <= 0)) return null;
      const [low, high] = this.range;
      const share = this.isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return this.height - BOTTOM - share * (this.height - TOP - BOTTOM);
    }

    draw() {
      if (!this.host) return;
      this.width = Math.max(280, this.host.clientWidth);
      this.root.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.root.setAttribute("height", String(this.height));
      this.root.replaceChildren();
      const places = visible();
      this.isLog = Boolean(this.options.canLog && state.log);
      const found = this.options.range(places);
      if (!found) {
        this.root.append(label(LEFT, this.height / 2, "no values here", { class: "strong" }));
        return;
      }
      this.range = found;
      if (this.isLog && this.range[0] <= 0) {
        const above = this.options.positive(places);
        if (above === null) this.isLog = false; else this.range = [above, this.range[1]];
      }
      this.axes();
      const id = `clip-${this.host.id}`;
      const clip = svg("clipPath", { id }, svg("rect", {
        x: LEFT, y: TOP - 4, width: this.width - LEFT - RIGHT, height: this.height - TOP - BOTTOM + 8,
      }));
      const inside = svg("g", { "clip-path": `url(#${id})` });
      this.root.append(clip, inside);
      this.options.build(this, places, inside);
      for (const one of data.resumes)
        if (one.step > state.from && one.step < state.to) {
          const title = svg("title", {});
          title.textContent = `resumed after step ${one.step}`;
          inside.append(svg("line", { x1: this.x(one.step), x2: this.x(one.step), y1: TOP, y2: this.height - BOTTOM, class: "mark" }, title));
        }
      this.cursor = svg("line", { y1: TOP, y2: this.height - BOTTOM, class: "cursor", visibility: "hidden" });
      this.selection = svg("rect", { y: TOP, height: this.height - TOP - BOTTOM, class: "zoom", visibility: "hidden" });
      this.root.append(this.selection, this.cursor);
      this.point();
    }

    axes() {
      const format = this.options.format || short;
      const round = format === bytes ? byteTicks : ticks;
      const rows = this.isLog ? logTicks(...this.range) : round(...this.range, 4);
      for (const value of rows) {
        const y = this.y(value);
        this.root.append(svg("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "grid" }));
        this.root.append(label(LEFT - 8, y + 4, format(value), { "text-anchor": "end" }));
      }
      for (const value of ticks(state.from, state.to, Math.max(2, Math.floor(this.width / 140)))) {
        if (value !== Math.round(value)) continue;
        const x = this.x(value), isEdge = x > this.width - RIGHT - 24;
        this.root.append(label(isEdge ? this.width : x, this.height - 8, String(value), { "text-anchor": isEdge ? "end" : "middle" }));
      }
      const y = this.height - BOTTOM;
      this.root.append(svg("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y, class: "axis" }));
    }

    point() {
      if (!this.cursor) return;
      const at = state.at;
      if (at === null || steps[at] < state.from || steps[at] > state.to) {
        this.cursor.setAttribute("visibility", "hidden");
        this.tip.hidden = true;
        return;
      }
      const x = this.x(steps[at]);
      this.cursor.setAttribute("x1", String(x));
      this.cursor.setAttribute("x2", String(x));
      this.cursor.setAttribute("visibility", "visible");
      if (StepChart.active !== this) { this.tip.hidden = true; return; }
      this.tip.textContent = [stepName(at), ...this.options.values(at)].join("\n");
      this.tip.hidden = false;
      const room = this.host.clientWidth * (x / this.width);
      const isRight = room > this.host.clientWidth / 2;
      this.tip.style.left = isRight ? "auto" : `${room + 12}px`;
      this.tip.style.right = isRight ? `${this.host.clientWidth - room + 12}px` : "auto";
    }

    stepAt(event) {
      const box = this.root.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.width;
      const share = (x - LEFT) / (this.width - LEFT - RIGHT);
      return state.from + Math.min(1, Math.max(0, share)) * (state.to - state.from);
    }

    listen() {
      let start = null;
      this.root.addEventListener("pointerdown", (event) => {
        if (event.button === 0) { start = this.stepAt(event); this.root.setPointerCapture(event.pointerId); }
      });
      this.root.addEventListener("pointermove", (event) => {
        const step = this.stepAt(event);
        if (start !== null && this.selection) {
          const [a, b] = [this.x(Math.min(start, step)), this.x(Math.max(start, step))];
          this.selection.setAttribute("x", String(a));
          this.selection.setAttribute("width", String(Math.max(0, b - a)));
          this.selection.setAttribute("visibility", "visible");
        }
        look(this, nearest(step));
      });
      this.root.addEventListener("pointerup", (event) => {
        const step = this.stepAt(event);
        if (start !== null && Math.abs(step - start) > (state.to - state.from) * 0.02) zoom(Math.min(start, step), Math.max(start, step));
        start = null;
        if (this.selection) this.selection.setAttribute("visibility", "hidden");
      });
      this.root.addEventListener("pointercancel", () => { start = null; });
      this.root.addEventListener("pointerleave", () => { if (start === null) look(this, null); });
      this.root.addEventListener("dblclick", () => zoom(first, last));
      this.root.addEventListener("blur", () => look(this, null));
      this.root.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const places = visible();
      if (!places.length) return;
      const here = state.at === null ? -1 : places.indexOf(state.at);
      const far = Math.max(1, Math.round(places.length / 20));
      const moves = {
        ArrowRight: here + 1, ArrowLeft: here < 0 ? places.length - 1 : here - 1, Home: 0, End: places.length - 1,
        PageDown: here + far, PageUp: here - far,
      };
      if (event.key === "Escape") zoom(first, last);
      else if (event.key in moves) look(this, places[Math.min(places.length - 1, Math.max(0, moves[event.key]))]);
      else return;
      event.preventDefault();
    }
  }

  function stepName(at) {
    const end = steps[at];
    const start = at > 0 ? steps[at - 1] + 1 : first;
    return series.width > 1 && start < end ? `steps ${start} to ${end}` : `step ${end}`;
  }

  function look(chart, at) {
    state.at = at;
    StepChart.active = chart;
    for (const one of charts) one.point();
    const readout = byId("readout");
    if (readout) readout.textContent = at === null ? "" : [stepName(at), ...chart.options.values(at)].join(", ");
  }

  // ---------------------------------------------------------------- charts over steps

  const pick = (column, places) => places.map((n) => column[n]);
  let smoothLoss = [], smoothNorm = [];

  const lossChart = new StepChart("loss", {
    height: 320,
    canLog: true,
    range: (places) => extent([
      pick(series.loss.lo, places), pick(series.loss.hi, places), pick(smoothLoss, places), data.evaluated.map((one) => one.loss),
    ]),
    positive: (places) => {
      const found = pick(series.loss.lo, places).filter((one) => isNumber(one) && one > 0);
      return found.length ? Math.min(...found) : null;
    },
    build: (chart, places, inside) => {
      const at = (column) => places.map((n) => [chart.x(steps[n]), chart.y(column[n])]);
      if (series.width > 1) inside.append(area(at(series.loss.lo), at(series.loss.hi), "band"));
      inside.append(line(at(series.loss.mean), "raw", "dot-raw"), line(at(smoothLoss), "smooth", "dot"));
      for (const what of ["base", "adapter"]) {
        const found = data.evaluated.filter((one) => one.what === what);
        if (!found.length) continue;
        const points = found.map((one) => [chart.x(one.step), chart.y(one.loss)]);
        if (what === "base") {
          const y = points[points.length - 1][1];
          inside.append(svg("line", { x1: LEFT, x2: chart.width - RIGHT, y1: y, y2: y, class: "held-base" }));
        } else {
          inside.append(line(points, "held-adapter", "held-dot"));
          for (const [x, y] of points) inside.append(svg("circle", { cx: x, cy: y, r: 3, class: "held-dot" }));
        }
      }
    },
    values: (n) => {
      const said = [`loss ${short(series.loss.mean[n])}`];
      if (series.width > 1) said.push(`from ${short(series.loss.lo[n])} to ${short(series.loss.hi[n])}`);
      said.push(`smoothed ${short(smoothLoss[n])}`);
      for (const one of data.evaluated)
        if (one.step === steps[n]) said.push(`held out, ${one.what}: ${short(one.loss)}`);
      return said;
    },
  });

  new StepChart("rate", {
    range: (places) => extent([pick(series.learning_rate, places)], 0),
    build: (chart, places, inside) =>
      inside.append(line(places.map((n) => [chart.x(steps[n]), chart.y(series.learning_rate[n])]), "plain", "dot")),
    values: (n) => [`learning rate ${short(series.learning_rate[n])}`],
  });

  new StepChart("norm", {
    range: (places) => extent([pick(series.grad_norm.lo, places), pick(series.grad_norm.hi, places)], 0),
    build: (chart, places, inside) => {
      const at = (column) => places.map((n) => [chart.x(steps[n]), chart.y(column[n])]);
      if (series.width > 1) inside.append(area(at(series.grad_norm.lo), at(series.grad_norm.hi), "band"));
      inside.append(line(at(series.grad_norm.mean), "raw", "dot-raw"), line(at(smoothNorm), "smooth", "dot"));
    },
    values: (n) => [`gradient ${short(series.grad_norm.mean[n])}`, `smoothed ${short(smoothNorm[n])}`],
  });

  const PARTS = [["compute_s", "compute", "computing"], ["copy_wait_s", "wait", "waiting for copies"], ["host_s", "host", "host"]];
  const upTo = (n, count) => {
    const found = PARTS.slice(0, count).map(([name]) => series[name][n]);
    return found.every(isNumber) ? found.reduce((a, b) => a + b, 0) : null;
  };
  new StepChart("seconds", {
    height: 240,
    format: duration,
    range: (places) => extent([places.map((n) => upTo(n, 3))], 0),
    build: (chart, places, inside) => PARTS.forEach(([, name], place) => {
      const at = (count) => places.map((n) => [chart.x(steps[n]), chart.y(upTo(n, count))]);
      inside.append(area(at(place), at(place + 1), name));
    }),
    values: (n) => {
      const whole = upTo(n, 3);
      return [`a step ${duration(series.seconds.mean[n])}`, ...PARTS.map(([name, , words]) =>
        `${words} ${duration(series[name][n])}${whole ? ` (${((series[name][n] / whole) * 100).toFixed(0)} %)` : ""}`)];
    },
  });
  legend("seconds", PARTS.map(([, name, words]) => [name, words]));
  if (data.evaluated.length) legend("loss", [["s0", "training, smoothed"], ["s1", "held out, adapter"], ["s9", "held out, base"]]);

  const USED = [["device", "device, of tensors", "l0", "s0"], ["reserved", "device, reserved", "l1", "s1"], ["host", "RAM of the process", "l2", "s2"]]
    .filter(([name]) => data.memory.some((one) => one[name]));
  const usageAt = (n) => data.memory.filter((one) => one.step <= steps[n]).pop();
  new StepChart("usage", {
    format: bytes,
    range: () => extent(USED.map(([name]) => data.memory.map((one) => one[name])), 0),
    build: (chart, places, inside) => USED.forEach(([name, , stroke, dot]) =>
      inside.append(line(data.memory.map((one) => [chart.x(one.step), chart.y(one[name])]), stroke, dot))),
    values: (n) => {
      const found = usageAt(n);
      return found ? USED.map(([name, words]) => `${words} ${bytes(found[name])}`) : ["not measured yet"];
    },
  });
  legend("usage", USED.map(([, words, , dot]) => [dot, words]));

  function legend(name, entries) {
    const host = byId(`chart-${name}`);
    if (!host || !entries.length) return;
    const list = document.createElement("ul");
    list.className = "legend";
    for (const [cls, words] of entries) {
      const item = document.createElement("li");
      item.append(svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { width: 12, height: 12, rx: 3, class: cls })), words);
      list.append(item);
    }
    host.after(list);
  }

  // ---------------------------------------------------------------- bars

  // Rows of segments; each segment tells about itself when it is pointed at. mark: a measured value, drawn across its row.
  class Bars {
    constructor(name, rows, format) {
      this.host = byId(`chart-${name}`);
      this.rows = rows;
      this.format = format;
      if (!this.host || !rows.length) return;
      this.root = svg("svg", { role: "img", "aria-label": this.host.dataset.title });
      this.host.append(this.root);
      charts.push(this);
    }

    point() {}

    draw() {
      const width = Math.max(280, this.host.clientWidth), pitch = 28, left = Math.min(180, width * 0.32);
      const height = this.rows.length * pitch + 26;
      const most = Math.max(...this.rows.map((row) => Math.max(row.mark || 0, ...row.segments.map((one) => one.from + one.size))), 1e-9);
      const x = (value) => left + (value / most) * (width - left - 20);
      this.root.replaceChildren();
      this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.root.setAttribute("height", String(height));
      const round = this.format === bytes ? byteTicks : ticks;
      const marks = round(0, most, Math.max(2, Math.floor(width / 180)));
      for (const value of marks) {
        this.root.append(svg("line", { x1: x(value), x2: x(value), y1: 0, y2: height - 22, class: "grid" }));
        this.root.append(label(x(value), height - 6, this.format(value), { "text-anchor": "middle" }));
      }
      this.rows.forEach((row, place) => {
        const y = place * pitch + 4;
        this.root.append(label(left - 10, y + 14, row.name, { "text-anchor": "end", class: "strong" }));
        for (const one of row.segments) {
          const title = svg("title", {});
          title.textContent = `${row.name}: ${one.words}`;
          const size = Math.max(0.5, x(one.from + one.size) - x(one.from));
          this.root.append(svg("rect", { x: x(one.from), y, width: size, height: 20, class: `segment ${one.cls}` }, title));
        }
        if (isNumber(row.mark)) {
          const title = svg("title", {});
          title.textContent = `${row.name}: measured ${this.format(row.mark)}`;
          const cls = row.isOver ? "peak-over" : "peak";
          this.root.append(svg("line", { x1: x(row.mark), x2: x(row.mark), y1: y - 3, y2: y + 23, class: cls }, title));
        }
      });
    }
  }

  const totals = new Map();
  for (const phase of data.phases) for (const one of phase.items) totals.set(one.owner, Math.max(totals.get(one.owner) || 0, one.bytes));
  const owners = [...totals.entries()].sort((a, b) => b[1] - a[1]).map(([owner]) => owner);
  const colour = (owner) => `s${Math.min(9, owners.indexOf(owner))}`;
  new Bars("memory", data.phases.map((phase) => {
    let from = 0;
    const segments = phase.items.map((one) => {
      const segment = { from, size: one.bytes, cls: colour(one.owner), words: `${one.owner} ${bytes(one.bytes)}` };
      from += one.bytes;
      return segment;
    });
    return { name: phase.name, segments, mark: phase.measured, isOver: isNumber(phase.measured) && phase.measured > from * 1.1 };
  }), bytes);
  legend("memory", owners.slice(0, 9).map((owner) => [colour(owner), owner]).concat(owners.length > 9 ? [["s9", "others"]] : []));

  new Bars("boot", data.boot.map((leg, place) => ({
    name: leg.name,
    segments: [{ from: leg.at - leg.seconds, size: leg.seconds, cls: `s${place % 9}`, words: `${duration(leg.seconds)}, at ${duration(leg.at)}` }],
  })), duration);

  // ---------------------------------------------------------------- controls

  function zoom(from, to) {
    state.from = Math.max(first, Math.round(from));
    state.to = Math.min(last, Math.round(to));
    if (state.to <= state.from) { state.from = Math.max(first, state.to - 1); state.to = Math.min(last, state.from + 1); }
    show();
  }

  function show() {
    const span = Math.max(1, last - first);
    const put = (id, value) => { const node = byId(id); if (node) node.textContent = value; };
    const place = (id, step) => { const node = byId(id); if (node) node.value = String(Math.round(((step - first) / span) * 1000)); };
    put("smoothing-value", state.smoothing.toFixed(2));
    put("from-value", String(state.from));
    put("to-value", String(state.to));
    place("from", state.from);
    place("to", state.to);
    smoothLoss = smoothed(series.loss.mean, state.smoothing);
    smoothNorm = smoothed(series.grad_norm.mean, state.smoothing);
    for (const one of charts) one.draw();
  }

  function on(id, event, act) {
    const node = byId(id);
    if (node) node.addEventListener(event, () => act(node));
  }
  const stepOf = (node) => first + (Number(node.value) / 1000) * (last - first);
  on("smoothing", "input", (node) => { state.smoothing = Number(node.value); show(); });
  on("from", "input", (node) => zoom(Math.min(stepOf(node), state.to - 1), state.to));
  on("to", "input", (node) => zoom(state.from, Math.max(stepOf(node), state.from + 1)));
  on("log", "change", (node) => { state.log = node.checked; show(); });
  on("reset", "click", () => zoom(first, last));

  const shown = [...document.querySelectorAll("figure.preview")];
  const slider = byId("preview-place");
  if (slider && shown.length > 1) {
    byId("preview-controls").hidden = false;
    slider.max = String(shown.length - 1);
    const turn = (to) => {
      const place = Math.min(shown.length - 1, Math.max(0, to));
      slider.value = String(place);
      byId("preview-step").textContent = `step ${shown[place].dataset.step}`;
      byId("preview-back").disabled = place === 0;
      byId("preview-on").disabled = place === shown.length - 1;
      shown.forEach((figure, n) => { figure.hidden = n !== place; });
    };
    slider.addEventListener("input", () => turn(Number(slider.value)));
    byId("preview-back").addEventListener("click", () => turn(Number(slider.value) - 1));
    byId("preview-on").addEventListener("click", () => turn(Number(slider.value) + 1));
    turn(shown.length - 1);
  }

  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(show); });
  show();
})();
