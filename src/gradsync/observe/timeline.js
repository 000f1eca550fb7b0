// Drawings of a recording: the lanes of a step, the bucket map, the ranks' own time. Shared by several pages.
// Everything in a recording is put into the page as text, never as markup.
const TIMELINE_WORDS = {
  en: {
    rank: "rank", optimizer: "optimizer", data: "data", forward: "forward and loss", backward: "backward",
    finish: "end of the pass", hidden: "all-reduce, hidden under computation", exposed: "all-reduce, exposed: the rank waits",
    bucket: "bucket", ready: "ready", launched: "launched", done: "done", waited: "waited", pass: (number) => `pass ${number}`, choose: "pass", zoom: "backward only",
    holds: "holds", parameters: "parameters", mostly: "mostly", touch: "Touch or point at a bar to read its times.", touchMap: "Touch or point at a piece to read its name and size.",
    carries: "carries", backend: "backend", ranks: "ranks", carried: {}, step: (number) => `step ${number}`, part: "a stage computes a micro-batch",
  },
  zh: {
    rank: "rank", optimizer: "优化器", data: "等数据", forward: "前向与损失", backward: "反向",
    finish: "收尾", hidden: "all-reduce，被计算掩盖", exposed: "all-reduce，暴露在外：进程在等",
    bucket: "桶", ready: "就绪", launched: "发出", done: "完成", waited: "等待", pass: (number) => `第 ${number} 次同步`, choose: "同步的序号", zoom: "只看反向",
    holds: "装着", parameters: "个参数", mostly: "主要是", touch: "点按或指向色条可读出时间。", touchMap: "点按或指向色块可读出名字和大小。",
    carries: "承载", backend: "后端", ranks: "rank", step: (number) => `第 ${number} 步`, part: "流水线的一段在计算一个微批",
    carried: {"buckets": "桶", "control words": "控制字", "buckets and control words": "桶和控制字"},
  },
};
const darker = (colour) => `color-mix(in srgb, var(${colour}) 60%, var(--ink))`;
const PHASE_COLOURS = {
  optimizer: "var(--c3)", data: "var(--c4)", forward: "var(--c2)", backward: "var(--c0)", finish: "var(--line)",
  "forward and backward": "var(--c0)", "gradient norm": "var(--c2)", evaluation: darker("--c2"), checkpoint: darker("--c4"), sample: darker("--c3"), "between steps": "var(--line)",
};
const LIGHT_PHASES = ["finish", "between steps"];

const timelineWords = () => TIMELINE_WORDS[document.documentElement.lang] ?? TIMELINE_WORDS.en;

function node(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function ms(seconds) {
  const value = seconds * 1e3;
  return `${value < 1 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en")} ms`;
}

function bytes(count) {
  if (count >= 2 ** 20) return `${(count / 2 ** 20).toFixed(1)} MiB`;
  return count >= 2 ** 10 ? `${(count / 2 ** 10).toFixed(1)} KiB` : `${count} B`;
}

// Draws again whenever the width of its place changes, in real pixels, so that text stays readable on a phone.
function drawnToFit(place, draw) {
  let width = 0;
  const fit = () => {
    const now = Math.max(place.clientWidth - 30, 280);
    if (now !== width) { width = now; draw(now); }
  };
  new ResizeObserver(fit).observe(place);
  fit();
}

function sayOnTouch(image, read) {
  const say = (event) => {
    const said = event.target.getAttribute?.("data-say");
    if (said) read.textContent = said;
  };
  image.addEventListener("pointermove", say);
  image.addEventListener("pointerdown", say);
}

function timeTicks(length, count) {
  const rough = length / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let tick = 0; tick <= length * 1.0001; tick += step) found.push(tick);
  return found;
}

// Bars that overlap in time go to different rows.
function inRows(bars) {
  const ends = [];
  for (const bar of bars) {
    let row = ends.findIndex((end) => end <= bar.from);
    if (row < 0) { row = ends.length; ends.push(0); }
    ends[row] = bar.to;
    bar.row = row;
  }
  return ends.length;
}

function lanesOf(recording, index, isZoomed) {
  const lanes = [];
  for (const rank of recording.ranks) {
    const record = rank.passes[index];
    if (!record) continue;
    const base = record.began_s + rank.offset_s, at = (seconds) => base + seconds;
    const spans = record.spans.filter((span) => !isZoomed || ["backward", "finish"].includes(span.phase));
    const ends = record.spans.filter((span) => span.phase === "backward").map((span) => at(span.end_s));
    const local = Math.max(...ends, ...(record.local_s === undefined ? [] : [at(record.local_s)]));
    const buckets = record.buckets.filter((one) => one.launched_s !== null && one.done_s !== null)
      .map((one) => ({...one, from: at(one.launched_s), to: at(Math.max(one.done_s, one.launched_s))}));
    const parts = (record.parts ?? []).map((one) => ({...one, from: at(one.start_s), to: at(one.end_s)}));
    lanes.push({rank, record, at, local, buckets, parts, rows: inRows(buckets), spans: spans.map((span) => ({...span, from: at(span.start_s), to: at(span.end_s)})),
      gradients: (record.gradients ?? []).map((one) => ({...one, when: at(one.at_s)}))});
  }
  return lanes;
}

