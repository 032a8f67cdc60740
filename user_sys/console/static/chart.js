// Charts of a run with uPlot, which the page loads before.

export const COLOURS = ["#5cc8b4", "#f0b44a", "#7fa7f5", "#e58bb5", "#a6d06a", "#c9a2f2", "#e8836b", "#8fd3ea"];
const HEIGHT = 112;
const LOG_FROM_RATIO = 20; // a positive range wider than this is drawn on a logarithmic scale
const TICKS_S = [1, 5, 15, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 86400, 172800, 604800, 2592000];
export const AXIS = {
  stroke: () => theme("--dim"), grid: { stroke: () => theme("--edge"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 40,
};

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

function decades(plot, axis, low, high) {
  const first = Math.ceil(Math.log10(low));
  return Array.from({ length: Math.floor(Math.log10(high)) - first + 1 }, (_, n) => 10 ** (first + n));
}

export class Chart {
  // Options: percent (y runs from 0 to 1), time (x is in seconds), empty (the text without points).
  constructor(parent, options) {
    this.parent = parent;
    this.options = options;
    this.show([]);
    new ResizeObserver(() => this.plot?.setSize({ width: parent.clientWidth, height: HEIGHT })).observe(parent);
  }

  show(curves) {
    const shown = curves.filter((curve) => curve.x.length > 0);
    const values = shown.flatMap((curve) => curve.y);
    const log = !this.options.percent && Math.min(...values) * LOG_FROM_RATIO < Math.max(...values) && Math.min(...values) > 0;
    const kind = [log, ...shown.map((curve) => curve.name)].join();
    const content = shown.length ? uPlot.join(shown.map((curve) => [curve.x, curve.y])) : [];
    if (kind === this.kind) return this.plot?.setData(content);
    this.kind = kind;
    this.plot?.destroy();
    this.parent.textContent = shown.length ? "" : this.options.empty;
    this.plot = shown.length ? new uPlot(this.describe(shown, log), content, this.parent) : null;
  }

  describe(curves, log) {
    const { percent, time } = this.options;
    const say = (word) => (_, ticks) => ticks.map((tick) => (tick === null ? "" : word(tick)));
    const series = curves.map((curve, i) => ({
      label: curve.name.split("/").at(-1).replaceAll("_", " "), stroke: COLOURS[i % COLOURS.length], width: 1.8, spanGaps: true, points: { size: 4 },
    }));
    return {
      width: this.parent.clientWidth, height: HEIGHT, cursor: { drag: { x: false } }, legend: { show: curves.length > 1, live: false },
      scales: {
        x: { time: false, range: (_, low, high) => [time ? 0 : low, Math.max(high, low + 1)] },
        y: percent ? { range: [0, 1] } : { distr: log ? 3 : 1 },
      },
      axes: [
        { ...AXIS, size: 20, incrs: time ? TICKS_S : undefined, values: say(time ? minutes : short) },
        { ...AXIS, values: say(percent ? (share) => `${Math.round(100 * share)}%` : short), splits: percent ? [0, 0.5, 1] : log ? decades : undefined },
      ],
      series: [{}, ...series],
    };
  }
}
