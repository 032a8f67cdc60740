// Small line charts on a canvas.

export const COLOURS = ["#5cc8b4", "#f0b44a", "#7fa7f5", "#e58bb5", "#a6d06a", "#c9a2f2", "#e8836b", "#8fd3ea"];
const FONT = "11px system-ui, sans-serif";
const LOG_FROM_RATIO = 20; // a positive range wider than this is drawn on a logarithmic scale

// A colour of the present theme, such as "--dim".
export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function minutes(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const rest = `${String(Math.floor(s / 60) % 60).padStart(s >= 3600 ? 2 : 1, "0")}:${String(s % 60).padStart(2, "0")}`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${rest}` : rest;
}

export function short(n) {
  const size = Math.abs(n);
  if (size >= 1e6) return `${(n / 1e6).toFixed(size >= 1e7 ? 0 : 1)}M`;
  if (size >= 1e4) return `${(n / 1e3).toFixed(0)}k`;
  if (size >= 100 || Number.isInteger(n)) return n.toFixed(0);
  return size >= 0.01 || n === 0 ? String(Number(n.toPrecision(2))) : n.toExponential(0);
}

export class Chart {
  // Options: percent (y runs from 0 to 1), time (x is in seconds), empty (the text without points).
  constructor(canvas, options) {
    this.canvas = canvas;
    this.options = options;
    this.curves = [];
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(curves) {
    this.curves = curves.filter((curve) => curve.x.length > 0);
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = FONT;
    if (this.curves.length === 0) return this.sayEmpty(pen, width, height);
    const legend = this.curves.length > 1 ? 18 * this.legendRows(pen, width) : 0;
    const area = { left: 38, right: width - 10, top: 8 + legend, bottom: height - 20 };
    const x = this.scaleX(area);
    const y = this.scaleY(area);
    this.drawAxes(pen, area, x, y);
    this.curves.forEach((curve, i) => drawCurve(pen, curve, x, y, COLOURS[i % COLOURS.length]));
    if (legend) this.drawLegend(pen, width);
  }

  sayEmpty(pen, width, height) {
    pen.fillStyle = theme("--dim");
    pen.textAlign = "center";
    pen.fillText(this.options.empty, width / 2, height / 2);
  }

  scaleX(area) {
    const last = Math.max(...this.curves.map((c) => c.x[c.x.length - 1]));
    const first = this.options.time ? 0 : Math.min(...this.curves.map((c) => c.x[0]));
    const span = last - first || 1;
    const at = (value) => area.left + ((value - first) / span) * (area.right - area.left);
    return { at, ticks: [0, 0.5, 1].map((share) => first + share * span) };
  }

  scaleY(area) {
    const height = area.bottom - area.top;
    if (this.options.percent) return { at: (v) => area.bottom - v * height, ticks: [0, 0.5, 1] };
    const values = this.curves.flatMap((c) => c.y);
    const low = Math.min(...values);
    const high = Math.max(...values);
    if (low > 0 && high / low > LOG_FROM_RATIO) return logScale(low, high, area);
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    const [from, to] = [low - pad, high + pad];
    const at = (v) => area.bottom - ((v - from) / (to - from)) * height;
    return { at, ticks: [low, (low + high) / 2, high] };
  }

  drawAxes(pen, area, x, y) {
    pen.strokeStyle = theme("--edge");
    pen.fillStyle = theme("--dim");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const tick of y.ticks) {
      line(pen, area.left, y.at(tick), area.right, y.at(tick));
      pen.fillText(this.options.percent ? `${Math.round(tick * 100)}%` : short(tick), area.left - 6, y.at(tick));
    }
    pen.textBaseline = "top";
    x.ticks.forEach((tick, i) => {
      pen.textAlign = ["left", "center", "right"][i];
      pen.fillText(this.options.time ? minutes(tick) : short(Math.round(tick)), x.at(tick), area.bottom + 6);
    });
  }

  legendPlaces(pen, width) {
    let [left, row] = [38, 0];
    return this.curves.map((curve) => {
      const size = pen.measureText(label(curve)).width + 26;
      if (left + size > width && left > 38) [left, row] = [38, row + 1];
      left += size;
      return { left: left - size, row };
    });
  }

  legendRows(pen, width) {
    return this.legendPlaces(pen, width).at(-1).row + 1;
  }

  drawLegend(pen, width) {
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    this.legendPlaces(pen, width).forEach(({ left, row }, i) => {
      pen.fillStyle = COLOURS[i % COLOURS.length];
      pen.fillRect(left, 6 + row * 18, 10, 3);
      pen.fillStyle = theme("--dim");
      pen.fillText(label(this.curves[i]), left + 14, 8 + row * 18);
    });
  }
}

function label(curve) {
  return curve.name.split("/").at(-1).replaceAll("_", " ");
}

function logScale(low, high, area) {
  const [from, to] = [Math.log10(low), Math.log10(high)];
  const at = (v) => area.bottom - ((Math.log10(v) - from) / (to - from)) * (area.bottom - area.top);
  return { at, ticks: [0, 0.5, 1].map((share) => 10 ** (from + share * (to - from))) };
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, Math.round(y0) + 0.5);
  pen.lineTo(x1, Math.round(y1) + 0.5);
  pen.stroke();
}

function drawCurve(pen, curve, x, y, colour) {
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = 1.8;
  pen.lineJoin = "round";
  pen.beginPath();
  curve.x.forEach((value, i) => pen.lineTo(x.at(value), y.at(curve.y[i])));
  pen.stroke();
  pen.beginPath();
  pen.arc(x.at(curve.x.at(-1)), y.at(curve.y.at(-1)), 2.5, 0, 2 * Math.PI);
  pen.fill();
}