function drawTimeline(place, recording, options = {}) {
  const words = timelineWords(), numPasses = Math.min(...recording.ranks.map((rank) => rank.passes.length));
  if (!numPasses) return;
  let index = options.pass ?? numPasses - 1, isZoomed = false, width = 0;
  const box = node("div", {class: "timeline"}), header = node("header"), read = node("div", {class: "read"}, words.touch);
  const label = node("span"), zoom = node("input", {type: "checkbox"});
  if (numPasses > 1 && !options.isFixed) {
    const slider = node("input", {type: "range", min: 0, max: numPasses - 1, value: index, "aria-label": words.choose});
    slider.addEventListener("input", () => { index = Number(slider.value); draw(width); });
    header.append(node("label", {}, slider, " "), label);
  } else header.append(label);
  const records = recording.ranks.flatMap((rank) => rank.passes), phases = new Set(records.flatMap((record) => record.spans.map((span) => span.phase)));
  zoom.addEventListener("change", () => { isZoomed = zoom.checked; draw(width); });
  if (phases.has("backward")) header.append(node("label", {}, zoom, ` ${words.zoom}`));
  const named = Object.keys(PHASE_COLOURS).filter((phase) => phases.has(phase)), hasBuckets = records.some((record) => record.buckets.length);
  const keys = [...named.map((phase) => [PHASE_COLOURS[phase], words[phase] ?? phase]), ...(hasBuckets ? [["var(--c5)", words.hidden], ["var(--c1)", words.exposed]] : [])];
  if (records.some((record) => record.parts?.length)) keys.push(["var(--ink)", words.part]);
  const legend = node("ul", {class: "keys"}, ...keys.map(([colour, text]) => node("li", {}, node("span", {class: "swatch", style: `background:${colour}`}), text)));
  box.append(header, read, legend);
  place.append(box);

  function draw(newWidth) {
    width = newWidth;
    const lanes = lanesOf(recording, index, isZoomed);
    const all = lanes.flatMap((lane) => [...lane.spans, ...lane.buckets]);
    const partHeight = (lane) => lane.parts.length ? 10 : 0;
    const start = Math.min(...all.map((bar) => bar.from)), end = Math.max(...all.map((bar) => bar.to));
    const left = 8, right = 8, x = (when) => left + (when - start) / (end - start || 1) * (width - left - right);
    const rowHeight = 13, laneHeight = (lane) => 20 + 22 + 8 + partHeight(lane) + lane.rows * rowHeight + 12;
    const height = 18 + lanes.reduce((sum, lane) => sum + laneHeight(lane), 0);
    const image = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": recording.verdict});
    for (const tick of timeTicks(end - start, width < 500 ? 3 : 8)) {
      image.append(shape("line", {x1: x(start + tick), x2: x(start + tick), y1: 16, y2: height, stroke: "var(--grid)"}));
      image.append(shape("text", {x: x(start + tick), y: 11, "text-anchor": tick === 0 ? "start" : x(start + tick) > width - 30 ? "end" : "middle"}, tick === 0 ? "0" : ms(tick)));
    }
    let top = 18;
    for (const lane of lanes) {
      drawLane(image, lane, top, x, rowHeight, partHeight(lane));
      top += laneHeight(lane);
    }
    box.querySelector("svg")?.remove();
    box.insertBefore(image, read);
    sayOnTouch(image, read);
    label.textContent = (lanes[0].record.parts ? words.step : words.pass)(lanes[0].record.number);
  }

  function drawLane(image, lane, top, x, rowHeight, partHeight) {
    const bar = (from, to, y, height, colour, say) => image.append(shape("rect", {x: x(from).toFixed(2), width: Math.max(x(to) - x(from), 1).toFixed(2), y, height, rx: 2, fill: colour, "data-say": say}));
    image.append(shape("text", {x: 8, y: top + 13, class: "name"}, `${words.rank} ${lane.rank.rank}`));
    for (const span of lane.spans) {
      const name = words[span.phase] ?? span.phase;
      bar(span.from, span.to, top + 20, 20, PHASE_COLOURS[span.phase] ?? "var(--line)", `${words.rank} ${lane.rank.rank}, ${name}: ${ms(span.to - span.from)}`);
      if (x(span.to) - x(span.from) > name.length * 7 + 8 && !LIGHT_PHASES.includes(span.phase))
        image.append(shape("text", {x: x(span.from) + 5, y: top + 34, style: "fill:#fff"}, name));
    }
    for (const part of lane.parts)
      bar(part.from, part.to, top + 43, 8, "var(--ink)", `${words.rank} ${lane.rank.rank}, ${part.name}: ${ms(part.to - part.from)}`);
    for (const one of lane.gradients)
      image.append(shape("line", {x1: x(one.when), x2: x(one.when), y1: top + 36, y2: top + 42, stroke: "var(--ink)", "stroke-width": 1}));
    for (const one of lane.buckets) {
      const y = top + 48 + partHeight + one.row * rowHeight, name = (lane.rank.buckets ?? recording.buckets)[one.number]?.parameters ?? [];
      const say = `${words.rank} ${lane.rank.rank}, ${words.bucket} ${one.number}: ${words.launched} ${ms(one.launched_s)}, ${words.done} ${ms(one.done_s)}, ${words.waited} ${ms(one.wait_s ?? 0)}` + (name.length ? `; ${words.holds} ${name.slice(0, 3).map((p) => p.name).join(", ")}${name.length > 3 ? " …" : ""}` : "");
      // what was waited for is its end; where nobody has seen the wait, what is behind this rank's own backward
      const turn = Math.min(Math.max(one.wait_s === null ? lane.local : one.to - one.wait_s, one.from), one.to);
      if (turn > one.from) bar(one.from, turn, y, rowHeight - 3, "var(--c5)", say);
      if (one.to > turn) bar(turn, one.to, y, rowHeight - 3, "var(--c1)", say);
      if (one.ready_s !== null)
        image.append(shape("circle", {cx: x(lane.at(one.ready_s)), cy: top + 45 + partHeight, r: 2.2, fill: "var(--c5)"}));
      if (x(one.to) - x(one.from) > 24)
        image.append(shape("text", {x: x(one.from) + 3, y: y + 9, style: "fill:#fff;font-size:9px;pointer-events:none"}, String(one.number)));
    }
  }

  drawnToFit(box, draw);
}

