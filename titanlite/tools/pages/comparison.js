// The charts of comparison.html: another horizontal axis, smoothing, a logarithmic axis, values under the pointer.
const all = (query, from = document) => [...from.querySelectorAll(query)];
const charts = JSON.parse(document.getElementById("curves").textContent);
const frame = JSON.parse(document.getElementById("frame").textContent);
const low = frame.height - frame.bottom;

// Horizontal axes: the title, and the place of each point of a curve.
const axes = {
  step: {title: "step", places: curve => curve.points.map(point => point[0])},
  tokens: {title: "tokens seen", places: curve => curve.tokens},
  seconds: {title: "time of training in hours", places: curve => curve.seconds.map(value => value / 3600)},
};
const form = document.getElementById("how");

const number = value =>
  typeof value === "number" ? value.toLocaleString("en", {maximumSignificantDigits: 6}) : value;
const short = value => {
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: 4});
  if (size && size < 1e-3) return value.toExponential();
  return value.toLocaleString("en", {maximumSignificantDigits: 6});
};

// About `count` round numbers at equal distances around both limits, as `ticks` of pictures.py.
function ticks(from, to, count) {
  if (to <= from) {
    const room = Math.abs(from) * 0.1 || 1;
    from -= room;
    to += room;
  }
  const rough = (to - from) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * unit).find(size => size >= rough * 0.999);
  const first = Math.floor(from / step + 1e-9);
  const last = Math.ceil(to / step - 1e-9);
  return Array.from({length: last - first + 1}, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

// Marks of a logarithmic axis: powers of ten, with 2 and 5 between them where there are few.
function logarithmicTicks(from, to) {
  const first = Math.floor(Math.log10(from));
  const last = Math.ceil(Math.log10(to));
  const factors = last - first > 3 ? [1] : [1, 2, 5];
  const marks = [];
  for (let power = first; power <= last; power += 1) {
    factors.forEach(factor => marks.push(Number((factor * 10 ** power).toPrecision(12))));
  }
  const begin = marks.filter(mark => mark <= from).pop() ?? marks[0];
  const end = marks.find(mark => mark >= to && mark > begin) ?? marks[marks.length - 1];
  return marks.filter(mark => mark >= begin && mark <= end);
}

// The mean of the values before, each weighing `share` of the next; what is not finite is left out.
function smoothed(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map(value => {
    if (typeof value !== "number") return value;
    sum = sum * share + value * (1 - share);
    weight = weight * share + (1 - share);
    return sum / weight;
  });
}

// The points of a curve as they are drawn: place, value, and the value as it was logged.
function pointsOf(curve, axis, share) {
  const places = axes[axis].places(curve);
  const logged = curve.points.map(point => point[1]);
  const values = share && !curve.validation ? smoothed(logged, share) : logged;
  return values.map((value, at) => ({x: places[at], value, logged: logged[at]})).filter(point => point.x !== undefined);
}

function element(name, attributes, text) {
  const made = document.createElementNS(document.querySelector("svg").namespaceURI, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawAxes(plot, title, columns, lines, x, y) {
  const group = plot.querySelector(".axes");
  group.replaceChildren();
  lines.forEach(value => {
    group.append(element("path", {class: "grid", d: `M${frame.left} ${y(value)}H${frame.width - frame.right}`}));
    group.append(element("text", {x: frame.left - 8, y: y(value) + 4, "text-anchor": "end"}, short(value)));
  });
  columns.forEach(value => {
    group.append(element("path", {class: "grid", d: `M${x(value)} ${frame.top}V${low}`}));
    group.append(element("text", {x: x(value), y: low + 20, "text-anchor": "middle"}, short(value)));
  });
  group.append(element("text", {x: frame.width / 2, y: frame.height - 6, "text-anchor": "middle"}, title));
}

function drawCurve(group, points, isDashed, x, y, canShow) {
  group.replaceChildren();
  const color = group.dataset.color;
  let part = [];
  const finish = () => {
    if (!part.length) return;
    const line = {class: color, points: part.map(([across, up]) => `${across},${up}`).join(" ")};
    if (isDashed) line["stroke-dasharray"] = "6 4";
    group.append(element("polyline", line));
    if (isDashed || part.length === 1) {
      part.forEach(([cx, cy]) => group.append(element("circle", {class: color, cx, cy, r: 4})));
    }
    part = [];
  };
  points.forEach(point => {
    if (canShow(point)) part.push([x(point.x).toFixed(1), y(point.value).toFixed(1)]);
    else finish();
  });
  finish();
}

function draw(chart, n) {
  const plot = document.getElementById(`plot-${n}`);
  const axis = form.elements.axis.value;
  const share = Number(form.elements.smoothing.value);
  const logarithmic = form.elements.logarithmic.checked;
  const curves = chart.curves.map(curve => pointsOf(curve, axis, share));
  const canShow = point => typeof point.value === "number" && (!logarithmic || point.value > 0);
  const shown = curves.flat().filter(canShow);
  plot.querySelector(".none").toggleAttribute("hidden", shown.length > 0);
  if (!shown.length) {
    plot.querySelector(".axes").replaceChildren();
    all("[data-color]", plot).forEach(group => group.replaceChildren());
    plot.onpointermove = plot.onpointerdown = null;
    return;
  }
  const limits = pick => shown.map(pick).reduce(([from, to], one) => [Math.min(from, one), Math.max(to, one)],
                                                [Infinity, -Infinity]);
  const [left, right] = limits(point => point.x);
  const [least, most] = limits(point => point.value);
  const columns = ticks(left, right, 8);
  const lines = logarithmic ? logarithmicTicks(least, most) : ticks(chart.from_zero ? 0 : least, most, 6);
  const height = logarithmic ? Math.log10 : value => value;
  const across = (frame.width - frame.left - frame.right) / (columns[columns.length - 1] - columns[0]);
  const up = (low - frame.top) / (height(lines[lines.length - 1]) - height(lines[0]));
  const x = value => frame.left + across * (value - columns[0]);
  const y = value => low - up * (height(value) - height(lines[0]));
  drawAxes(plot, axes[axis].title, columns, lines, x, y);
  const groups = all("[data-color]", plot);
  const dots = all(".dot", plot);
  const values = all(`#values-${n} output`);
  chart.curves.forEach((curve, i) => drawCurve(groups[i], curves[i], curve.validation, x, y, canShow));
  const show = wanted => curves.forEach((points, i) => {
    if (!points.length) {
      values[i].textContent = `no ${axes[axis].title} is recorded`;
      dots[i].toggleAttribute("hidden", true);
      return;
    }
    const point = points.reduce((best, one) => Math.abs(one.x - wanted) < Math.abs(best.x - wanted) ? one : best);
    const smooth = share && number(point.value) !== number(point.logged) ? ` (smoothed ${number(point.value)})` : "";
    values[i].textContent = `${number(point.logged)}${smooth} at ${axes[axis].title} ${number(point.x)}`;
    dots[i].toggleAttribute("hidden", !canShow(point));
    if (canShow(point)) {
      dots[i].setAttribute("cx", x(point.x));
      dots[i].setAttribute("cy", y(point.value));
    }
  });
  plot.onpointermove = plot.onpointerdown = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse());
    show((point.x - frame.left) / across + columns[0]);
  };
  show(Infinity === right ? left : right);
}

const boxes = all("input[data-run]");
function update() {
  boxes.forEach(box =>
    all(`[data-of="${box.dataset.run}"]`).forEach(part => part.toggleAttribute("hidden", !box.checked)));
  form.elements.share.textContent = form.elements.smoothing.value;
  charts.forEach(draw);
}
Object.entries(axes).forEach(([name, axis]) => {
  const isKnown = charts.some(chart => chart.curves.some(curve => axis.places(curve).length));
  form.querySelector(`[value="${name}"]`).disabled = !isKnown;
});
boxes.forEach(box => box.onchange = update);
form.oninput = update;
form.onsubmit = event => event.preventDefault();
form.hidden = false;
update();  // a browser may remember what was chosen