// One bar a bucket, as long as its bytes; one piece a parameter.
function drawBucketMap(place, buckets) {
  const words = timelineWords(), largest = Math.max(...buckets.map((bucket) => bucket.num_bytes), 1);
  const box = node("div", {class: "timeline"}), read = node("div", {class: "read"}, words.touchMap);
  box.append(read);
  place.append(box);
  drawnToFit(box, (width) => {
    const rowHeight = 38, image = shape("svg", {viewBox: `0 0 ${width} ${buckets.length * rowHeight}`, role: "img"});
    buckets.forEach((bucket, row) => {
      const y = row * rowHeight, scale = (width - 2) / largest, most = [...bucket.parameters].sort((a, b) => b.num_bytes - a.num_bytes)[0];
      const room = Math.floor((width - 8) / 6.3), count = width < 500 ? "" : ` · ${bucket.parameters.length} ${words.parameters}`;
      const title = `${words.bucket} ${bucket.number} · ${bytes(bucket.num_bytes)}${count}${most ? ` · ${words.mostly} ${most.name}` : ""}`;
      image.append(shape("text", {x: 1, y: y + 12, class: "name"}, title.length > room ? `${title.slice(0, room - 1)}…` : title));
      bucket.parameters.forEach((one, index) => image.append(shape("rect", {
        x: (1 + one.offset_bytes * scale).toFixed(2), width: Math.max(one.num_bytes * scale - (one.num_bytes * scale > 3 ? 1 : 0), 0.5).toFixed(2), y: y + 17, height: 15,
        fill: `var(--c${bucket.number % 6})`, opacity: index % 2 ? .62 : .92, "data-say": `${one.name}: ${bytes(one.num_bytes)}`})));
    });
    box.querySelector("svg")?.remove();
    box.insertBefore(image, read);
    sayOnTouch(image, read);
  });
}

// One bar a rank: the time that it needs by itself between two passes.
function drawRankTimes(place, times) {
  const words = timelineWords(), phases = ["data", "forward", "backward", "optimizer"];
  if (!times.length) return;
  const total = (one) => phases.reduce((sum, phase) => sum + one[`${phase}_s`], 0), longest = Math.max(...times.map(total)) || 1;
  const box = node("div", {class: "timeline"}), read = node("div", {class: "read"}, words.touch);
  box.append(read);
  place.append(box);
  drawnToFit(box, (width) => {
    const image = shape("svg", {viewBox: `0 0 ${width} ${times.length * 40}`, role: "img"});
    times.forEach((one, row) => {
      image.append(shape("text", {x: 1, y: row * 40 + 12, class: "name"}, `${words.rank} ${one.rank} · ${ms(total(one))}`));
      let x = 1;
      for (const phase of phases) {
        const length = one[`${phase}_s`] / longest * (width - 2);
        image.append(shape("rect", {x: x.toFixed(2), width: Math.max(length, 0).toFixed(2), y: row * 40 + 17, height: 16, fill: PHASE_COLOURS[phase], "data-say": `${words.rank} ${one.rank}, ${words[phase]}: ${ms(one[`${phase}_s`])}`}));
        x += length;
      }
    });
    box.querySelector("svg")?.remove();
    box.insertBefore(image, read);
    sayOnTouch(image, read);
  });
}

function drawGroups(place, groups) {
  const words = timelineWords(), table = node("table");
  table.append(node("tr", {}, ...[words.carries, words.backend, words.ranks].map((text) => node("th", {}, text))));
  for (const group of groups)
    table.append(node("tr", {}, ...[words.carried[group.carries] ?? group.carries, group.backend, group.ranks.join(", ")].map((text) => node("td", {}, text))));
  place.append(node("div", {class: "scroll"}, table));
}
